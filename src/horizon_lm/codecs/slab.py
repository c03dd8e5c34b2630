"""The quantized weights of a unit: the codes and scales of its tensors, one after the other in one slab of bytes.

They are streamed in this form, and decoded into the slot on the device. Nothing else reads them as numbers.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from horizon_lm.codecs.base import Codec
from horizon_lm.constants import PACKED_ALIGNMENT
from horizon_lm.ranges import overlap
from horizon_lm.slabs import WHOLE, Shard


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
        shard: the range of the slab that this rank owns.

    Attributes:
        data: the bytes, 1-D uint8. Those that other ranks own have addresses, but no memory.
        cuts: the places at which the ranks cut it.
        slot_cuts: the places between the equal parts, in bytes, of a slot on the device that the ranks fill.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], codecs: Mapping[str, Codec], shard: Shard = WHOLE) -> None:
        self.entries: dict[str, PackedEntry] = {}
        start = 0
        for name, shape in shapes.items():
            entry = PackedEntry(start, codecs[name].num_bytes(shape), torch.Size(shape), codecs[name])
            self.entries[name] = entry
            start += aligned(entry.num_bytes)
        self.num_bytes, self._shard = start, shard
        self.data = torch.empty(0, dtype=torch.uint8)
        self.cuts = shard.cuts(start, PACKED_ALIGNMENT)
        self.slot_cuts = shard.packed_slot(start)

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    @property
    def own(self) -> slice:
        """The range of the slab that this rank owns."""
        return self._shard.own(self.cuts)

    def bytes_of(self, name: str, slab: torch.Tensor | None = None) -> torch.Tensor:
        """Return the bytes of a tensor, a view of the slab, or of a copy of it on the device."""
        entry = self.entries[name]
        return (self.data if slab is None else slab)[entry.start : entry.start + entry.num_bytes]

    def own_part(self, name: str) -> slice:
        """Return the bytes of a tensor that this rank owns, as a range of the tensor's bytes, which may be empty."""
        entry, own = self.entries[name], self.own
        return overlap(slice(0, entry.num_bytes), slice(own.start - entry.start, own.stop - entry.start))


def aligned(num_bytes: int) -> int:
    """Return the bytes that a quantized tensor of ``num_bytes`` takes in a slab."""
    return -(-num_bytes // PACKED_ALIGNMENT) * PACKED_ALIGNMENT
