"""The routed experts of a block as the planner counts them, and the tiles into which they are cut."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """The routed experts of a block.

    Attributes:
        count: number of experts.
        per_token: number of experts that a token is routed to.
        places: places of their weights among the tensors of the block. Each has as many elements for every expert.
        packed_bytes, packed_numel: bytes of the codes and scales of those that are quantized, and elements of what they are
            decoded to.
    """

    count: int
    per_token: int
    places: frozenset[int]
    packed_bytes: int = 0
    packed_numel: int = 0

    def num_tiles(self, size: int) -> int:
        """Return the number of tiles of at most this many experts."""
        return -(-self.count // size)

    def share(self, size: int, number: int) -> float:
        """Return the share of the experts that are in a tile."""
        return min(size, self.count - number * size) / self.count

    def tile(self, tensors: Sequence[int], size: int) -> list[int]:
        """Return the elements of each tensor of the first tile, which is the largest."""
        return [numel // self.count * min(size, self.count) for numel in self.of(tensors)]

    def of(self, tensors: Sequence[int]) -> list[int]:
        """Return the experts' weights among the tensors of the block, which may be none."""
        return [numel for place, numel in enumerate(tensors) if place in self.places]

    def others(self, tensors: Sequence[int]) -> list[int]:
        """Return the tensors of the block with 0 for those of the experts."""
        return [0 if place in self.places else numel for place, numel in enumerate(tensors)]
