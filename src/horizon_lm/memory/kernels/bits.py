"""Floating-point formats as bit patterns, and the noise of stochastic rounding; inlined into the kernels.

numba compiles these without fast-math and without fusing multiply and add, so results do not depend on the machine or
on the number of threads.
"""

from functools import partial
from typing import Any

import numpy as np
from numba import njit, types
from numba.extending import intrinsic

from horizon_lm.memory.kernels.cache import keep, name_by_parts

U16, U32, F32, F64 = np.uint16, np.uint32, np.float32, np.float64

# numpy's error model: division by zero gives infinity. A check for zero would prevent vectorization.
_compile = partial(njit, nogil=True, error_model="numpy")


def inlined(function: Any) -> Any:
    """Compile a function as a part of the kernels that call it."""
    return _compile(name_by_parts(function), forceinline=True)


def kernel(function: Any) -> Any:
    """Compile a function on its first call, once for all processes."""
    compiled = _compile(name_by_parts(function))
    keep(compiled)
    return compiled


@inlined
def float_of(bits: Any) -> Any:
    """Return the fp32 number with these 32 bits."""
    return U32(bits).view(F32)


@inlined
def bits_of(value: Any) -> Any:
    """Return the 32 bits of an fp32 number."""
    return F32(value).view(U32)


def _fma(context: Any, a: Any, b: Any, c: Any) -> Any:
    """Return ``a * b + c`` in fp32, rounded once; the intrinsic makes it the same on every machine."""
    signature = types.float32(types.float32, types.float32, types.float32)
    return signature, lambda context, builder, signature, args: builder.fma(*args)


fma: Any = intrinsic(_fma)


@inlined
def widen(half: Any) -> Any:
    """Convert bf16, given as its 16 bits, to fp32."""
    return float_of(U32(half) << U32(16))


@inlined
def nan_bits(value: Any) -> Any:
    """Return the bits that preserve a NaN after rounding, and 0 for numbers."""
    return U32(0x7FC00000) if value != value else U32(0)


@inlined
def nearest(value: Any) -> Any:
    """Round fp32 to the nearest bf16, as its 16 bits, with ties to even like torch; NaN stays NaN."""
    bits = bits_of(value)
    rounded = U16(U32(bits + U32(0x7FFF) + ((bits >> U32(16)) & U32(1))) >> U32(16))
    return rounded if value == value else U16(0x7FC0)


@inlined
def stochastic(value: Any, noise: Any) -> Any:
    """Round fp32 to bf16, as its 16 bits, up or down by 16 random bits so that the mean is exact; NaN stays NaN."""
    return U16((U32(bits_of(value) + noise) | nan_bits(value)) >> U32(16))


@inlined
def mix(x: Any) -> Any:
    """Hash 32 bits with low bias (constants: Wellons, "Prospecting for Hash Functions", 2018)."""
    x = U32(x ^ (x >> U32(16)))
    x = U32(x * U32(0x7FEB352D))
    x = U32(x ^ (x >> U32(15)))
    x = U32(x * U32(0x846CA68B))
    return U32(x ^ (x >> U32(16)))
