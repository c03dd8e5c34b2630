"""The head's projection of one chunk, whose backward pass adds the weight's gradient to a buffer.

Shapes: N tokens of a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from horizon_lm.common.ranges import pieces

_ROW_BLOCK = 4096  # rows of the head's gradient (V, H) computed at a time if its buffer has another dtype


Target = Callable[[], tuple[torch.Tensor, bool]]
"""Function that returns the buffer of a gradient, and whether to add to what is in it."""


class ChunkLinear(torch.autograd.Function):
    """A replacement of ``F.linear`` whose backward pass adds the gradients of weight and bias to buffers.

    Autograd would compute a gradient (V, H) for each chunk and add it to the sum, which takes two more tensors of the
    head's size. The gradient of a bias without a buffer (an outer parameter, if the head is tied) is returned to autograd.

    Its arguments are those of ``F.linear``; the targets of gradients, by the names ``weight`` and ``bias``; and whether a chunk's product
    may be added to a float32 buffer unrounded, where the device can do that: plain autograd rounds it to the dtype of the logits.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, grads: Mapping[str, Target], unrounded: bool
    ) -> torch.Tensor:  # fmt: skip
        # Cast explicitly, because autocast does not apply inside of an autograd function. The meta device, on which a plan tries
        # this, has no autocast.
        device = x.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            x = x.to(torch.get_autocast_dtype(device))
        ctx.save_for_backward(x, weight)
        ctx.grads, ctx.unrounded = grads, unrounded
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        flat_grad, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])  # (N, V), (N, H)
        if "weight" in ctx.grads:
            total, adds = ctx.grads["weight"]()
            _add_product(total, adds, flat_grad, inputs, ctx.unrounded)
        bias_grad = None
        if "bias" in ctx.grads:
            total, adds = ctx.grads["bias"]()
            total.copy_(total + flat_grad.sum(0) if adds else flat_grad.sum(0))
        elif ctx.needs_input_grad[2]:
            bias_grad = flat_grad.sum(0)
        return grad.matmul(weight.to(grad.dtype)), None, bias_grad, None, None  # (1, N, V) x (V, H) -> (1, N, H)


def _add_product(total: torch.Tensor, adds: bool, grad: torch.Tensor, inputs: torch.Tensor, unrounded: bool) -> None:
    """Put ``grad^T inputs`` into ``total`` (V, H), from grad (N, V) and inputs (N, H), without a second (V, H) tensor.

    Args:
        total: the sum over chunks.
        adds: add the product to what is in ``total``.
        grad: gradient of the chunk's logits.
        inputs: inputs of the projection.
        unrounded: as in `ChunkLinear`.
    """
    beta = 1 if adds else 0
    if total.dtype == grad.dtype == inputs.dtype:
        torch.addmm(total, grad.t(), inputs, beta=beta, out=total)
        return
    if unrounded and total.dtype == torch.float32 and grad.dtype == inputs.dtype and _can_add(grad.dtype, total.device):
        torch.addmm(total, grad.t(), inputs, out_dtype=torch.float32, beta=beta, out=total)
        return
    # A product that is rounded to another dtype than that of the sum is computed some rows at a time.
    for rows in pieces(total.shape[0], _ROW_BLOCK):
        product = grad[:, rows].t().matmul(inputs)
        if adds:
            total[rows].add_(product)
        else:
            total[rows].copy_(product)


@cache
def _can_add(dtype: torch.dtype, device: torch.device) -> bool:
    """Return whether a device adds products of this dtype to a float32 sum in place, which torch has for some devices."""
    factor = torch.ones((16, 16), dtype=dtype, device=device)
    total = torch.ones_like(factor, dtype=torch.float32)
    try:
        torch.addmm(total, factor, factor, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):  # no such kernel, or no such argument in an older torch
        return False
    return bool((total == 17).all())  # 1, and the sum of 16 products of ones
