"""One step of an optimizer in one pass over slabs: scale the gradient, update the moments, decay and move the weight.

The arithmetic is fp32 for all formats of weights, gradients and moments. Each combination of an optimizer's rule and formats is
composed from small functions that numba inlines.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from horizon_lm.common.constants import MOMENT_BLOCK as BLOCK
from horizon_lm.memory.kernels.bits import F32, U32, bits_of, float_of, inlined, kernel, mix
from horizon_lm.memory.kernels.formats import GRAD_READERS, NO_MOMENT, WEIGHT_CODECS, moment_codec


class Moment(NamedTuple):
    """A number that an optimizer keeps of each element.

    Attributes:
        name: its name in a saved state.
        is_signed: it may be negative. With 8 bits the small ones of a group of elements then become 0, because the sign takes a bit:
            it must not be what is divided by.
    """

    name: str
    is_signed: bool


@dataclass(frozen=True)
class Rule:
    """An optimizer's arithmetic, element by element in fp32, and what it keeps of each element.

    Weight decay is decoupled and not part of it: a step is ``weight * (1 - lr * weight_decay) - move``.

    Attributes:
        name: name of the optimizer's class.
        moments: at most two moments.
        numbers: function ``(step, **settings)`` of a parameter's number of steps and its group's settings but
            ``weight_decay``, which computes in double precision what is the same for all elements: a NamedTuple of fp32 numbers.
        advance: inlined function ``(grad, first, second, numbers) -> (first, second)``, the moments after a step. With a
            single moment, ``second`` is 0, and what is returned for it is not kept: only `move` gets it.
        move: inlined function ``(first, second, numbers)``, what is subtracted from the weight.
        decay_rates: settings of a group that are below 1, such as ``betas``, which are two numbers. Like them, all other settings are
            finite numbers of at least 0.
        on_device: what the device computes afterwards; None if this rule is the whole update. With it, `move` is subtracted from zero, not
            from the weight, the result replaces the gradient, and ``numbers`` gets the parameter's ``shape`` as a setting, too.
    """

    name: str
    moments: tuple[Moment, ...]
    numbers: Callable[..., tuple[np.float32, ...]]
    advance: Any
    move: Any
    decay_rates: tuple[str, ...] = ()
    on_device: "OnDevice | None" = None


@dataclass(frozen=True)
class OnDevice:
    """The second and the third part of an update whose first part is a `Rule`.

    Attributes:
        compute: replaces a matrix, or several of one size, in place: (M, N) or (E, M, N). It runs on the device.
        then: the rule that updates the weights on the host, with the result as gradient, and with the numbers of the first rule.
    """

    compute: Callable[[Any], None]
    then: Rule


class Scalars(NamedTuple):
    """The scalars of one call, the same for all elements.

    Attributes:
        clip: factor on the gradients.
        decay: 1 - lr * weight_decay.
        key: seed of the noise; different for every step and unit.
        numbers: what `Rule.numbers` returned for this step.
    """

    clip: np.float32
    decay: np.float32
    key: np.uint32
    numbers: tuple[np.float32, ...]


@inlined
def _largest(values: Any, size: int) -> Any:
    """Return the largest magnitude. Bit patterns of positive numbers have the order of the numbers, and compare faster."""
    largest = U32(0)
    for j in range(size):
        largest = max(largest, U32(bits_of(values[j]) & U32(0x7FFFFFFF)))
    return float_of(largest)


@inlined
def _inverse(scale: Any) -> Any:
    """Return 1 / scale; 0 for a block of zeros."""
    return F32(1) / scale if scale > F32(0) else F32(0)


def _compose_update(rule: Rule, weight_format: str, moment_format: str, grad_format: str) -> Any:
    """Return an inlined function that updates consecutive elements. It takes the arguments of the kernel of `update_kernel` (``s`` for
    ``scalars``), and scratch space ``m`` and ``v`` (BLOCK,) for the new moments of one block.
    """
    read_weight, write_weight = WEIGHT_CODECS[weight_format]
    read_grad = GRAD_READERS[grad_format]
    has_scales1, has_scales2 = (moment_format == "8bit" and len(rule.moments) >= count for count in (1, 2))
    codecs = [moment_codec(moment_format, moment.is_signed) for moment in rule.moments]
    codecs += [NO_MOMENT] * (2 - len(codecs))
    (read_first, write_first), (read_second, write_second) = codecs
    advance, move = rule.advance, rule.move

    @inlined
    def update(
        weights: Any, low: Any, grads: Any, first: Any, second: Any, scale1: Any, scale2: Any, number: Any, s: Any,
        m: Any, v: Any,
    ) -> None:  # fmt: skip
        # Several short loops over a block that stays in the cache: a single loop over all arrays is not vectorized,
        # because too many of them might overlap.
        for start in range(0, len(weights), BLOCK):
            block, size = start // BLOCK, min(BLOCK, len(weights) - start)
            g_, first_, second_ = grads[start:], first[start:], second[start:]  # from this block on, indexed by j
            old1 = scale1[block] if has_scales1 else F32(1)
            old2 = scale2[block] if has_scales2 else F32(1)
            for j in range(size):
                grad = read_grad(g_, j) * s.clip
                m[j], v[j] = advance(grad, read_first(first_, j, old1), read_second(second_, j, old2), s.numbers)
            inverse1, inverse2 = F32(1), F32(1)
            if has_scales1:
                scale1[block] = _largest(m, size)
                inverse1 = _inverse(scale1[block])
            if has_scales2:
                scale2[block] = _largest(v, size)
                inverse2 = _inverse(scale2[block])
            for j in range(size):
                # Hashed once more than the noise of the weights below, so that the two differ.
                noise = mix(mix(U32(U32(start + j) + number ^ s.key)))
                write_first(first_, j, m[j] * inverse1, noise & U32(0xFFFF))
                write_second(second_, j, v[j] * inverse2, noise >> U32(16))
            w_, low_ = weights[start:], low[start:]
            for j in range(size):
                noise = mix(U32(U32(start + j) + number ^ s.key))
                old = read_weight(w_, low_, j)
                write_weight(w_, low_, j, old * s.decay - move(m[j], v[j], s.numbers), noise & U32(0xFFFF))

    return update


@cache
def update_kernel(rule: Rule, weights: str, moments: str, grads: str) -> Any:
    """Compile the update of consecutive elements for one combination of formats.

    Args:
        rule: the optimizer's arithmetic.
        weights: ``float32``, ``bf16`` or ``fp32_master``.
        moments: ``float32``, ``bfloat16`` or ``8bit``.
        grads: ``float32`` or ``bfloat16``.

    Returns:
        ``update(weights, low, grads, first, second, scale1, scale2, number, scalars)``. All arrays have the same
        length, except for the scales, which have one entry per `BLOCK` elements; bf16 is passed as uint16. An array
        that a mode or the rule does not use is empty. ``number`` is the index of the first element, on which the noise depends.
    """
    update_span = _compose_update(rule, weights, moments, grads)

    @kernel
    def update(
        weights: Any, low: Any, grads: Any, first: Any, second: Any, scale1: Any, scale2: Any, number: Any, s: Any
    ) -> None:
        m, v = np.empty(BLOCK, F32), np.empty(BLOCK, F32)
        update_span(weights, low, grads, first, second, scale1, scale2, number, s, m, v)

    return update


@cache
def rows_kernel(rule: Rule, weights: str, moments: str, grads: str) -> Any:
    """Compile the update of rows of a table. Blocks of 8-bit moments start at the beginning of each row.

    Returns:
        ``update(weights, low, grads, first, second, scale1, scale2, width, blocks, rows, grad_rows, scalars)``, which
        updates row ``rows[i]``, of ``width`` elements and ``blocks`` scales, with row ``grad_rows[i]`` of ``grads``.
    """
    update_row = update_kernel(rule, weights, moments, grads)  # called, not inlined, which would compile it once more

    @kernel
    def update(
        weights: Any, low: Any, grads: Any, first: Any, second: Any, scale1: Any, scale2: Any, width: int, blocks: int,
        rows: Any, grad_rows: Any, s: Any,
    ) -> None:  # fmt: skip
        for r in range(len(rows)):
            # The first element of the row, its first scale, and the first element of its gradient.
            a, b, g = rows[r] * width, rows[r] * blocks, grad_rows[r] * width
            update_row(
                weights[a : a + width], low[a : a + width], grads[g : g + width], first[a : a + width],
                second[a : a + width], scale1[b : b + blocks], scale2[b : b + blocks], U32(a), s,
            )  # fmt: skip

    return update
