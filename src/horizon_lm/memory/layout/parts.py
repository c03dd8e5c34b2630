"""Tensors of a unit that have a slot on the device: all of them, or some, or the same rows of some.

They lie in the buffers of the slot in the order of the slabs, so what a rank owns of a slab is a range of a buffer, too. The ranges of a
whole slab are equal, so one collective gathers them. The ranges of a subset of tensors may have any length, including zero.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import Generic

from horizon_lm.common.constants import PACKED_ALIGNMENT
from horizon_lm.common.ranges import Span, cut_slot, joined, length
from horizon_lm.memory.layout.slabs import SlabLayout, SlotLayout, padded
from horizon_lm.memory.layout.units import StorageT, UnitLayout


@dataclass(frozen=True)
class PartLayout(Generic[StorageT]):
    """The tensors in a unit's slabs that have a slot of their own.

    Attributes:
        slabs: the slabs of the unit.
        names: full names of the tensors; None for all.
        rows: the rows of each of them; None for all.
        in_place: the tensors have no slot of their own, but lie in that of the whole unit.
    """

    slabs: UnitLayout[StorageT]
    names: frozenset[str] | None = None
    rows: slice | None = None
    in_place: bool = False

    @cached_property
    def layout(self) -> SlotLayout:
        """The layout of the slot of the weights."""
        return self._layout_of(self.slabs.layout)

    @property
    def grad_layout(self) -> SlotLayout:
        """The layout of the slot of the gradients."""
        return self._layout_of(self.slabs.grad_layout)

    @property
    def slot_numels(self) -> list[int]:
        """The elements of each buffer of the slot of the weights."""
        whole = self.slabs.slot_numels
        of_part = [layout.numel for layout in self.layout.buffers]
        return [whole[number] if self._is_whole(number) else of_part[number] for number in range(len(of_part))]

    @property
    def grad_numels(self) -> list[int]:
        """The elements of the gradients in each buffer of their slot."""
        return [layout.numel for layout in self.grad_layout.buffers]

    def _is_whole(self, number: int) -> bool:
        """Return whether the part has all tensors of a buffer whole, so that the buffer is laid out and cut as in the slot of the unit."""
        return self.names is None or (self.rows is None and self.names >= set(self.slabs.layout.buffers[number]))

    def has(self, name: str) -> bool:
        """Return whether a tensor of the slabs is in the part."""
        return self.names is None or name in self.names

    def _layout_of(self, whole: SlotLayout) -> SlotLayout:
        """Return the layout of the part's slot, given that of a slot of the whole unit, for weights or for gradients."""
        if self.names is None or self.in_place:
            return whole
        return SlotLayout(*map(self._layout_of_buffer, whole.buffers))

    def _layout_of_buffer(self, whole: SlabLayout) -> SlabLayout:
        """Return the layout of one buffer of the part's slot, given that of the unit's buffer: only its tensors, and only its rows."""
        assert self.names is not None
        kept = whole.restrict(self.names)
        if self.rows is None:
            return kept
        return SlabLayout({name: (length(self.rows), *each.shape[1:]) for name, each in kept.entries.items()})

    @cached_property
    def cuts(self) -> list[list[int]]:
        """For each buffer of the slot, the first element of each rank's range, and the end of the last range. Quantized tensors are left
        out.
        """
        return [
            slab.slot_cuts if self._is_whole(number) else self._cut(slab.cuts, slab.layout, self.layout.buffers[number])
            for number, slab in enumerate(self.slabs.of_weights)
        ]

    @property
    def grad_cuts(self) -> list[list[int]]:
        """For each buffer of the slot of the gradients, the same as `cuts`."""
        buffers = self.grad_layout.buffers
        return [
            slab.grad_cuts if self._is_whole(number) else self._cut(slab.grad_cuts, slab.grad_layout, buffers[number])
            for number, slab in enumerate(self.slabs.of_weights)
        ]

    def _cut(self, cuts: list[int], whole: SlabLayout, part: SlabLayout) -> list[int]:
        """Translate the places at which ranks cut a slab to a buffer of the slot, given the layouts of slab and buffer."""
        return cut_slot(cuts, [span for _, span in self._named_spans(whole, part)])

    @cached_property
    def packed(self) -> SlabLayout:
        """The layout of the buffer of codes and scales, in bytes."""
        if self.names is None:
            return self.slabs.packed.layout
        codecs = {name: codec for name, codec in self.slabs.codecs.items() if name in self.names}
        shapes = {name: (codec.num_bytes(self.layout.entry(name).shape),) for name, codec in codecs.items()}
        return SlabLayout(shapes, PACKED_ALIGNMENT)

    @cached_property
    def packed_cuts(self) -> list[int]:
        """Cuts of the buffer of codes and scales, in bytes. One rank needs no such buffer: it decodes them from host memory."""
        slab = self.slabs.packed
        if self.names is None or slab.shard.is_whole:
            return slab.slot_cuts
        *cuts, _ = cut_slot(slab.cuts, list(self.packed_spans()))
        return [*cuts, self.packed.numel]  # the last range includes the padding at the end

    @cached_property
    def own(self) -> list[list[Span]]:
        """This rank's spans of each buffer, without quantized tensors. They are cached, because a dense block is moved twice a step."""
        return self.own_rows(None)

    def own_rows(self, some: Sequence[slice] | None) -> list[list[Span]]:
        """Return this rank's spans of each buffer, without quantized tensors.

        Args:
            some: ranges of rows, counted from the first row in the slab, if the part has only some rows; None for all of the part.
        """
        return [
            _spans_within(slab.own, self._named_spans(slab.layout, layout, some))
            for slab, layout in zip(self.slabs.of_weights, self.layout.buffers, strict=True)
        ]

    def packed_spans(self) -> Iterator[Span]:
        """Yield the spans of codes and scales, in bytes: one for each tensor or, if the part has only some rows, one for each of its
        components, because the same rows of two components do not follow each other.
        """
        if self.names is None:
            yield Span(0, 0, self.packed.numel)
            return
        for name, entry in self.packed.entries.items():
            whole, codec = self.slabs.packed.layout.entries[name], self.slabs.codecs[name]
            if self.rows is None:
                yield Span(whole.offset, entry.offset, padded(entry.numel, PACKED_ALIGNMENT))
                continue
            shape = self.layout.entry(name).shape
            starts_in_whole, starts_in_part = codec.starts(self.slabs.layout.entry(name).shape), codec.starts(shape)
            for component, each in codec.components(shape).items():
                skipped = self.rows.start * (each.num_bytes // shape[0])  # bytes of the rows before those of the part
                start = whole.offset + starts_in_whole[component] + skipped
                place = entry.offset + starts_in_part[component]
                yield Span(start, place, each.num_bytes)

    def grad_spans(self, number: int, adds: Mapping[str, bool]) -> list[tuple[bool, Span]]:
        """Return this rank's spans of gradients in a buffer, each behind a bool: whether it is added to the slab when it lands.
        Neighbours that land alike are joined.

        Args:
            number: the buffer.
            adds: for each parameter, by full name, whether its gradient is added to the one in the slab, not copied over it.
        """
        slab = self.slabs.of_weights[number]
        named_spans = self._named_spans(slab.grad_layout, self.grad_layout.buffers[number])
        return [
            (add, span)
            for add, group in groupby(named_spans, key=lambda named_span: adds[named_span[0]])
            for span in _spans_within(slab.own_grads, group)
        ]

    def _named_spans(
        self, whole: SlabLayout, part: SlabLayout, some: Sequence[slice] | None = None
    ) -> Iterator[tuple[str, Span]]:
        """Yield the name and a span of each tensor that is in both layouts, with the padding behind it; if the part has only some rows, a
        span for each range of rows, without padding.

        Args:
            whole: the layout of the slab.
            part: the layout of the buffer.
            some: as in `own_rows`.
        """
        for name, entry in part.entries.items():
            if name not in whole or not self.has(name):
                continue
            start = whole.entries[name].offset
            if self.rows is None:
                yield name, Span(start, entry.offset, padded(entry.numel))
                continue
            width = entry.strides[0]
            for rows in [self.rows] if some is None else some:
                place = entry.offset + (rows.start - self.rows.start) * width
                yield name, Span(start + rows.start * width, place, length(rows) * width)

    @property
    def decoded_numel(self) -> int:
        """The elements of quantized tensors."""
        return sum(self.layout.entry(name).numel for name in self.packed)

    def weight_bytes(self, itemsize: int) -> int:
        """Return the bytes of the weights of all ranks as they are moved, without padding: codes and scales of quantized tensors, four bytes
        for an element that is kept in float32, and ``itemsize`` bytes for any other element.
        """
        plain, in_float32 = (buffer.num_params for buffer in self.layout.buffers)
        return (plain - self.decoded_numel) * itemsize + in_float32 * 4 + self.packed.num_params

    def grad_bytes(self, itemsize: int) -> int:
        """Return the bytes of the gradients of all ranks as they are moved, without padding: 4 for one of float32, else ``itemsize``."""
        plain, in_float32 = (buffer.num_params for buffer in self.grad_layout.buffers)
        return plain * itemsize + in_float32 * 4

    def largest_share(self) -> float:
        """Return the largest share of the part that one rank owns: its transfer takes longest, and all others wait for it.

        Codes and scales are assumed to be cut like the weights that they encode.
        """
        shard, whole = self.slabs.shard, self.slabs.layout.buffers[0]
        if self.names is None or shard.is_whole:
            return 1 / shard.count
        spans = [span for _, span in self._named_spans(whole, self.layout.buffers[0])]
        cuts = shard.cuts(whole.numel, whole.alignment)
        numels = [sum(span.within(slice(start, stop)).numel for span in spans) for start, stop in pairwise(cuts)]
        return max(numels) / sum(numels)


def _spans_within(own: slice, named_spans: Iterator[tuple[str, Span]]) -> list[Span]:
    """Return the parts of spans that lie in a rank's range of a slab, with neighbours joined."""
    spans = (span.within(own) for span in joined(span for _, span in named_spans))
    return [span for span in spans if span.numel]
