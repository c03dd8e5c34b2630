"""Lay out the tensors of a unit in slabs of host memory, one for each storage, and in a slot on the device.

A unit has up to three slabs: of tensors in the precision of the run, of those that are kept in float32 whatever the
precision, and of the codes and scales of quantized ones. A slot has a buffer for each dtype of computation. Quantized
tensors are decoded into the first buffer, behind those that are copied.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from horizon_lm.codecs.base import Codec
from horizon_lm.constants import PACKED_ALIGNMENT, SLAB_ALIGNMENT
from horizon_lm.ranges import overlap
from horizon_lm.slabs import WHOLE, Shard, padded
from horizon_lm.store.arena import Arena
from horizon_lm.store.precision import PRECISIONS, Precision
from horizon_lm.units import Unit

PLAIN, FLOAT32, PACKED = "", ".float32", ".packed"
"""The ends of the names of slabs, after the names of their units."""

Slot = Sequence[torch.Tensor]
"""The buffers of a slot, each 1-D: of the dtype of computation, and of float32."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The position of a tensor in a slab or buffer. ``offset`` and ``numel`` count elements."""

    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    numel: int


class SlabLayout:
    """Offsets of named tensors in one flat slab. Weights, codes, gradients, moments and the buffers of slots have such layouts.

    Args:
        shapes: the shape of each tensor, by full parameter name.
        alignment: elements to which each of them is padded.
    """

    def __init__(self, shapes: Mapping[str, Sequence[int]], alignment: int = SLAB_ALIGNMENT) -> None:
        self.entries: dict[str, Entry] = {}
        self.alignment, offset = alignment, 0
        for name, shape in shapes.items():
            strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            entry = Entry(offset, torch.Size(shape), strides, math.prod(shape))
            self.entries[name] = entry
            offset += padded(entry.numel, alignment)
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
        return SlabLayout({name: each.shape for name, each in self.entries.items() if name in names}, self.alignment)

    def held_before(self, offset: int, held: "SlabLayout") -> int:
        """Return the number of elements of a slab with some of these tensors that lie before an offset in the slab of all."""
        place = 0  # of a tensor in the slab of the held ones
        for name, entry in self.entries.items():
            if name in held:
                if offset < entry.offset + entry.numel:
                    return place + max(0, offset - entry.offset)
                place += padded(entry.numel, self.alignment)
        return place

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
        starts = [*(entry.offset for entry in self.entries.values()), self.numel]
        ends = [entry.offset + entry.numel for entry in self.entries.values()]
        return [slab[end:start] for end, start in zip(ends, starts[1:], strict=True) if end < start]


class SlotLayout:
    """Places of named tensors in a slot: a layout for each of its buffers."""

    def __init__(self, *buffers: SlabLayout) -> None:
        self.buffers = buffers
        self._buffer_of = {name: number for number, layout in enumerate(buffers) for name in layout}

    def __contains__(self, name: str) -> bool:
        return name in self._buffer_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._buffer_of)

    @property
    def numel(self) -> int:
        """The elements of all buffers; 0 if the slot has no tensor."""
        return sum(layout.numel for layout in self.buffers)

    def entry(self, name: str) -> Entry:
        """Return the position of a tensor in its buffer."""
        return self.buffers[self._buffer_of[name]].entries[name]

    def view(self, slot: Slot, name: str) -> torch.Tensor:
        """Return the named tensor as a view of its buffer."""
        number = self._buffer_of[name]
        return self.buffers[number].view(slot[number], name)

    def gaps(self, slot: Slot) -> Iterator[torch.Tensor]:
        """Yield the padding behind each tensor."""
        for layout, buffer in zip(self.buffers, slot, strict=True):
            yield from layout.gaps(buffer)


_NO_MEMORY = Arena(0)


class Slab:
    """The tensors of a unit that have one storage, in host memory: weights, or codes; low halves; gradients.

    Args:
        unit: the unit.
        storage: the end of the slab's name, after that of the unit.
        layout: the places of its tensors.
        shard: the range of the slab that this rank owns. The others have addresses, but no memory.
        row: elements of a row of a table, which is cut between rows; None for others.
        precision: the storage mode of weights; None for codes.

    Attributes:
        name: the name by which the slab is saved, and by which the noise of its updates is drawn.
        cuts, own: the places at which the ranks cut it, and the range of this rank.
        slot_cuts: the places between the equal parts that the ranks fill of a buffer on the device. The last part of weights
            may reach into the place of quantized tensors, which are decoded afterwards. One rank decodes codes where they
            are, so that it has no such buffer for them.
        weights: the values, 1-D: weights without their low halves, or codes as bytes.
        low: the low halves of ``weights``, if the slab has them.
        grad_layout, grad_cuts, grads: the gradients of its trainable tensors.
    """

    def __init__(
        self, unit: Unit, storage: str, layout: SlabLayout, shard: Shard, row: int | None = None, precision: Precision | None = None
    ) -> None:  # fmt: skip
        self.unit, self.name, self.layout, self.shard = unit, unit + storage, layout, shard
        self.row, self.precision = row, precision
        # Each rank owns whole rows of a table, so the padding at its end is left out.
        numel = layout.numel if row is None or shard.is_whole else layout.num_params
        granule = row or layout.alignment
        self.cuts = shard.cuts(numel, granule)
        self.own = shard.own(self.cuts)
        chunk = 0 if precision is None and shard.is_whole else shard.chunk(numel, granule)
        self.slot_cuts = [chunk * rank for rank in range(shard.count + 1)]
        # No memory yet: `Store` sets these, or `take_over`. Each slab begins at byte ``start`` of its arena.
        self.arena = self.low_arena = _NO_MEMORY
        self.start = self.low_start = 0
        self.weights = torch.empty(0, dtype=self.dtype)
        self.low: torch.Tensor | None = None
        self.lay_out_grads(())

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the values."""
        return torch.uint8 if self.precision is None else self.precision.weight_dtype

    def take_over(self, other: "Slab") -> None:
        """Use the memory of another slab with the same layout."""
        self.arena, self.start, self.weights = other.arena, other.start, other.weights
        self.low_arena, self.low_start, self.low = other.low_arena, other.low_start, other.low

    def lay_out_grads(self, names: Iterable[str]) -> None:
        """Lay out the gradients of these tensors, which are trained."""
        self.grad_layout = self.layout.restrict(names)
        self.grad_cuts = self._cuts_of(self.grad_layout)
        self.grads = torch.empty(0, dtype=torch.uint8 if self.precision is None else self.precision.grad_dtype)

    def _cuts_of(self, held: SlabLayout) -> list[int]:
        """Return the places at which the ranks cut a slab of some of the tensors: each owns there what it owns of the weights."""
        return [self.layout.held_before(cut, held) for cut in self.cuts]

    def own_range(self, held: SlabLayout) -> slice:
        """Return the range of a slab of some of the tensors that this rank owns, in elements."""
        return self.shard.own(self._cuts_of(held))

    @property
    def own_grads(self) -> slice:
        """The range of the gradients' slab that this rank owns, in elements."""
        return self.shard.own(self.grad_cuts)

    def tensors(self) -> list[torch.Tensor]:
        """Return the weights and their low halves, both of which are cut at ``cuts``."""
        return [self.weights] if self.low is None else [self.weights, self.low]

    def forget_others(self) -> None:
        """Give back the memory of the ranges of other ranks, which were read."""
        for slab, arena, start in (
            (self.weights, self.arena, self.start),
            (self.low, self.low_arena, self.low_start),
        ):
            if slab is not None:
                size = slab.element_size()
                arena.forget(start, start + self.own.start * size)
                arena.forget(start + self.own.stop * size, start + slab.numel() * size)

    def row_cuts(self, rows: torch.Tensor) -> list[int]:
        """Return the places at which sorted rows (R,) of a table are cut between the ranks."""
        bounds = torch.tensor([cut // (self.row or 1) for cut in self.cuts])
        return [int(place) for place in torch.searchsorted(rows, bounds)]


class UnitSlabs:
    """The slabs of one unit.

    Args:
        unit: the unit.
        shapes: shapes of its tensors, by full parameter name.
        precision: the storage mode of the run.
        codecs: the codecs of those that are quantized, and maybe of tensors of other units.
        in_float32: full names of tensors, also of other units, that are kept in float32.
        shard: the range of the slabs that this rank owns.
        is_table: the unit is a table, of which whole rows are owned and updated.

    Attributes:
        plain: the tensors in the precision of the run.
        float32: those that are kept in float32.
        packed: the codes and scales of quantized ones, of which ``codecs`` has the codecs.
        layout, grad_layout: the layouts of a slot of weights on the device, and of one of gradients.
    """

    def __init__(
        self,
        unit: Unit,
        shapes: Mapping[str, torch.Size],
        precision: Precision,
        codecs: Mapping[str, Codec] | None = None,
        in_float32: Iterable[str] = (),
        shard: Shard = WHOLE,
        is_table: bool = False,
    ) -> None:
        in_float32 = set(in_float32)
        kept = {name: shape for name, shape in shapes.items() if name in in_float32}
        others = {name: shape for name, shape in shapes.items() if name not in in_float32}
        self.unit = unit
        self.codecs = {name: codecs[name] for name in others if name in codecs} if codecs else {}
        plain = {name: shape for name, shape in others.items() if name not in self.codecs}
        quantized = {name: others[name] for name in self.codecs}
        num_bytes = {name: (codec.num_bytes(others[name]),) for name, codec in self.codecs.items()}
        row = next(iter(shapes.values()))[1] if is_table else None
        self.plain = Slab(unit, PLAIN, SlabLayout(plain), shard, row, precision)
        self.float32 = Slab(unit, FLOAT32, SlabLayout(kept), shard, precision=PRECISIONS["float32"])
        self.packed = Slab(unit, PACKED, SlabLayout(num_bytes, PACKED_ALIGNMENT), shard)
        self.layout = SlotLayout(SlabLayout(plain | quantized), self.float32.layout)
        self.lay_out_grads(())  # until it is known which tensors are trained

    @property
    def of_weights(self) -> tuple[Slab, Slab]:
        """The slabs of weights that are not quantized, in the order of the buffers of a slot. Either may be empty."""
        return self.plain, self.float32

    @property
    def saved(self) -> list[Slab]:
        """The slabs that are saved, each in a file of its own: that in the precision of the run, and that in float32 if it has
        tensors.
        """
        return [self.plain, self.float32] if self.float32.layout.numel else [self.plain]

    @property
    def hashed(self) -> list[tuple[Slab, ...]]:
        """The slabs that are hashed together, under the name of the first: codes and scales with the tensors in the precision of
        the run.
        """
        return [(slab, self.packed) if slab is self.plain else (slab,) for slab in self.saved]

    @property
    def all(self) -> tuple[Slab, Slab, Slab]:
        """All slabs. Each may be empty."""
        return self.plain, self.float32, self.packed

    @property
    def slot_numels(self) -> list[int]:
        """The elements of each buffer of a slot on the device."""
        pairs = zip(self.layout.buffers, self.of_weights, strict=True)
        return [max(layout.numel, slab.slot_cuts[-1]) for layout, slab in pairs]

    def lay_out_grads(self, names: Iterable[str]) -> None:
        """Lay out the gradients of these tensors, which are trained, and a slot of gradients."""
        names = set(names)
        for slab in self.of_weights:
            slab.lay_out_grads(names)
        self.grad_layout = SlotLayout(*(slab.grad_layout for slab in self.of_weights))

    def forget_others(self) -> None:
        """Give back the memory of the ranges of other ranks, which were read."""
        for slab in self.all:
            slab.forget_others()
