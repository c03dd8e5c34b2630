"""Ranges of places, compared with sets of numbers."""

import random
from itertools import pairwise

import pytest

from horizon_lm.common.ranges import Span, consecutive, joined, length, overlap, pieces, runs


def numbers(*parts: slice) -> list[int]:
    return [number for part in parts for number in range(part.start, part.stop)]


def any_range(rng: random.Random) -> slice:
    start = rng.randrange(20)
    return slice(start, start + rng.randrange(8))


@pytest.mark.parametrize("seed", range(10))
def test_ranges(seed: int) -> None:
    rng = random.Random(seed)
    one, other = any_range(rng), any_range(rng)
    both = overlap(one, other)
    assert numbers(both) == sorted({*numbers(one)} & {*numbers(other)})
    assert length(both) == len(numbers(both))

    count, size = rng.randrange(20), rng.randrange(1, 8)
    cut = pieces(count, size)
    assert numbers(*cut) == list(range(count))
    assert all(length(part) == size for part in cut[:-1])
    assert all(0 < length(part) <= size for part in cut[-1:])

    lengths = [rng.randrange(5) for _ in range(rng.randrange(5))]
    parts = consecutive(lengths)
    assert [length(part) for part in parts] == lengths
    assert numbers(*parts) == list(range(sum(lengths)))

    chosen = sorted(rng.sample(range(20), rng.randrange(20)))
    found = runs(chosen)
    assert numbers(*found) == chosen
    assert all(before.stop < after.start for before, after in pairwise(found))


@pytest.mark.parametrize("seed", range(10))
def test_spans(seed: int) -> None:
    """Pairs of an element of the slab and its place in the slot stay the same if spans are joined or cut."""
    rng, spans, start, place = random.Random(seed), [], 0, 0
    for _ in range(rng.randrange(1, 6)):
        start, place = start + rng.choice((0, 3)), place + rng.choice((0, 2))
        spans.append(Span(start, place, rng.randrange(1, 5)))
        start, place = spans[-1].in_slab.stop, spans[-1].in_slot.stop

    def pairs(spans: list[Span]) -> list[tuple[int, int]]:
        return [pair for s in spans for pair in zip(numbers(s.in_slab), numbers(s.in_slot), strict=True)]

    found, own = joined(spans), any_range(rng)
    assert pairs(found) == pairs(spans)
    assert all((a.in_slab.stop, a.in_slot.stop) != (b.start, b.place) for a, b in pairwise(found))
    assert pairs([span.within(own) for span in found]) == [pair for pair in pairs(spans) if pair[0] in numbers(own)]
