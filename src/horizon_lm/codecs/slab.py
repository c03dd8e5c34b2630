"""The quantized weights of a unit: the codes and scales of its tensors, one after the other in one slab of bytes.

They are streamed in this form, and decoded into the slot on the device. Nothing else reads them as numbers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from horizon_lm.codecs.base import Codec
from horizon_lm.constants import PACKED_ALIGNMENT


@dataclass(frozen=True, slots=True)
class PackedEntry:
    """The position of a quantized tensor in a slab. ``start`` and ``num_bytes`` count bytes."""

    start: int
    num_bytes: int
    shape: torch.Size
    codec: Codec


class PackedSlab:
    """The quantized tensors of a unit.

    Args:
        shapes: shapes of the decoded tensors, by full parameter name.
        codecs: the codec of each of them.

    Attributes:
        data: the bytes, 1-D uint8.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], codecs: Mapping[str, Codec]) -> None:
        self.entries: dict[str, PackedEntry] = {}
        start = 0
        for name, shape in shapes.items():
            entry = PackedEntry(start, codecs[name].num_bytes(shape), torch.Size(shape), codecs[name])
            self.entries[name] = entry
            start += aligned(entry.num_bytes)
        self.num_bytes = start
        self.data = torch.empty(0, dtype=torch.uint8)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def packed(self, name: str) -> torch.Tensor:
        """Return the bytes of a tensor, a view of the slab."""
        entry = self.entries[name]
        return self.data[entry.start : entry.start + entry.num_bytes]


def aligned(num_bytes: int) -> int:
    """Return the bytes that a quantized tensor of ``num_bytes`` takes in a slab."""
    return -(-num_bytes // PACKED_ALIGNMENT) * PACKED_ALIGNMENT
