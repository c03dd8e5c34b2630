"""Where each named tensor lies inside a slab."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

ALIGNMENT = 32  # elements: 64 bytes in bf16, a cache line, and enough for vector loads on a device


@dataclass(frozen=True, slots=True)
class Entry:
    offset: int  # elements
    shape: torch.Size
    strides: tuple[int, ...]
    numel: int


class SlabLayout:
    """Offsets of named tensors in one flat slab. The same layout serves weights, gradients, moments and device slots."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.entries: dict[str, Entry] = {}
        offset = 0
        for name, shape in shapes.items():
            strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            entry = Entry(offset, torch.Size(shape), strides, math.prod(shape))
            self.entries[name] = entry
            offset += -(-entry.numel // ALIGNMENT) * ALIGNMENT
        self.numel = offset

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    @property
    def num_params(self) -> int:
        """Elements without the padding between tensors."""
        return sum(entry.numel for entry in self.entries.values())

    def restrict(self, names: Iterable[str]) -> "SlabLayout":
        """The layout of a slab that holds only the given tensors, in this layout's order."""
        names = set(names)
        return SlabLayout({name: entry.shape for name, entry in self.entries.items() if name in names})

    def view(self, slab: torch.Tensor, name: str) -> torch.Tensor:
        """The named tensor inside a flat slab (or a device buffer bound to this layout)."""
        entry = self.entries[name]
        return slab.as_strided(entry.shape, entry.strides, slab.storage_offset() + entry.offset)

    def gaps(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """The padding between tensors, which must hold zeros wherever a whole slab is reduced."""
        ends = [entry.offset + entry.numel for entry in self.entries.values()]
        starts = [*[entry.offset for entry in self.entries.values()][1:], self.numel]
        return [slab[end:start] for end, start in zip(ends, starts, strict=True) if end < start]
