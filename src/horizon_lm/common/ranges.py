"""Ranges of places: cut and intersect them, and join neighbours."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise


def length(part: slice) -> int:
    """Return the number of places in a range."""
    return part.stop - part.start


def overlap(one: slice, other: slice) -> slice:
    """Return the places that are in both ranges; an empty range if there are none."""
    start = max(one.start, other.start)
    return slice(start, max(start, min(one.stop, other.stop)))


def between(cuts: Iterable[int]) -> list[slice]:
    """Return the ranges between neighbouring cuts."""
    return [slice(start, stop) for start, stop in pairwise(cuts)]


def consecutive(lengths: Iterable[int]) -> list[slice]:
    """Return adjacent ranges of these lengths, starting at 0."""
    return between(accumulate(lengths, initial=0))


def pieces(count: int, size: int) -> list[slice]:
    """Cut ``count`` places into ranges of ``size``; the last may be shorter."""
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]


@dataclass(frozen=True, slots=True)
class Span:
    """Elements of a slab that follow each other, and their place in a slot on the device.

    Attributes:
        start, place: the first of them in the slab, and in the slot.
        numel: their number.
    """

    start: int
    place: int
    numel: int

    @property
    def in_slab(self) -> slice:
        """The elements of the slab."""
        return slice(self.start, self.start + self.numel)

    @property
    def in_slot(self) -> slice:
        """The elements of the slot."""
        return slice(self.place, self.place + self.numel)

    def within(self, part: slice) -> "Span":
        """Return the span of the elements that lie in a part of the slab; it may be empty."""
        common = overlap(self.in_slab, part)
        return Span(common.start, self.place + common.start - self.start, length(common))


def joined(spans: Iterable[Span]) -> list[Span]:
    """Join spans that follow each other in slab and slot."""
    result: list[Span] = []
    for span in spans:
        last = result[-1] if result else None
        if last is not None and (last.in_slab.stop, last.in_slot.stop) == (span.start, span.place):
            result[-1] = Span(last.start, last.place, last.numel + span.numel)
        else:
            result.append(span)
    return result


def runs(indices: Iterable[int]) -> list[slice]:
    """Return the ranges of consecutive indices."""
    return [span.in_slab for span in joined(Span(index, index, 1) for index in indices)]


def cut_slot(cuts: Sequence[int], spans: Sequence[Span]) -> list[int]:
    """Return the places at which ranks cut a slot that holds spans of a slab. Each rank owns the same elements in both.

    Args:
        cuts: the places at which they cut the slab.
        spans: the spans, in the order of both slab and slot.
    """
    return [_place_of(cut, spans) for cut in cuts]


def _place_of(offset: int, spans: Sequence[Span]) -> int:
    """Return the place in the slot of the first element that lies at or behind an offset of the slab; the end of the slot if none does."""
    for span in spans:
        if offset < span.in_slab.stop:
            return span.place + max(0, offset - span.start)
    return spans[-1].in_slot.stop if spans else 0
