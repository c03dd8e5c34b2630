"""A linear layer whose products are computed in FP8, as far as its weight is cast.

Shapes: N tokens, I input width, O output width.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from horizon_lm.model.float8.casting import CastRows, CastWeight, cast_rows, multiply, multiply_gradients
from horizon_lm.model.lazy_products import plain_operations, require_computed


def compute(layer: nn.Linear, cast: CastWeight, inputs: torch.Tensor) -> torch.Tensor:
    """Return the output (..., O) of a linear layer for inputs (..., I), with its products in FP8."""
    device = inputs.device.type
    if device != "meta" and torch.is_autocast_enabled(device):
        inputs = inputs.to(torch.get_autocast_dtype(device))
    flat_inputs = inputs.reshape(-1, layer.in_features)
    columns = (None, None) if cast.columns is None else cast.columns
    output = _Product.apply(flat_inputs, layer.weight, *cast.rows, *columns, layer.weight.requires_grad)
    if not torch.compiler.is_compiling() and not output.requires_grad:
        require_computed(output)  # code may read what has no gradient in ways that `LazyProducts` does not see
    output = output.view(*inputs.shape[:-1], layer.out_features)
    return output if layer.bias is None else output + layer.bias.to(output.dtype)


class _Product(torch.autograd.Function):
    """The product of inputs (N, I) and a weight (O, I). The gradient of the inputs is computed in FP8, the gradient of the weight is not.

    The weight is also given as cast by rows (codes and scales), and as cast by columns for the gradient of the inputs; the latter is None
    without one.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor,
        column_codes: torch.Tensor | None, column_scales: torch.Tensor | None, is_trained: bool,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(inputs if is_trained else None, column_codes, column_scales)
        # Inside, so that a recompute leaves out the product as a whole (`LazyProducts`); compiled code has no such mode.
        whole = nullcontext() if torch.compiler.is_compiling() else plain_operations()
        with _without_autocast(inputs), whole:
            return multiply(cast_rows(inputs), CastRows(codes, scales), inputs.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        inputs, codes, scales = ctx.saved_tensors
        of_inputs = multiply_gradients(cast_rows(grad), CastRows(codes, scales), grad.dtype)
        of_weight = None if inputs is None else grad.t() @ inputs
        return of_inputs, of_weight, None, None, None, None, None


def _without_autocast(inputs: torch.Tensor) -> AbstractContextManager[Any]:
    """Context manager: switch off autocast on a CPU, which would multiply the values in bfloat16."""
    is_on = inputs.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    return torch.autocast("cpu", enabled=False) if is_on else nullcontext()
