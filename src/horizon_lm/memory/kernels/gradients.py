"""Landing of gradients in host memory: stored or added, with their sum of squares computed in the same pass.

The squares are those of the stored values, after rounding. They are exact in fp64 and summed in fp64: a long fp32 sum
loses digits (1e-4 for 100M elements, 3% in bf16), and would depend on how a slab is split.

Shapes: V rows of a table, R rows of a batch, H hidden.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import numpy as np

from horizon_lm.memory.kernels.bits import F32, F64, U16, inlined, kernel, nearest, widen

_LANES = 64  # partial sums, because a single sum cannot be vectorized


@inlined
def _same(value: Any) -> Any:
    return value


_WIDEN = {"float32": _same, "bfloat16": widen}
_NARROW = {"float32": _same, "bfloat16": nearest}


@cache
def landing_kernel(target: str, source: str, add: bool) -> Any:
    """Compile ``land(target, source) -> sum of squares`` for two arrays of one length, with bf16 as uint16.

    Args:
        target, source: ``float32`` or ``bfloat16``.
        add: add to the target in fp32 and round once; False to overwrite it.
    """
    widen_target, widen_source, narrow = _WIDEN[target], _WIDEN[source], _NARROW[target]

    @kernel
    def land(target: Any, source: Any) -> float:
        lanes = np.zeros(_LANES, F64)
        for start in range(0, len(target), _LANES):
            t, s = target[start : start + _LANES], source[start : start + _LANES]
            for i in range(len(t)):
                value = widen_source(s[i])
                if add:
                    value = widen_target(t[i]) + value
                t[i] = narrow(value)
                kept = F64(widen_target(t[i]))
                lanes[i] += kept * kept
        return lanes.sum()

    return land


@cache
def squared_norm_kernel(values: str) -> Any:
    """Compile ``sum_of_squares(values)`` of an array, with bf16 as uint16."""
    read = _WIDEN[values]

    @kernel
    def sum_of_squares(values: Any) -> float:
        lanes = np.zeros(_LANES, F64)
        for start in range(0, len(values), _LANES):
            part = values[start : start + _LANES]
            for i in range(len(part)):
                value = F64(read(part[i]))
                lanes[i] += value * value
        return lanes.sum()

    return sum_of_squares


@cache
def rows_kernel(table: str, add: bool) -> Any:
    """Compile ``land(table, source, rows) -> change of the table's sum of squares`` for (V, H), (R, H) and distinct rows (R,).

    Args:
        table: ``float32`` or ``bfloat16``, the dtype of the table and of the source.
        add: add to the rows; False to overwrite rows that were zero, or count as zero.
    """
    read, narrow = _WIDEN[table], _NARROW[table]

    @kernel
    def land(table: Any, source: Any, rows: Any) -> float:
        lanes = np.zeros(_LANES, F64)
        for r in range(len(rows)):
            target, values = table[rows[r]], source[r]
            for start in range(0, len(target), _LANES):
                t, s = target[start : start + _LANES], values[start : start + _LANES]
                for i in range(len(t)):
                    value = read(s[i])
                    if add:
                        before = F64(read(t[i]))
                        lanes[i] -= before * before
                        value = read(t[i]) + value
                    t[i] = narrow(value)
                    kept = F64(read(t[i]))
                    lanes[i] += kept * kept
        return lanes.sum()

    return land


def compile_landing(target: str, sources: Iterable[str], is_table: bool) -> None:
    """Compile the kernels that land gradients by calling them with no elements, so that the first backward pass is as fast as later ones.

    Args:
        target, sources: ``float32`` or ``bfloat16``.
        is_table: whether rows of the embedding land, too.
    """
    empty: dict[str, Any] = {"float32": np.empty(0, F32), "bfloat16": np.empty(0, U16)}
    for source in sources:
        landing_kernel(target, source, False)(empty[target], empty[source])
    if is_table:
        table = empty[target].reshape(0, 1)
        rows_kernel(target, False)(table, table, np.empty(0, np.int64))
