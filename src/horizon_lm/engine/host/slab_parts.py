"""Slabs that have a slot on the device: all tensors of a unit's slab, or some of them, or the same rows of them.

They lie in the slot in the order of the slab. So what a rank owns of the slab is a range of the slot, too: of whole slabs an equal
one, so that one collective gathers them, and of some of the tensors any, which may be empty.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import torch

from horizon_lm.codecs.rows import Rows
from horizon_lm.codecs.slab import PackedSlab, aligned
from horizon_lm.device.transfers import Copy, Decode, DecodeThere, Move
from horizon_lm.ranges import Span, cut_slot, joined, length
from horizon_lm.slabs import slab_elements
from horizon_lm.store.unit_slabs import SlabLayout, UnitSlabs


@dataclass(frozen=True)
class SlabPart:
    """The tensors in a unit's slabs that have a slot of their own.

    Attributes:
        slabs: the slabs of the unit.
        names: full names of the tensors; None for all.
        rows: the rows of each of them; None for all.
        in_place: the tensors have no slot of their own, but lie in that of the whole slabs.
    """

    slabs: UnitSlabs
    names: frozenset[str] | None = None
    rows: slice | None = None
    in_place: bool = False

    @cached_property
    def layout(self) -> SlabLayout:
        """The layout of the slot of the weights."""
        return self._layout_of(self.slabs.layout)

    @property
    def grad_layout(self) -> SlabLayout:
        """The layout of the slot of the gradients."""
        return self._layout_of(self.slabs.grad_layout)

    @property
    def slot_numel(self) -> int:
        """The elements of the slot of the weights."""
        return self.slabs.slot_numel if self.names is None else self.layout.numel

    def _layout_of(self, whole: SlabLayout) -> SlabLayout:
        """Return the layout of the slot for this part of slabs with a layout."""
        if self.names is None or self.in_place:
            return whole
        shapes = {name: entry.shape for name, entry in whole.entries.items() if name in self.names}
        if self.rows is None:
            return SlabLayout(shapes)
        return SlabLayout({name: torch.Size((length(self.rows), *shape[1:])) for name, shape in shapes.items()})

    @cached_property
    def cuts(self) -> list[int]:
        """Cuts of the slot of the weights, without what is quantized: the element at which each rank's range begins, and that
        at which the last one ends.
        """
        if self.names is None:
            return self.slabs.slot_cuts
        return cut_slot(self.slabs.cuts, [span for _, span in self._places(self.slabs.plain, self.layout)])

    @property
    def grad_cuts(self) -> list[int]:
        """Cuts of the slot of the gradients, as `cuts` has those of the weights."""
        if self.names is None:
            return self.slabs.grad_cuts
        places = self._places(self.slabs.grad_layout, self.grad_layout)
        return cut_slot(self.slabs.grad_cuts, [span for _, span in places])

    @cached_property
    def packed(self) -> PackedSlab:
        """The layout of the slot of codes and scales."""
        if self.names is None:
            return self.slabs.packed
        codecs = {name: entry.codec for name, entry in self.slabs.packed.entries.items() if name in self.layout}
        return PackedSlab({name: self.layout.entries[name].shape for name in codecs}, codecs)

    @cached_property
    def packed_cuts(self) -> list[int]:
        """Cuts of the slot of codes and scales, in bytes. One rank needs no such slot: it decodes them from host memory."""
        if self.names is None or self.slabs.shard.is_whole:
            return self.slabs.packed.slot_cuts
        *cuts, _ = cut_slot(self.slabs.packed.cuts, list(self._packed_places()))
        return [*cuts, self.packed.num_bytes]  # the last range includes the padding at the end

    def moves(
        self, slot: torch.Tensor, dtypes: Mapping[str, torch.dtype], some: Sequence[slice] | None = None
    ) -> list[Move]:
        """Return the moves that stream the part into its slot, from host memory that is not divided between ranks.

        Args:
            slot: the slot, which begins with the part.
            dtypes: the dtype that the values of each quantized tensor are rounded to.
            some: the rows to stream, counted from the first in the slab, if the part has rows; None for all.
        """
        return [*self.copies(slot, some), *self._decoding(slot, dtypes, some)]

    def copies(self, slot: torch.Tensor, some: Sequence[slice] | None = None) -> list[Move]:
        """Return the copies of this rank's range of what is not quantized. The arguments are those of `moves`."""
        own = self._own if some is None else self._own_spans(some)
        return [copy(slot[span.in_slot], self.slabs.weights[span.in_slab]) for span in own]

    @cached_property
    def _own(self) -> list[Span]:
        """The places of this rank's range of all that is not quantized. They are kept, because a dense block moves twice a step."""
        return self._own_spans(None)

    def _own_spans(self, some: Sequence[slice] | None) -> list[Span]:
        """Return the places of this rank's range of what is not quantized; ``some`` is as in `moves`."""
        spans = joined(span for _, span in self._places(self.slabs.plain, self.layout, some))
        own = [span.within(self.slabs.own) for span in spans]
        return [span for span in own if span.numel]

    def _decoding(
        self, slot: torch.Tensor, dtypes: Mapping[str, torch.dtype], some: Sequence[slice] | None
    ) -> Iterator[Move]:
        """Yield the moves that decode quantized tensors into the slot. The arguments are those of `moves`."""
        for name, dtype in dtypes.items():
            if self._has(name):
                yield from self._decode(slot, name, dtype, some)

    def _has(self, name: str) -> bool:
        """Return whether a tensor of the slabs is in the part."""
        return self.names is None or name in self.names

    def copies_of_codes(self, slot: torch.Tensor) -> list[Move]:
        """Return the copies of this rank's range of codes and scales into their slot."""
        packed = self.slabs.packed
        own = [span.within(packed.own) for span in self._packed_places()]
        return [copy(slot[span.in_slot], packed.data[span.in_slab]) for span in own if span.numel]

    def decoding_there(
        self, slot: torch.Tensor, packed_slot: torch.Tensor, dtypes: Mapping[str, torch.dtype]
    ) -> list[Move]:
        """Return the moves that decode quantized tensors from their slot, in which all ranks have gathered them.

        Args:
            slot, dtypes: as in `moves`.
            packed_slot: the slot of codes and scales.
        """
        return [
            DecodeThere(
                self.layout.view(slot, name), self.packed.bytes_of(name, packed_slot), entry.codec, dtypes[name]
            )
            for name, entry in self.packed.entries.items()
        ]

    def _packed_places(self) -> Iterator[Span]:
        """Yield the places of codes and scales, in bytes: for each tensor, or if the part has rows, for each component of it."""
        if self.names is None:
            yield Span(0, 0, self.packed.num_bytes)
            return
        for name, entry in self.packed.entries.items():
            whole = self.slabs.packed.entries[name]
            if self.rows is None:
                yield Span(whole.start, entry.start, aligned(entry.num_bytes))
                continue
            starts, places = whole.codec.starts(whole.shape), entry.codec.starts(entry.shape)  # in slab and slot
            for component, each in entry.codec.components(entry.shape).items():
                first_row = self.rows.start * (each.num_bytes // entry.shape[0])
                start, place = whole.start + starts[component] + first_row, entry.start + places[component]
                yield Span(start, place, each.num_bytes)

    def _decode(
        self, slot: torch.Tensor, name: str, dtype: torch.dtype, some: Sequence[slice] | None
    ) -> Iterator[Move]:
        """Yield the moves that decode a tensor, or some rows of it, into the slot; ``slot`` and ``some`` are as in `moves`."""
        entry, view = self.slabs.packed.entries[name], self.layout.view(slot, name)
        if self.rows is None:  # the part has whole tensors, of which no rows are chosen
            yield Decode(view, self.slabs.packed.bytes_of(name), entry.codec, dtype)
            return
        for rows in [self.rows] if some is None else some:
            target = view[rows.start - self.rows.start : rows.stop - self.rows.start]
            codec = Rows(entry.codec, entry.shape[0], rows.start)
            yield Decode(target, self.slabs.packed.bytes_of(name), codec, dtype)

    def grad_spans(self, adds: Mapping[str, bool]) -> list[tuple[bool, Span]]:
        """Return the places of this rank's range of the gradients, neighbours joined that are landed alike.

        Args:
            adds: by full name, whether the landing is added to the gradient in the slab.
        """
        places = self._places(self.slabs.grad_layout, self.grad_layout)
        found = [
            (add, span.within(self.slabs.own_grads))
            for add, group in groupby(places, key=lambda place: adds[place[0]])
            for span in joined(span for _, span in group)
        ]
        return [(add, span) for add, span in found if span.numel]

    def _places(
        self, whole: SlabLayout, part: SlabLayout, some: Sequence[slice] | None = None
    ) -> Iterator[tuple[str, Span]]:
        """Yield the name and the place of each tensor that is in both layouts: all of it and the padding after it, or some rows.

        Args:
            whole: the layout of the slab.
            part: the layout of the slot.
            some: as in `moves`.
        """
        for name, entry in part.entries.items():
            if name not in whole or not self._has(name):
                continue
            start = whole.entries[name].offset
            if self.rows is None:
                yield name, Span(start, entry.offset, slab_elements([entry.numel]))
                continue
            width = entry.strides[0]
            for rows in [self.rows] if some is None else some:
                place = entry.offset + (rows.start - self.rows.start) * width
                yield name, Span(start + rows.start * width, place, length(rows) * width)


def copy(target: torch.Tensor, source: torch.Tensor) -> Copy:
    """Return the copy of a part of a slab of weights, 1-D, to the device."""
    return Copy(target, source, source.nbytes)
