"""The ranges into which slabs are cut between the ranks of a shard group."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Shard:
    """The place of a rank in its shard group.

    Attributes:
        index, count: the rank owns range ``index`` of ``count`` equal ranges of every slab.
    """

    index: int = 0
    count: int = 1

    @property
    def is_whole(self) -> bool:
        """True if the rank owns everything."""
        return self.count == 1

    def chunk(self, numel: int, granule: int) -> int:
        """Return the elements of a range of a slab: as many whole granules for each rank, so the last range may be shorter.

        Args:
            numel: elements of the slab.
            granule: elements that stay together: a block of 8-bit moments, or a row of a table.
        """
        if self.is_whole:
            return numel
        return -(-numel // (granule * self.count)) * granule

    def cuts(self, numel: int, granule: int) -> list[int]:
        """Return the ``count + 1`` places at which a slab is cut."""
        chunk = self.chunk(numel, granule)
        return [min(rank * chunk, numel) for rank in range(self.count)] + [numel]

    def own(self, cuts: Sequence[int]) -> slice:
        """Return the range of this rank."""
        return slice(cuts[self.index], cuts[self.index + 1])


WHOLE = Shard()
