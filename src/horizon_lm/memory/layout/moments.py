"""Lay out an optimizer's moments, and the scales of those in 8 bits."""

from collections.abc import Collection, Sequence

from horizon_lm.common.constants import MOMENT_BLOCK
from horizon_lm.memory.layout.ranks import used_bytes
from horizon_lm.memory.layout.slabs import padded
from horizon_lm.memory.layout.units import StorageLayout

SCALE_BYTES = 4
"""Bytes of a scale of 8-bit moments."""


class MomentLayout:
    """One moment of a slab: of all trained parameters, or of those whose rule has it.

    Args:
        slab: the slab, whose gradients are laid out.
        names: full names of the parameters with this moment, maybe also of other slabs.
        has_scales: moments have 8 bits.

    Attributes:
        layout: the places of each parameter's values.
        own: the range of the values that belongs to this rank.
        scale_starts: for 8-bit moments, the index of the first scale of each parameter; empty for others.
        num_scales: number of scales.
        own_scales: the range of the scales that belongs to this rank.
    """

    def __init__(self, slab: StorageLayout, names: Collection[str], has_scales: bool) -> None:
        self.layout = slab.grad_layout.restrict(names)
        self.own = slab.own_range(self.layout)
        self.scale_starts: dict[str, int] = {}
        self.num_scales, self.own_scales = 0, slice(0, 0)
        if has_scales:
            for name, entry in self.layout.entries.items():
                self.scale_starts[name] = self.num_scales
                self.num_scales += num_scales(entry.numel, slab.row)
            places = (self.own.start, self.own.stop)
            self.own_scales = slice(*(scales_before(self.layout.numels, place, slab.row) for place in places))

    def own_bytes(self, itemsize: int) -> int:
        """Return the bytes of this rank's values and scales, given the bytes of a value."""
        return used_bytes([self.own], itemsize) + used_bytes([self.own_scales], SCALE_BYTES)


def num_scales(numel: int, row: int | None = None) -> int:
    """Return the number of scales of an 8-bit moment: one for each block of a tensor, or of each row of a table, because
    rows are updated separately.
    """
    return numel // row * num_scales(row) if row else -(-numel // MOMENT_BLOCK)


def scales_before(tensors: Sequence[int], offset: int, row: int | None = None) -> int:
    """Return the number of scales whose blocks lie before an offset in a slab of moments.

    Args:
        tensors: elements of each tensor in the slab.
        offset: an element of the slab at which a block begins.
        row: elements of a row if the tensor is a table.
    """
    start = count = 0  # of the next tensor: its offset in the slab, and the number of scales of all tensors before it
    for numel in tensors:
        if offset - start < numel:
            width = row or numel
            num_rows, rest = divmod(max(0, offset - start), width)
            return count + num_rows * num_scales(width) + rest // MOMENT_BLOCK
        start, count = start + padded(numel), count + num_scales(numel, row)
    return count
