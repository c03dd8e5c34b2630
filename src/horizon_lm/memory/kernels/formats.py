"""Formats in which an update finds weights, gradients and moments, as functions that are inlined into its kernel.

Each reads an element as fp32 or writes it; all combine with each other.
"""

from typing import Any

import numpy as np

from horizon_lm.memory.kernels.bits import (
    F32,
    U16,
    U32,
    bits_of,
    float_of,
    inlined,
    nan_bits,
    nearest,
    stochastic,
    widen,
)

# Weights, in one array or two. ``noise``: 16 random bits, which only stochastic rounding uses.


@inlined
def _read_plain(weights: Any, low: Any, i: int) -> Any:
    return weights[i]


@inlined
def _write_plain(weights: Any, low: Any, i: int, value: Any, noise: Any) -> None:
    weights[i] = value


@inlined
def _read_bf16(weights: Any, low: Any, i: int) -> Any:
    return widen(weights[i])


@inlined
def _write_bf16(weights: Any, low: Any, i: int, value: Any, noise: Any) -> None:
    weights[i] = stochastic(value, noise)


@inlined
def _write_nearest(weights: Any, low: Any, i: int, value: Any, noise: Any) -> None:
    weights[i] = nearest(value)


@inlined
def _read_split(weights: Any, low: Any, i: int) -> Any:
    return float_of(U32(U32(weights[i]) << U32(16)) + U32(low[i]))


@inlined
def _write_split(weights: Any, low: Any, i: int, value: Any, noise: Any) -> None:
    """Write the halves of store.precision.split_master: the nearest bf16, and the low 16 bits."""
    bits = bits_of(value)
    weights[i] = U16((U32(bits + U32(0x8000)) | nan_bits(value)) >> U32(16))
    low[i] = np.int16(bits)


WEIGHT_CODECS = {
    "float32": (_read_plain, _write_plain),
    "bf16": (_read_bf16, _write_bf16),
    "bf16_nearest": (_read_bf16, _write_nearest),  # of what an update passes on in place of gradients
    "fp32_master": (_read_split, _write_split),
}

# Gradients, and moments of 16 or 32 bits.


@inlined
def _read_float32(array: Any, i: int) -> Any:
    return array[i]


@inlined
def _read_bfloat16(array: Any, i: int) -> Any:
    return widen(array[i])


GRAD_READERS = {"float32": _read_float32, "bfloat16": _read_bfloat16}


@inlined
def _read_moment_float32(array: Any, i: int, scale: Any) -> Any:
    return array[i]


@inlined
def _write_moment_float32(array: Any, i: int, value: Any, noise: Any) -> None:
    array[i] = value


@inlined
def _read_moment_bfloat16(array: Any, i: int, scale: Any) -> Any:
    return widen(array[i])


@inlined
def _write_moment_bfloat16(array: Any, i: int, value: Any, noise: Any) -> None:
    array[i] = stochastic(value, noise)


# 8-bit moments: small floating-point numbers relative to the largest of their block. One that may be negative has a sign, 4
# exponent and 3 mantissa bits, the others 5 and 3. They are rounded stochastically, because a slow average that is
# rounded to the nearest would never move. An unsigned moment is stored as 0 only if it is exactly 0: dividing by a value
# rounded to 0 would move the weight too far.
_ONE = 0x3F800000 >> 20  # exponent and 3 mantissa bits of 1.0
_SIGNED = _ONE - 127  # code 127 is 1.0, code 1 about 2**-15
_UNSIGNED = _ONE - 255  # code 255 is 1.0, code 1 about 2**-31


@inlined
def _encode_signed(array: Any, i: int, relative: Any, noise: Any) -> None:
    """Write a moment that may be negative as 8 bits, given relative to the largest of its block."""
    size = abs(relative)
    # Noise in the 20 bits that are cut off rounds up as often as their value demands.
    code = np.int32(U32(bits_of(size) + U32(noise << U32(4))) >> U32(20)) - np.int32(_SIGNED)
    # Below the number of code 1, the spacing of codes is that number, and so is the range of the noise.
    smallest = float_of(U32(_SIGNED + 1) << U32(20))
    tiny = np.int32(1) if size > smallest * F32(noise) * F32(2**-16) else np.int32(0)
    code = code if code > 0 else tiny
    code = min(code, np.int32(127))
    array[i] = np.uint8(code | (np.int32(bits_of(relative) >> U32(24)) & np.int32(0x80)))


@inlined
def _decode_signed(array: Any, i: int, scale: Any) -> Any:
    """Return a moment that may be negative from its 8 bits and the largest of its block."""
    code = U32(array[i])
    size = code & U32(0x7F)
    value = float_of(U32(size + U32(_SIGNED)) << U32(20)) if size > U32(0) else F32(0)
    return float_of(bits_of(value * scale) | U32((code & U32(0x80)) << U32(24)))


@inlined
def _encode_unsigned(array: Any, i: int, relative: Any, noise: Any) -> None:
    """Write a moment that is never negative as 8 bits, given relative to the largest of its block."""
    code = np.int32(U32(bits_of(relative) + U32(noise << U32(4))) >> U32(20)) - np.int32(_UNSIGNED)
    smallest = np.int32(1) if relative > F32(0) else np.int32(0)
    array[i] = np.uint8(min(max(code, smallest), np.int32(255)))


@inlined
def _decode_unsigned(array: Any, i: int, scale: Any) -> Any:
    """Return a moment that is never negative from its 8 bits and the largest of its block."""
    code = U32(array[i])
    return scale * (float_of(U32(code + U32(_UNSIGNED)) << U32(20)) if code > U32(0) else F32(0))


@inlined
def _read_nothing(array: Any, i: int, scale: Any) -> Any:
    return F32(0)


@inlined
def _write_nothing(array: Any, i: int, value: Any, noise: Any) -> None:
    pass


MomentCodec = tuple[Any, Any]  # inlined functions that read and write a moment

NO_MOMENT: MomentCodec = (_read_nothing, _write_nothing)
_MOMENTS: dict[str, MomentCodec] = {
    "float32": (_read_moment_float32, _write_moment_float32),
    "bfloat16": (_read_moment_bfloat16, _write_moment_bfloat16),
}


def moment_codec(kind: str, is_signed: bool) -> MomentCodec:
    """Return how a moment of a kind is read and written, given whether it may be negative."""
    if kind == "8bit":
        return (_decode_signed, _encode_signed) if is_signed else (_decode_unsigned, _encode_unsigned)
    return _MOMENTS[kind]
