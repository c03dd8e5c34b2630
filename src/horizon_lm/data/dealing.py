"""Deal the rows of a step to the ranks of a training."""

from collections.abc import Sequence
from itertools import accumulate, pairwise


def deal(tokens: Sequence[int], unit: int, num_ranks: int) -> list[range]:
    """Cut the rows of a step into one range for each rank.

    Ranges follow each other in the order of the ranks, and micro-batches are not cut, so a step is cut into the same
    micro-batches, in the same order, for any number of ranks. No rank gets more than its share of micro-batches, rounded up,
    for which its memory was planned; within that, the largest number of tokens is as small as possible. A range is empty if
    there are too few micro-batches.

    Args:
        tokens: tokens of each row.
        unit: rows of a micro-batch.
        num_ranks: number of ranks.
    """
    ends = [*range(unit, len(tokens), unit), len(tokens)]
    sums = [0, *accumulate(tokens)]
    costs = [sums[end] - sums[start] for start, end in pairwise([0, *ends])]
    most = -(-len(costs) // num_ranks)
    low, high = max(costs), sum(costs)
    while low < high:
        limit = (low + high) // 2
        if len(_fill(costs, limit, most)) <= num_ranks:
            high = limit
        else:
            low = limit + 1
    counts = _fill(costs, high, most)
    while len(counts) < num_ranks and max(counts) > 1:  # a rank without rows would only wait
        largest = counts.index(max(counts))
        half = counts[largest] // 2
        counts[largest : largest + 1] = [counts[largest] - half, half]
    bounds = [0, *(ends[count - 1] for count in accumulate(counts))]
    bounds += [len(tokens)] * (num_ranks + 1 - len(bounds))
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _fill(costs: Sequence[int], limit: int, most: int) -> list[int]:
    """Return the numbers of micro-batches of the ranks if each takes as many as its limits of tokens and numbers allow."""
    counts, used = [0], 0
    for cost in costs:
        if counts[-1] and (used + cost > limit or counts[-1] == most):
            counts.append(0)
            used = 0
        counts[-1] += 1
        used += cost
    return counts
