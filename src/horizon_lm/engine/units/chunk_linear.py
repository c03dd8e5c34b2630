"""The head's projection of one chunk, whose backward pass adds the weight's gradient to a buffer.

Shapes: N tokens of a chunk, H hidden size, V vocabulary.
"""

from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

_ROW_BLOCK = 4096  # rows of the head's gradient (V, H) computed at a time if its buffer has another dtype


class ChunkLinear(torch.autograd.Function):
    """A replacement of ``F.linear`` whose backward pass adds the gradients of weight and bias to buffers.

    Autograd would compute a gradient (V, H) for each chunk and add it to the sum, which takes two more tensors of the
    head's size. The gradient of a bias without a buffer (an outer parameter, if the head is tied) is returned.

    Its arguments are those of ``F.linear``, the buffers by the names ``weight`` and ``bias``, and whether to overwrite the buffers.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, grads: dict[str, torch.Tensor],
        overwrite: bool,
    ) -> torch.Tensor:  # fmt: skip
        # Cast explicitly, because autocast does not apply inside of an autograd function.
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        ctx.save_for_backward(x, weight)
        ctx.grads, ctx.overwrite = grads, overwrite
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        flat, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])  # (N, V), (N, H)
        if "weight" in ctx.grads:
            _add_product(ctx.grads["weight"], flat, inputs, ctx.overwrite)
        bias_grad = None
        if "bias" in ctx.grads:
            total = ctx.grads["bias"]
            total.copy_(flat.sum(0) if ctx.overwrite else total + flat.sum(0))
        elif ctx.needs_input_grad[2]:
            bias_grad = flat.sum(0)
        return grad.matmul(weight.to(grad.dtype)), None, bias_grad, None, None  # (1, N, V) x (V, H) -> (1, N, H)


def _add_product(total: torch.Tensor, grad: torch.Tensor, inputs: torch.Tensor, overwrite: bool) -> None:
    """Add ``grad^T inputs`` to ``total`` (V, H), from grad (N, V) and inputs (N, H), without a second (V, H) tensor.

    Args:
        total: the sum over chunks.
        grad: gradient of the chunk's logits.
        inputs: inputs of the projection.
        overwrite: put the product into ``total`` instead of adding it.
    """
    if total.dtype == grad.dtype == inputs.dtype:
        torch.addmm(total, grad.t(), inputs, beta=0 if overwrite else 1, out=total)
        return
    # addmm cannot write to another dtype (a float32 sum of bfloat16 products): products are computed some rows at a time.
    for start in range(0, total.shape[0], _ROW_BLOCK):
        rows = total[start : start + _ROW_BLOCK]
        product = grad[:, start : start + _ROW_BLOCK].t().matmul(inputs)
        if overwrite:
            rows.copy_(product)
        else:
            rows.add_(product)
