"""Cast the rows of matrices to FP8, and multiply what is cast.

Every row has a scale of its own, a power of two: the smallest with which the row's largest value fits. Multiplying by it rounds
nothing, so a cast rounds each value once, to the 4 significant bits of e4m3. Casts follow torchao's recipe `rowwise`.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from horizon_lm.model.lazy_products import STAND_INS

CODES = torch.float8_e4m3fn
_MAX_EXPONENT = 8  # the largest value of e4m3 is 448, or 1.75 * 2**8
_LARGER_MANTISSA = 0x1FFFFF  # carries a float32 with a larger mantissa than 1.75 over to the next exponent
_MANTISSA_BITS = 23
_NOT_FINITE = 255  # the exponent's bits of infinity

CAST = STAND_INS
"""The attribute of a layer that has its `CastWeight`, while there is one."""


class CastRows(NamedTuple):
    """A matrix (R, K) in FP8: ``codes * scales``.

    Attributes:
        codes: values in e4m3, (R, K), contiguous.
        scales: the scale of each row, float32, (R, 1).
    """

    codes: torch.Tensor
    scales: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """The bytes of codes and scales."""
        return self.codes.nbytes + self.scales.nbytes


def cast_rows(matrix: torch.Tensor) -> CastRows:
    """Return a matrix (R, K) in FP8. A row with a value that is not finite has products that are not finite."""
    largest = torch.linalg.vector_norm(matrix, float("inf"), -1, keepdim=True).float()
    # The exponent's bits of each scale, from the bits of the largest value, because a logarithm would round. At least 1, because a scale
    # of 0 has no reciprocal. Rows that are not finite get an infinite scale; the comparison is false for NaN, too.
    exponent = ((largest.view(torch.int32) + _LARGER_MANTISSA) >> _MANTISSA_BITS) - _MAX_EXPONENT
    exponent = torch.where(largest < float("inf"), exponent.clamp(min=1), _NOT_FINITE)
    scales = (exponent << _MANTISSA_BITS).view(torch.float32)
    # In the dtype of the matrix, whose memory is less than float32's; float16 has too few exponents.
    dtype = torch.float32 if matrix.dtype == torch.float16 else matrix.dtype
    return CastRows((matrix * scales.reciprocal().to(dtype)).to(CODES).contiguous(), scales)


def multiply(left: CastRows, right: CastRows, dtype: torch.dtype) -> torch.Tensor:
    """Return the product (M, N) of a matrix (M, K) and the transpose of another (N, K), summed in float32.

    A CPU multiplies the values in float32, so its result is that of a float32 product of ``codes * scales``. Hopper adds in fewer bits
    (fast accumulation), as in torchao's recipe for outputs.
    """
    scales = left.scales, right.scales.t()
    kernel_dtype = _dtype_of_kernel(left, dtype)
    product = torch._scaled_mm(left.codes, right.codes.t(), *scales, out_dtype=kernel_dtype, use_fast_accum=True)
    return product.to(dtype)


def multiply_gradients(left: CastRows, right: CastRows, dtype: torch.dtype) -> torch.Tensor:
    """Return the product as `multiply` does, without fast accumulation."""
    # A CPU always sums in float32, and its kernel with a single scale takes a hundred times as long.
    return multiply_and_scale(left, right, dtype) if left.codes.device.type == "cuda" else multiply(left, right, dtype)


def multiply_and_scale(left: CastRows, right: CastRows, dtype: torch.dtype) -> torch.Tensor:
    """Return the product as `multiply` does, by a kernel without scales and without fast accumulation.

    A GPU's kernels with a scale for each row are slow without fast accumulation, so the result is scaled, which rounds nothing: scales are
    powers of two.
    """
    one, kernel_dtype = left.scales.new_ones(()), _dtype_of_kernel(left, dtype)
    product = torch._scaled_mm(left.codes, right.codes.t(), one, one, out_dtype=kernel_dtype)
    return (product * left.scales.to(kernel_dtype) * right.scales.t().to(kernel_dtype)).to(dtype)


def _dtype_of_kernel(cast: CastRows, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a kernel's result: a GPU's kernels with a scale for each row have results in bfloat16 alone."""
    return torch.bfloat16 if cast.codes.device.type == "cuda" else dtype


class CastWeight(NamedTuple):
    """A weight (O, I) in FP8.

    Attributes:
        rows: the weight (O, I) with a scale for each output, for the output.
        columns: its transpose (I, O) with a scale for each input, for the gradient of the input; None if there is no backward pass.
    """

    rows: CastRows
    columns: CastRows | None

    @classmethod
    def of(cls, weight: torch.Tensor, differentiates: bool) -> "CastWeight":
        """Cast a weight (O, I), also for a backward pass if ``differentiates``."""
        return cls(cast_rows(weight), cast_rows(weight.t()) if differentiates else None)

    @property
    def num_bytes(self) -> int:
        """The bytes of codes and scales."""
        return self.rows.num_bytes + (0 if self.columns is None else self.columns.num_bytes)


def cast_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors of the cast weight of a module, if it has one."""
    cast: CastWeight | None = module.__dict__.get(CAST)
    if cast is not None:
        yield from (*cast.rows, *(cast.columns or ()))
