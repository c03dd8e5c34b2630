"""The routed experts of a block as the planner counts them, and the tiles into which they are cut."""

from collections.abc import Sequence
from dataclasses import dataclass

from horizon_lm.constants import COMPONENT_ALIGNMENT, PACKED_ALIGNMENT
from horizon_lm.slabs import slab_elements


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The routed experts of a block.

    Attributes:
        count: number of experts.
        per_token: number of experts that a token is routed to.
        places: places of their weights among the tensors of the block. Each has as many elements for every expert.
        packed: bytes of one expert in each component of each of those that are quantized.
        packed_numel: elements of what these are decoded to.
    """

    count: int
    per_token: int
    places: frozenset[int]
    packed: Sequence[Sequence[int]] = ()
    packed_numel: int = 0

    def num_tiles(self, size: int) -> int:
        """Return the number of tiles of at most this many experts."""
        return -(-self.count // size)

    def share(self, size: int, number: int) -> float:
        """Return the share of the experts that are in a tile."""
        return min(size, self.count - number * size) / self.count

    def tile(self, tensors: Sequence[int], size: int) -> list[int]:
        """Return the elements of each tensor of the first tile, which is the largest: the last one may have fewer experts."""
        return [numel // self.count * min(size, self.count) for numel in self.of(tensors)]

    @property
    def packed_bytes(self) -> int:
        """The bytes of the codes and scales of all experts."""
        return sum(self._packed_tensors(self.count))

    def packed_slot(self, size: int) -> int:
        """Return the bytes of a slab, or of a slot, with the codes and scales of this many experts."""
        found = self._packed_tensors(min(size, self.count))
        return sum(-(-num_bytes // PACKED_ALIGNMENT) * PACKED_ALIGNMENT for num_bytes in found)

    def _packed_tensors(self, size: int) -> list[int]:
        """Return the bytes of each quantized tensor with this many experts."""
        return [
            sum(-(-size * each // COMPONENT_ALIGNMENT) * COMPONENT_ALIGNMENT for each in components)
            for components in self.packed
        ]

    def ranges(self, tensors: Sequence[int], size: int, number: int | None) -> list[slice]:
        """Return the ranges of elements that a tile, or the block without its tiles, has in a slab of all tensors of the block.

        Args:
            tensors: elements of each tensor.
            size, number: the size of tiles, and the number of the tile; None for the block without its tiles.
        """
        found, offset = [], 0
        for place, numel in enumerate(tensors):
            of_expert = numel // self.count
            if number is None and place not in self.places:
                found.append(slice(offset, offset + numel))
            elif number is not None and place in self.places:
                first, end = number * size, min(self.count, (number + 1) * size)
                found.append(slice(offset + first * of_expert, offset + end * of_expert))
            offset += slab_elements([numel])
        return found

    def of(self, tensors: Sequence[int]) -> list[int]:
        """Return the experts' weights among the tensors of the block, which may be none."""
        return [numel for place, numel in enumerate(tensors) if place in self.places]

    def others(self, tensors: Sequence[int]) -> list[int]:
        """Return the tensors of the block with 0 for those of the experts."""
        return [0 if place in self.places else numel for place, numel in enumerate(tensors)]
