"""Linear layers whose products are rounded to FP8, written anew in float64 and without torch's types: the reference for `model.float8`.

A row is divided by the smallest power of two with which its largest value is at most 448, and rounded to 4 significant bits, below
2**-6 to multiples of 2**-9. Products of these values are float32 products.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

LARGEST, SMALLEST_EXPONENT, SIGNIFICANT_BITS = 448.0, -6, 4


def rounded(rows: torch.Tensor) -> torch.Tensor:
    """Return a matrix (R, K) with the values that its rows have in FP8, float32."""
    values = rows.detach().double().numpy()
    scales = np.ones((len(values), 1))
    for row, largest in enumerate(np.abs(values).max(-1)):
        if largest > 0:
            scales[row] = 2.0 ** (np.ceil(np.log2(largest)) - 9)
            if largest / scales[row] > LARGEST:
                scales[row] *= 2
    scaled = values / scales
    exponents = np.maximum(np.frexp(scaled)[1] - 1, SMALLEST_EXPONENT)
    steps = 2.0 ** (exponents - (SIGNIFICANT_BITS - 1))
    return torch.from_numpy(np.rint(scaled / steps) * steps * scales).float()


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Return the product (M, N) of a matrix (M, K) and the transpose of another (N, K), both rounded to FP8."""
    return (rounded(left) @ rounded(right).t()).to(left.dtype)


class ReferenceProduct(torch.autograd.Function):
    """The product of inputs (N, I) and a weight (O, I), in pieces of equal numbers of rows, whose gradients are added."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, pieces: int) -> torch.Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.pieces = pieces
        return torch.cat([product(piece, weight) for piece in inputs.chunk(pieces)])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        inputs, weight = ctx.saved_tensors
        of_pieces = grads[0].chunk(ctx.pieces)
        of_inputs = torch.cat([product(piece, weight.t()) for piece in of_pieces])
        of_weight = sum(grad.t() @ piece for grad, piece in zip(of_pieces, inputs.chunk(ctx.pieces), strict=True))
        return of_inputs, of_weight if ctx.needs_input_grad[1] else None, None


def use_reference(model: Any, pieces: int = 1, skip: Any = lambda name: False) -> Any:
    """Compute a plain model's linear layers in blocks by `ReferenceProduct`, except those that ``skip`` names; return the model."""
    decoder = model.get_decoder()
    for index, block in enumerate(decoder.layers):
        for name, layer in block.named_modules():
            if isinstance(layer, nn.Linear) and not skip(f"{index}.{name}"):
                layer.forward = _forward(layer, pieces)
    return model


def _forward(layer: nn.Linear, pieces: int) -> Any:
    def forward(inputs: torch.Tensor) -> torch.Tensor:
        rows = inputs.reshape(-1, inputs.shape[-1])
        output = ReferenceProduct.apply(rows, layer.weight, pieces).view(*inputs.shape[:-1], -1)
        return output if layer.bias is None else output + layer.bias.to(output.dtype)

    return forward


def plain_forward(layer: nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    """Return the output of a linear layer without FP8."""
    return F.linear(inputs, layer.weight, layer.bias)
