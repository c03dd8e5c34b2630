"""Arithmetic of slabs, of the tensors in them and of the ranks that cut them; store, optimizer and planner share it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from horizon_lm.constants import MOMENT_BLOCK, PACKED_ALIGNMENT, PAGE, SLAB_ALIGNMENT
from horizon_lm.quantities import page_aligned
from horizon_lm.ranges import between


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
        """Return the elements of each rank's range of a slab, a multiple of ``granule``; the last ranges may be shorter or empty.

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
        return between(cuts)[self.index]

    def packed_slot(self, num_bytes: int) -> list[int]:
        """Return the places between the equal parts of a slot in which the ranks gather codes and scales. For one rank, which decodes
        them where they are, the slot is empty.
        """
        chunk = 0 if self.is_whole else self.chunk(num_bytes, PACKED_ALIGNMENT)
        return [chunk * rank for rank in range(self.count + 1)]

    def grad_slots(self, in_micro_batches: bool, grad_bytes: int) -> tuple[bool, int]:
        """Return whether gradients are summed over micro-batches in an accumulator, and the bytes of an element of their slots.

        Sums are in float32. One rank rounds them into a slot of ``grad_bytes``; several add theirs in the slots first.
        """
        if not in_micro_batches or grad_bytes >= 4:  # nothing is rounded
            return False, grad_bytes
        return (True, grad_bytes) if self.is_whole else (False, 4)


WHOLE = Shard()


def slab_elements(tensors: Iterable[int]) -> int:
    """Return the elements of a slab that holds tensors of these numbers of elements, each of them padded."""
    return _slab_elements(tuple(tensors))


@lru_cache(2**12)  # a plan tries many settings for blocks that are all alike
def _slab_elements(tensors: tuple[int, ...]) -> int:
    return sum(map(padded, tensors))


def padded(numel: int, alignment: int = SLAB_ALIGNMENT) -> int:
    """Return the elements that a tensor of ``numel`` takes in a slab."""
    return -(-numel // alignment) * alignment


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


@dataclass(frozen=True, slots=True)
class UnitCuts:
    """The places at which the ranks cut the slabs of a unit.

    Attributes:
        tensors: elements of each tensor.
        quantized: elements of those that are quantized. They lie in a slab of bytes, and at the end of a slot on the device.
        row: elements of a row if the unit is a table, which is cut between rows; None for other units.
        shard: the ranks.
    """

    tensors: Sequence[int]
    quantized: Sequence[int] = ()
    row: int | None = None
    shard: Shard = WHOLE

    @property
    def _granule(self) -> int:
        return self.row or SLAB_ALIGNMENT

    @property
    def numel(self) -> int:
        """The elements that are cut: those of the slab of weights, which has no quantized ones. If a table is cut, the padding at
        its end is left out, because each rank owns whole rows.
        """
        if self.row is not None and not self.shard.is_whole:
            return sum(self.tensors)
        return slab_elements(self.tensors) - slab_elements(self.quantized)

    @property
    def weights(self) -> list[int]:
        """The places at which the slab of the weights is cut."""
        return self.shard.cuts(self.numel, self._granule)

    @property
    def ranges(self) -> list[slice]:
        """The range of the weights that each rank owns."""
        return between(self.weights)

    @property
    def own(self) -> slice:
        """The range of the weights that this rank owns."""
        return self.shard.own(self.weights)

    @property
    def slot(self) -> list[int]:
        """The places between the equal parts of a slot on the device that the ranks fill with weights. The last part may
        reach into the place of quantized tensors, which are decoded afterwards.
        """
        chunk = self.shard.chunk(self.numel, self._granule)
        return [chunk * rank for rank in range(self.shard.count + 1)]

    @property
    def slot_numel(self) -> int:
        """The elements of a slot on the device."""
        return max(slab_elements(self.tensors), self.slot[-1])

    def restricted(self, held: Sequence[int]) -> list[int]:
        """Return the places at which the ranks cut a slab of some of the tensors: each owns there what it owns of the weights.

        Args:
            held: elements of each of ``tensors`` if the slab holds it, else 0.
        """
        return [_held_before(tuple(self.tensors), tuple(held), cut) for cut in self.weights]


@lru_cache(2**12)
def _held_before(tensors: tuple[int, ...], held: tuple[int, ...], offset: int) -> int:
    """Return the number of elements of a slab of the held tensors that lie before an offset in the slab of all tensors."""
    start = place = 0  # of a tensor in the slab of all tensors, and in that of the held ones
    for numel, kept in zip(tensors, held, strict=True):
        if kept and offset - start < numel:
            return place + max(0, offset - start)
        start, place = start + padded(numel), place + padded(kept)
    return place


def num_scales(numel: int, row: int | None = None) -> int:
    """Return the number of scales of an 8-bit moment: one for each block of a tensor, or of each row of a table, because
    rows are updated separately.
    """
    return numel // row * num_scales(row) if row else -(-numel // MOMENT_BLOCK)


def scale_at(tensors: Sequence[int], offset: int, row: int | None = None) -> int:
    """Return the number of scales of the blocks that lie before an offset in a slab of moments.

    Args:
        tensors: elements of each tensor in the slab.
        offset: an element of the slab at which a block begins.
        row: elements of a row if the tensor is a table.
    """
    start = count = 0  # of a tensor: its offset in the slab, and the scales of all tensors before it
    for numel in tensors:
        if offset - start < numel:
            width = row or numel
            num_rows, rest = divmod(max(0, offset - start), width)
            return count + num_rows * num_scales(width) + rest // MOMENT_BLOCK
        start, count = start + padded(numel), count + num_scales(numel, row)
    return count
