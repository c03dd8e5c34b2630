"""The range of every slab that a rank owns, and the memory that it takes."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from horizon_lm.common.constants import PAGE
from horizon_lm.common.quantities import page_aligned
from horizon_lm.common.ranges import between


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

    def range_numel(self, numel: int, granule: int) -> int:
        """Return the elements of each rank's range of a slab, a multiple of ``granule``; the last ranges may be shorter or empty.

        Args:
            numel: elements of the slab.
            granule: elements that stay together: a block of 8-bit moments, or a row of a table.
        """
        if self.is_whole:
            return numel
        return -(-numel // (granule * self.count)) * granule

    def cuts(self, numel: int, granule: int) -> list[int]:
        """Return the ``count + 1`` places at which a slab is cut. The arguments are those of `range_numel`."""
        size = self.range_numel(numel, granule)
        return [min(rank * size, numel) for rank in range(self.count)] + [numel]

    def own(self, cuts: Sequence[int]) -> slice:
        """Return the range of this rank, given the places at which a slab is cut."""
        return between(cuts)[self.index]

    def grad_slots(self, in_micro_batches: bool, grad_bytes: int) -> tuple[bool, int]:
        """Return whether gradients are summed over micro-batches in an accumulator, and the bytes of an element of their slots.

        Sums are in float32. A single rank rounds them into slots of ``grad_bytes``. Several ranks sum their slots, which stay in float32.
        """
        if not in_micro_batches or grad_bytes >= 4:  # nothing is rounded
            return False, grad_bytes
        return (True, grad_bytes) if self.is_whole else (False, 4)


WHOLE = Shard()


def used_bytes(ranges: Iterable[slice], itemsize: int) -> int:
    """Return the bytes of the pages that hold these ranges of slabs, each of which begins at a page.

    Args:
        ranges: the elements that are used of each slab.
        itemsize: bytes of an element.
    """
    return sum(
        page_aligned(used.stop * itemsize) - used.start * itemsize // PAGE * PAGE
        for used in ranges
        if used.start < used.stop
    )
