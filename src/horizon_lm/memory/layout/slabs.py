"""Places of named tensors in flat memory: in a slab, or in the buffers of a slot on the device."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from horizon_lm.common.constants import SLAB_ALIGNMENT
from horizon_lm.common.ranges import overlap


class Flat(Protocol):
    """A 1-D tensor, as far as views of it are made."""

    def as_strided(self, size: Any, stride: Any, storage_offset: Any, /) -> Any: ...

    def storage_offset(self) -> Any: ...

    def __getitem__(self, index: Any, /) -> Any: ...


FlatT = TypeVar("FlatT", bound=Flat)


@dataclass(frozen=True, slots=True)
class Entry:
    """The position of a tensor in a slab or buffer. ``offset`` and ``numel`` count elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    numel: int


def padded(numel: int, alignment: int = SLAB_ALIGNMENT) -> int:
    """Return the elements that a tensor of ``numel`` takes in a slab."""
    return -(-numel // alignment) * alignment


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
            entry = Entry(offset, tuple(shape), strides, math.prod(shape))
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

    def offset_among(self, offset: int, held: "SlabLayout") -> int:
        """Translate an offset in this slab to a slab with only the ``held`` tensors: to their first element that is not before it."""
        place = 0  # of the next held tensor, in the slab with only these
        for name, entry in self.entries.items():
            if name in held:
                if offset < entry.offset + entry.numel:
                    return place + max(0, offset - entry.offset)
                place += padded(entry.numel, self.alignment)
        return place

    def part_of(self, name: str, own: slice) -> slice:
        """Return the elements of a tensor that lie in a range of the slab, such as a rank's, counted from the start of the slab."""
        entry = self.entries[name]
        return overlap(slice(entry.offset, entry.offset + entry.numel), own)

    def view(self, slab: FlatT, name: str) -> FlatT:
        """Return the named tensor as a view of a flat slab (or of a device buffer with this layout)."""
        entry = self.entries[name]
        view: FlatT = slab.as_strided(entry.shape, entry.strides, slab.storage_offset() + entry.offset)
        return view

    def gaps(self, slab: FlatT) -> list[FlatT]:
        """Return views of the padding behind each tensor, which must be zero if the whole slab is summed over ranks."""
        next_starts = [*(entry.offset for entry in self.entries.values()), self.numel]
        ends = [entry.offset + entry.numel for entry in self.entries.values()]
        return [slab[end:start] for end, start in zip(ends, next_starts[1:], strict=True) if end < start]


class SlotLayout:
    """Places of named tensors in a slot: a layout for each of its buffers, the first of the dtype of computation, the other of float32."""

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

    @property
    def num_params(self) -> int:
        """The elements of all tensors, without the padding between them."""
        return sum(layout.num_params for layout in self.buffers)

    def entry(self, name: str) -> Entry:
        """Return the position of a tensor in its buffer."""
        return self.buffers[self._buffer_of[name]].entries[name]

    def view(self, slot: Sequence[FlatT], name: str) -> FlatT:
        """Return the named tensor as a view of its buffer."""
        number = self._buffer_of[name]
        return self.buffers[number].view(slot[number], name)

    def gaps(self, slot: Sequence[FlatT]) -> Iterator[FlatT]:
        """Yield the padding behind each tensor."""
        for layout, buffer in zip(self.buffers, slot, strict=True):
            yield from layout.gaps(buffer)
