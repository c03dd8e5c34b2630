"""CPU AdamW in one pass over slabs: scale the gradient, update both moments, decay and move the weight.

Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (arXiv 1711.05101, algorithm 2). The arithmetic is fp32
for all formats of weights, gradients and moments. Each combination of formats is composed from small functions that
numba inlines.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from horizon_lm.constants import MOMENT_BLOCK as BLOCK
from horizon_lm.kernels.bits import (
    F32,
    U16,
    U32,
    bits_of,
    float_of,
    fma,
    inlined,
    kernel,
    mix,
    nan_bits,
    stochastic,
    widen,
)


class Scalars(NamedTuple):
    """The scalars of one call, the same for all elements.

    Attributes:
        clip: factor on the gradients.
        decay: 1 - lr * weight_decay.
        one_minus_beta1, beta2, one_minus_beta2: 1 - beta is computed in double precision; otherwise v would be off by
            1e-5.
        step_size: lr / (1 - beta1**step).
        sqrt_correction2: sqrt(1 - beta2**step).
        eps: term of the denominator.
        key: seed of the noise; different for every step and unit.
    """

    clip: np.float32
    decay: np.float32
    one_minus_beta1: np.float32
    beta2: np.float32
    one_minus_beta2: np.float32
    step_size: np.float32
    sqrt_correction2: np.float32
    eps: np.float32
    key: np.uint32


# Weights, in one array or two. ``noise``: 16 random bits.


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
def _read_split(weights: Any, low: Any, i: int) -> Any:
    return float_of(U32(U32(weights[i]) << U32(16)) + U32(low[i]))


@inlined
def _write_split(weights: Any, low: Any, i: int, value: Any, noise: Any) -> None:
    bits = bits_of(value)  # the same halves as in store.precision.split_master
    weights[i] = U16((U32(bits + U32(0x8000)) | nan_bits(value)) >> U32(16))
    low[i] = np.int16(bits)


_WEIGHTS = {
    "float32": (_read_plain, _write_plain),
    "bf16": (_read_bf16, _write_bf16),
    "fp32_master": (_read_split, _write_split),
}

# Gradients, and moments of 16 or 32 bits.


@inlined
def _read_float32(array: Any, i: int) -> Any:
    return array[i]


@inlined
def _read_bfloat16(array: Any, i: int) -> Any:
    return widen(array[i])


_READ = {"float32": _read_float32, "bfloat16": _read_bfloat16}


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


# 8-bit moments: small floating-point numbers relative to the largest of their block. The first moment has a sign, 4
# exponent and 3 mantissa bits, the second 5 and 3. They are rounded stochastically, because a slow average that is
# rounded to the nearest would never move. A second moment is stored as 0 only if it is exactly 0: dividing by a value
# rounded to 0 would move the weight too far.
_ONE = 0x3F800000 >> 20  # exponent and 3 mantissa bits of 1.0
_FIRST = _ONE - 127  # code 127 is 1.0, code 1 about 2**-15
_SECOND = _ONE - 255  # code 255 is 1.0, code 1 about 2**-31


@inlined
def _encode_first(array: Any, i: int, relative: Any, noise: Any) -> None:
    size = abs(relative)
    code = np.int32(U32(bits_of(size) + U32(noise << U32(4))) >> U32(20)) - np.int32(_FIRST)
    smallest = float_of(U32(_FIRST + 1) << U32(20))
    tiny = np.int32(1) if size > smallest * F32(noise) * F32(2**-16) else np.int32(0)
    code = code if code > 0 else tiny
    code = min(code, np.int32(127))
    array[i] = np.uint8(code | (np.int32(bits_of(relative) >> U32(24)) & np.int32(0x80)))


@inlined
def _decode_first(array: Any, i: int, scale: Any) -> Any:
    code = U32(array[i])
    size = code & U32(0x7F)
    value = float_of(U32(size + U32(_FIRST)) << U32(20)) if size > U32(0) else F32(0)
    return float_of(bits_of(value * scale) | U32((code & U32(0x80)) << U32(24)))


@inlined
def _encode_second(array: Any, i: int, relative: Any, noise: Any) -> None:
    code = np.int32(U32(bits_of(relative) + U32(noise << U32(4))) >> U32(20)) - np.int32(_SECOND)
    smallest = np.int32(1) if relative > F32(0) else np.int32(0)
    array[i] = np.uint8(min(max(code, smallest), np.int32(255)))


@inlined
def _decode_second(array: Any, i: int, scale: Any) -> Any:
    code = U32(array[i])
    return scale * (float_of(U32(code + U32(_SECOND)) << U32(20)) if code > U32(0) else F32(0))


_MOMENTS = {
    "float32": (_read_moment_float32, _write_moment_float32, _read_moment_float32, _write_moment_float32),
    "bfloat16": (_read_moment_bfloat16, _write_moment_bfloat16, _read_moment_bfloat16, _write_moment_bfloat16),
    "8bit": (_decode_first, _encode_first, _decode_second, _encode_second),
}


@inlined
def _largest(values: Any, size: int) -> Any:
    """Return the largest magnitude. Positive numbers have the same order as their bit patterns, which
    compare faster.
    """
    largest = U32(0)
    for j in range(size):
        largest = max(largest, U32(bits_of(values[j]) & U32(0x7FFFFFFF)))
    return float_of(largest)


@inlined
def _inverse(scale: Any) -> Any:
    return F32(1) / scale if scale > F32(0) else F32(0)


def _update(weights: str, moments: str, grads: str) -> Any:
    """Compose the update of consecutive elements, to be inlined. ``m`` and ``v`` are scratch space for one block."""
    read_weight, write_weight = _WEIGHTS[weights]
    read_grad = _READ[grads]
    scaled = moments == "8bit"
    read_first, write_first, read_second, write_second = _MOMENTS[moments]

    @inlined
    def update(
        weights: Any, low: Any, grads: Any, first: Any, second: Any, scale1: Any, scale2: Any, number: Any, s: Any,
        m: Any, v: Any,
    ) -> None:  # fmt: skip
        # Several short loops over a block that stays in the cache: a single loop over all arrays is not vectorized,
        # because too many of them might overlap.
        for start in range(0, len(weights), BLOCK):
            block, size = start // BLOCK, min(BLOCK, len(weights) - start)
            g_, first_, second_ = grads[start:], first[start:], second[start:]
            before1 = scale1[block] if scaled else F32(1)
            before2 = scale2[block] if scaled else F32(1)
            for j in range(size):
                grad = read_grad(g_, j) * s.clip
                old = read_first(first_, j, before1)
                m[j] = fma(s.one_minus_beta1, grad - old, old)
                v[j] = fma(s.one_minus_beta2 * grad, grad, read_second(second_, j, before2) * s.beta2)
            per1, per2 = F32(1), F32(1)
            if scaled:
                scale1[block], scale2[block] = _largest(m, size), _largest(v, size)
                per1, per2 = _inverse(scale1[block]), _inverse(scale2[block])
            for j in range(size):
                noise = mix(mix(U32(U32(start + j) + number ^ s.key)))
                write_first(first_, j, m[j] * per1, noise & U32(0xFFFF))
                write_second(second_, j, v[j] * per2, noise >> U32(16))
            w_, low_ = weights[start:], low[start:]
            for j in range(size):
                noise = mix(U32(U32(start + j) + number ^ s.key))
                old = read_weight(w_, low_, j)
                step = s.step_size * m[j] / (np.sqrt(v[j]) / s.sqrt_correction2 + s.eps)
                write_weight(w_, low_, j, old * s.decay - step, noise & U32(0xFFFF))

    return update


@cache
def update_kernel(weights: str, moments: str, grads: str) -> Any:
    """Compile the update of consecutive elements for one combination of formats.

    Args:
        weights: ``float32``, ``bf16`` or ``fp32_master``.
        moments: ``float32``, ``bfloat16`` or ``8bit``.
        grads: ``float32`` or ``bfloat16``.

    Returns:
        ``update(weights, low, grads, first, second, scale1, scale2, number, scalars)``. All arrays have the same
        length, except for the scales, which have one entry per `BLOCK` elements; bf16 is passed as uint16. An array
        that a mode does not use is empty. ``number`` is the index of the first element, on which the noise depends.
    """
    update_span = _update(weights, moments, grads)

    @kernel
    def update(
        weights: Any, low: Any, grads: Any, first: Any, second: Any, scale1: Any, scale2: Any, number: Any, s: Any
    ) -> None:
        m, v = np.empty(BLOCK, F32), np.empty(BLOCK, F32)
        update_span(weights, low, grads, first, second, scale1, scale2, number, s, m, v)

    return update


@cache
def rows_kernel(weights: str, moments: str, grads: str) -> Any:
    """Compile the update of rows of a table. Blocks of 8-bit moments start at the beginning of each row.

    Returns:
        ``update(weights, low, grads, first, second, scale1, scale2, width, blocks, rows, grad_rows, scalars)``, which
        updates row ``rows[i]``, of ``width`` elements and ``blocks`` scales, with row ``grad_rows[i]`` of ``grads``.
    """
    update_row = _update(weights, moments, grads)

    @kernel
    def update(
        weights: Any, low: Any, grads: Any, first: Any, second: Any, scale1: Any, scale2: Any, width: int, blocks: int,
        rows: Any, grad_rows: Any, s: Any,
    ) -> None:  # fmt: skip
        m, v = np.empty(BLOCK, F32), np.empty(BLOCK, F32)
        for r in range(len(rows)):
            a, b, g = rows[r] * width, rows[r] * blocks, grad_rows[r] * width
            update_row(
                weights[a : a + width], low[a : a + width], grads[g : g + width], first[a : a + width],
                second[a : a + width], scale1[b : b + blocks], scale2[b : b + blocks], U32(a), s, m, v,
            )  # fmt: skip

    return update
