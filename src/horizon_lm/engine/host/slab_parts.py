"""Parts of a unit's slab that have a slot of their own on the device: some of its tensors, or the same rows of them."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from horizon_lm.codecs.rows import Rows
from horizon_lm.device.transfers import Copy, Decode, Move
from horizon_lm.slabs import slab_elements
from horizon_lm.store.unit_slabs import SlabLayout, UnitSlabs

Span = tuple[slice, slice]  # elements of the unit's slab, and the same ones of the part's slot


@dataclass(frozen=True)
class SlabPart:
    """Some of the tensors in a slab that one rank owns.

    Attributes:
        slabs: the slabs of the unit.
        names: full names of the tensors.
        rows: the rows of each of them; None for all.
    """

    slabs: UnitSlabs
    names: frozenset[str]
    rows: slice | None = None

    @cached_property
    def layout(self) -> SlabLayout:
        """The layout of the slot of the weights."""
        return self._layout_of(self.slabs.layout)

    @property
    def grad_layout(self) -> SlabLayout:
        """The layout of the slot of the gradients."""
        return self._layout_of(self.slabs.grad_layout)

    def _layout_of(self, whole: SlabLayout) -> SlabLayout:
        shapes = {name: entry.shape for name, entry in whole.entries.items() if name in self.names}
        if self.rows is None:
            return SlabLayout(shapes)
        count = self.rows.stop - self.rows.start
        return SlabLayout({name: torch.Size((count, *shape[1:])) for name, shape in shapes.items()})

    def moves(
        self, slot: torch.Tensor, decoded: Mapping[str, torch.dtype], some: Iterable[slice] | None = None
    ) -> list[Move]:
        """Return the moves that stream the part into its slot: copies, and the decoding of what is quantized.

        Args:
            slot: the slot, which begins with the part.
            decoded: the dtype that the values of each quantized tensor are rounded to.
            some: of rows, those to stream, by their places in the slab; None for all.
        """
        if self.rows is not None:
            wanted, first = [self.rows] if some is None else list(some), self.rows.start
            return [
                move_rows(self.slabs, name, rows, self.layout.view(slot, name)[rows.start - first :], decoded.get(name))
                for name in self.layout
                for rows in wanted
            ]
        plain = {name: True for name in self.layout if name in self.slabs.plain}
        spans = joined(self.spans(self.slabs.plain, self.layout, plain))
        copies: list[Move] = [copy(slot[of_part], self.slabs.weights[of_slab]) for _, (of_slab, of_part) in spans]
        return [*copies, *(self._decode(slot, name, decoded[name]) for name in self.layout if name not in plain)]

    def _decode(self, slot: torch.Tensor, name: str, dtype: torch.dtype) -> Decode:
        entry = self.slabs.packed.entries[name]
        return Decode(self.layout.view(slot, name), self.slabs.packed.bytes_of(name), entry.codec, dtype)

    def grad_spans(self, adds: Mapping[str, bool]) -> list[tuple[bool, Span]]:
        """Return the places of the part's gradients, neighbours joined that are landed alike.

        Args:
            adds: by full name, whether the landing is added to the gradient in the slab.
        """
        return list(joined(self.spans(self.slabs.grad_layout, self.grad_layout, adds)))

    def spans(self, whole: SlabLayout, part: SlabLayout, flags: Mapping[str, bool]) -> Iterator[tuple[bool, Span]]:
        """Yield the place of each tensor that has a flag, with the flag. Whole tensors include the padding after them."""
        for name, entry in part.entries.items():
            if name in flags:
                start, numel = whole.entries[name].offset, entry.numel
                if self.rows is None:
                    numel = slab_elements([numel])
                else:
                    start += self.rows.start * entry.strides[0]
                yield flags[name], (slice(start, start + numel), slice(entry.offset, entry.offset + numel))


def move_rows(slabs: UnitSlabs, name: str, rows: slice, place: torch.Tensor, decoded: torch.dtype | None) -> Move:
    """Return the move that streams rows of a tensor (E, ...) to the device.

    Args:
        slabs: the slabs with the tensor.
        name: its full name.
        rows: the rows.
        place: a tensor on the device that begins with their places.
        decoded: the dtype that values are rounded to if the tensor is quantized.
    """
    target = place[: rows.stop - rows.start]
    if decoded is None:
        return copy(target.view(-1), slabs.plain.view(slabs.weights, name)[rows].view(-1))
    entry = slabs.packed.entries[name]
    return Decode(target, slabs.packed.bytes_of(name), Rows(entry.codec, entry.shape[0], rows.start), decoded)


def copy(target: torch.Tensor, source: torch.Tensor) -> Copy:
    """Return the copy of a part of a slab of weights, 1-D, to the device."""
    return Copy(target, source, source.nbytes)


def joined(spans: Iterable[tuple[bool, Span]]) -> Iterator[tuple[bool, Span]]:
    """Join spans with equal flags that follow each other in slab and slot."""
    last: tuple[bool, Span] | None = None
    for flag, (of_slab, of_part) in spans:
        if last is not None:
            before, (slab_before, part_before) = last
            if flag == before and (slab_before.stop, part_before.stop) == (of_slab.start, of_part.start):
                last = flag, (slice(slab_before.start, of_slab.stop), slice(part_before.start, of_part.stop))
                continue
            yield last
        last = flag, (of_slab, of_part)
    if last is not None:
        yield last
