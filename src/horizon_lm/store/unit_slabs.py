"""The slabs of one unit: weights, low halves or codes, and gradients, in one layout."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from horizon_lm.codecs.base import Codec
from horizon_lm.codecs.slab import PackedSlab
from horizon_lm.ranges import overlap
from horizon_lm.slabs import WHOLE, Shard, UnitCuts, slab_elements
from horizon_lm.store.arena import Arena


@dataclass(frozen=True, slots=True)
class Entry:
    """The position of a tensor in a slab. ``offset`` and ``numel`` count elements."""

    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    numel: int


class SlabLayout:
    """Offsets of named tensors in one flat slab. Weights, gradients, moments and device slots share a layout."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.entries: dict[str, Entry] = {}
        offset = 0
        for name, shape in shapes.items():
            strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            entry = Entry(offset, torch.Size(shape), strides, math.prod(shape))
            self.entries[name] = entry
            offset += slab_elements([entry.numel])
        self.numel = offset

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    @property
    def numels(self) -> list[int]:
        """The number of elements of each tensor."""
        return [entry.numel for entry in self.entries.values()]

    @property
    def num_params(self) -> int:
        """The number of elements without the padding between tensors."""
        return sum(self.numels)

    def restrict(self, names: Iterable[str]) -> "SlabLayout":
        """Return the layout of a slab that holds only the given tensors, in the order of this layout."""
        names = set(names)
        return SlabLayout({name: entry.shape for name, entry in self.entries.items() if name in names})

    def part_of(self, name: str, own: slice) -> slice:
        """Return the elements of a tensor that lie in a range of the slab, as a range of the slab."""
        entry = self.entries[name]
        return overlap(slice(entry.offset, entry.offset + entry.numel), own)

    def view(self, slab: torch.Tensor, name: str) -> torch.Tensor:
        """Return the named tensor as a view of a flat slab (or of a device buffer with this layout)."""
        entry = self.entries[name]
        return slab.as_strided(entry.shape, entry.strides, slab.storage_offset() + entry.offset)

    def gaps(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """Return the padding behind each tensor, which must be zero if a whole slab is reduced."""
        ends = [entry.offset + entry.numel for entry in self.entries.values()]
        starts = [entry.offset for entry in self.entries.values()]
        next_starts = [*starts[1:], self.numel]
        return [slab[end:start] for end, start in zip(ends, next_starts, strict=True) if end < start]


class UnitSlabs:
    """The slabs of one unit.

    Args:
        shapes: shapes of its tensors, by full parameter name.
        codecs: the codecs of those that are quantized, and maybe of tensors of other units.
        shard: the range of the slabs that this rank owns. The others have addresses, but no memory.
        is_table: the unit is a table, of which whole rows are owned and updated.

    Attributes:
        layout: the layout of a slot on the device, with the quantized tensors at its end.
        slot_numel, slot_cuts: elements of such a slot, and the places between the equal parts of ``weights`` that the ranks fill. The
            last may reach into the place of quantized tensors, which are decoded afterwards.
        cuts, grad_cuts: the places at which the ranks cut weights and gradients.
        own: the range of the weights that this rank owns.
        plain: the layout of the weights that are not quantized.
        weights: the tensors that are not quantized, in this layout.
        packed: the quantized tensors.
        row: elements of a row of a table; None for other units.
        low: the low halves of ``weights``, if the unit has them.
        grads, grad_layout: the gradients of its trainable tensors.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        codecs: Mapping[str, Codec] | None = None,
        shard: Shard = WHOLE,
        is_table: bool = False,
    ) -> None:
        codecs, self.shard = codecs or {}, shard
        plain = {name: shape for name, shape in shapes.items() if name not in codecs}
        quantized = {name: shape for name, shape in shapes.items() if name in codecs}
        self.layout = SlabLayout(plain | quantized)
        self.plain = SlabLayout(plain)
        self.packed = PackedSlab(quantized, codecs, shard)
        self.row = self.layout.entries[next(iter(shapes))].shape[1] if is_table else None
        self._cuts = UnitCuts(self.layout.numels, SlabLayout(quantized).numels, self.row, shard)
        self.cuts, self.own = self._cuts.weights, self._cuts.own
        self.slot_numel, self.slot_cuts = self._cuts.slot_numel, self._cuts.slot
        # No memory yet: `Store` sets these, or `take_over`. Each slab begins at byte ``start`` of its arena.
        self.arena = self.packed_arena = self.low_arena = Arena(0)
        self.start = self.packed_start = self.low_start = 0
        self.weights = torch.empty(0)
        self.low: torch.Tensor | None = None
        self.grads = torch.empty(0)
        self.lay_out_grads(())  # until it is known which tensors are trained

    def take_over(self, other: "UnitSlabs") -> None:
        """Use the memory of other slabs with the same layout."""
        self.arena, self.start, self.weights = other.arena, other.start, other.weights
        self.low_arena, self.low_start, self.low = other.low_arena, other.low_start, other.low
        self.packed_arena, self.packed_start = other.packed_arena, other.packed_start
        self.packed.data = other.packed.data

    def lay_out_grads(self, names: Iterable[str]) -> None:
        """Lay out the gradients of these tensors, which are trained."""
        self.grad_layout = self.layout.restrict(names)
        self.grad_cuts = self._cuts_of(self.grad_layout)

    def _cuts_of(self, held: SlabLayout) -> list[int]:
        """Return the places at which the ranks cut a slab of some of the unit's tensors."""
        return self._cuts.restricted(
            [entry.numel if name in held else 0 for name, entry in self.layout.entries.items()]
        )

    def own_range(self, held: SlabLayout) -> slice:
        """Return the range of a slab of some of the unit's tensors that this rank owns, in elements."""
        return self.shard.own(self._cuts_of(held))

    @property
    def own_grads(self) -> slice:
        """The range of the gradients' slab that this rank owns, in elements."""
        return self.shard.own(self.grad_cuts)

    def slabs(self) -> list[tuple[torch.Tensor, list[int]]]:
        """Return the slabs of the weights, their low halves and the quantized tensors, each with the places at which the ranks cut it."""
        low = [] if self.low is None else [(self.low, self.cuts)]
        return [(self.weights, self.cuts), *low, (self.packed.data, self.packed.cuts)]

    def forget_others(self) -> None:
        """Give back the memory of the ranges of other ranks, which were read."""
        for slab, own, arena, start in (
            (self.weights, self.own, self.arena, self.start),
            (self.low, self.own, self.low_arena, self.low_start),
            (self.packed.data, self.packed.own, self.packed_arena, self.packed_start),
        ):
            if slab is not None:
                size = slab.element_size()
                arena.forget(start, start + own.start * size)
                arena.forget(start + own.stop * size, start + slab.numel() * size)

    def row_cuts(self, rows: torch.Tensor) -> list[int]:
        """Return the places at which sorted rows (R,) of a table are cut between the ranks."""
        bounds = torch.tensor([cut // (self.row or 1) for cut in self.cuts])
        return [int(place) for place in torch.searchsorted(rows, bounds)]
