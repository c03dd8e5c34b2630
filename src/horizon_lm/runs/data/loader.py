"""Build the batch of any step, independently of the steps before it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch

from horizon_lm.common.constants import IGNORE_INDEX
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.data.token_dataset import Row, TokenTable


def collate(rows: Sequence[Row], indices: Sequence[int] = (), length: int = 0) -> Batch:
    """Build the batch of some rows, at least one. The attention mask marks padding; no token id does.

    Args:
        rows: rows of one kind: with one sequence each, or preferences.
        indices: their indices in the dataset, for `Batch.rows`.
        length: the smallest length of the batch in tokens; a longer sequence makes it longer.
    """
    # All first sequences before all second ones (of preferences: the chosen answers, then the rejected).
    sequences = [row.sequences[number] for number in range(len(rows[0].sequences)) for row in rows]
    shape = (len(sequences), max(length, *map(len, rows)))
    # The token id of padding has no effect, since attention and loss skip padding. Zero is in every vocabulary.
    input_ids = torch.zeros(shape, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
    for index, each in enumerate(sequences):
        ids = torch.from_numpy(each.ids.astype(np.int64))
        input_ids[index, : len(ids)], attention_mask[index, : len(ids)] = ids, 1
        labels[index, : len(ids)] = torch.where(torch.from_numpy(each.trained), ids, IGNORE_INDEX)
    labels[:, 0] = IGNORE_INDEX  # nothing predicts the first token
    is_packed = any(row.segments is not None for row in rows)
    position_ids = _positions(rows, shape) if is_packed else None
    if position_ids is not None:
        labels[position_ids == 0] = IGNORE_INDEX  # the first token of a packed row has no context
    image_inputs = _image_inputs(rows, input_ids, attention_mask, position_ids)
    return Batch(
        input_ids=input_ids, attention_mask=None if is_packed else attention_mask, position_ids=position_ids, labels=labels,
        num_trained=int((labels[:, 1:] != IGNORE_INDEX).sum()),
        num_tokens=sum(len(each.ids) for each in sequences),
        rows=tuple(indices), places=tuple(row.place for row in rows),
        image_inputs=image_inputs,
    )  # fmt: skip


def _image_inputs(
    rows: Sequence[Row], input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor | None
) -> dict[str, Any]:
    """Return the arguments of the model for the images of some rows, in the order of `collate`; none for a model of text."""
    numbers = range(len(rows[0].sequences))
    source = next((row.images for row in rows if row.images is not None), None)
    if source is None:
        return {}
    images = [group for number in numbers for row in rows for group in row.load_images(number)]
    return source.pictures.vision.inputs(images, input_ids, attention_mask, position_ids)


def _positions(rows: Sequence[Row], shape: tuple[int, int]) -> torch.Tensor:
    """Return positions (B, T) that restart at 0 with each packed row and with the padding."""
    positions = torch.zeros(shape, dtype=torch.int64)
    for index, row in enumerate(rows):
        segments = [*(row.segments or [len(row)]), shape[1] - len(row)]
        positions[index] = torch.cat([torch.arange(length) for length in segments])
    return positions


@dataclass(frozen=True)
class Sampler:
    """The sampler of a run: a function from a step to its rows, which depends only on the seed.

    Every epoch has a different permutation. Its last step has the remaining rows, as in transformers.

    Args:
        sizes: number of rows of each dataset.
        rows_per_step: number of rows in one optimizer step.
        seed: seed of the order.
        weights: number of times that the rows of each dataset are used in an epoch. For the fractional part of a weight, every
            epoch samples different rows.
    """

    sizes: tuple[int, ...]
    rows_per_step: int
    seed: int
    weights: tuple[float, ...]

    @property
    def rows_per_epoch(self) -> int:
        """The number of rows in one epoch."""
        parts = zip(self.weights, self.sizes, strict=True)
        return sum(int(weight) * size + _num_extra(weight, size) for weight, size in parts)

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in one epoch."""
        return math.ceil(self.rows_per_epoch / self.rows_per_step)

    def num_steps(self, num_epochs: float) -> int:
        """Return the number of steps in a number of epochs, at least 1."""
        return max(1, math.ceil(num_epochs * self.steps_per_epoch))

    def rows(self, step: int) -> list[int]:
        """Return the indices of the rows in step ``step``, counted from 0; fewer in the last step of an epoch."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        start = step_of_epoch * self.rows_per_step
        return self.epoch_order(epoch)[start : start + self.rows_per_step].tolist()

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Return the indices of the rows of an epoch in order, int (n,). Epochs are counted from 0."""
        return _epoch_order(self.sizes, self.weights, self.seed, epoch)


def _num_extra(weight: float, size: int) -> int:
    """Return how many rows of a dataset an epoch uses once more, for the fraction of its weight; at least 1 if it uses no others."""
    fewest = 0 if int(weight) else 1
    return min(size, max(fewest, round((weight - int(weight)) * size)))


@lru_cache(maxsize=2)  # batches of the next epoch are built while this one ends
def _epoch_order(sizes: tuple[int, ...], weights: tuple[float, ...], seed: int, epoch: int) -> np.ndarray:
    """Return the row indices of an epoch in order; see `Sampler`. The array is cached, and must not be changed."""
    parts, start = [], 0
    for index, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        extra = np.random.default_rng((seed, epoch, index)).permutation(size)[: _num_extra(weight, size)]
        whole = np.tile(np.arange(size), int(weight))
        parts.append(start + np.concatenate([whole, extra]))
        start += size
    rows = np.concatenate(parts)
    return rows[np.random.default_rng((seed, epoch)).permutation(len(rows))]


class Loader:
    """A loader that builds the batches of a dataset by step.

    Args:
        rows: the rows.
        sampler: chooses the rows of each step.
        rank, num_ranks: the rank that gets its part of each step, and the number of ranks.
        unit: rows of a micro-batch, which is not cut between ranks.

    Attributes:
        pads_to_step: pad the batches of all ranks to the longest row of the step, because random numbers of dropout depend on the
            length.
    """

    def __init__(self, rows: TokenTable, sampler: Sampler, rank: int = 0, num_ranks: int = 1, unit: int = 1) -> None:
        self.rows, self.sampler = rows, sampler
        self._rank, self._num_ranks, self._unit = rank, num_ranks, unit
        self.pads_to_step = False

    def batch(self, step: int) -> Batch:
        """Return this rank's batch of step ``step``, counted from 0."""
        indices = self.sampler.rows(step)
        if self._num_ranks == 1:
            return collate([self.rows[index] for index in indices], indices)
        own_range = deal(self.rows.num_tokens[indices].tolist(), self._unit, self._num_ranks)[self._rank]
        if not own_range:
            return stand_in(self.rows[indices[0]], indices[0])
        chosen = indices[own_range.start : own_range.stop]
        length = int(self.rows.lengths[indices].max()) if self.pads_to_step else 0
        batch = collate([self.rows[index] for index in chosen], chosen, length)
        return replace(batch, share=len(chosen) / len(indices))


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
    batch_tokens = [sums[end] - sums[start] for start, end in pairwise([0, *ends])]
    max_batches = -(-len(batch_tokens) // num_ranks)
    counts = _count_per_rank(batch_tokens, _smallest_token_limit(batch_tokens, max_batches, num_ranks), max_batches)
    while len(counts) < num_ranks and max(counts) > 1:  # a rank without rows would only wait
        largest = counts.index(max(counts))
        half = counts[largest] // 2
        counts[largest : largest + 1] = [counts[largest] - half, half]
    bounds = [0, *(ends[count - 1] for count in accumulate(counts))]
    bounds += [len(tokens)] * (num_ranks + 1 - len(bounds))  # for ranks without rows
    return [range(start, stop) for start, stop in pairwise(bounds)]


def _smallest_token_limit(batch_tokens: Sequence[int], max_batches: int, num_ranks: int) -> int:
    """Return the smallest limit with which `_count_per_rank` needs no more ranks than there are, found by bisection."""
    low, high = max(batch_tokens), sum(batch_tokens)
    while low < high:
        limit = (low + high) // 2
        if len(_count_per_rank(batch_tokens, limit, max_batches)) <= num_ranks:
            high = limit
        else:
            low = limit + 1
    return high


def _count_per_rank(batch_tokens: Sequence[int], limit: int, max_batches: int) -> list[int]:
    """Return the number of micro-batches of each rank if one rank after the other takes as many as it may, for as many ranks as are needed.

    A rank may take at most ``max_batches``, with at most ``limit`` tokens unless it takes a single one. ``batch_tokens``: the tokens of
    each micro-batch.
    """
    counts, num_tokens = [0], 0
    for size in batch_tokens:
        if counts[-1] and (num_tokens + size > limit or counts[-1] == max_batches):
            counts.append(0)
            num_tokens = 0
        counts[-1] += 1
        num_tokens += size
    return counts


def stand_in(row: Row, index: int) -> Batch:
    """Return a batch of one row that does not count, which a rank without rows computes while others have some."""
    return replace(collate([row], [index]), places=(), share=0.0)


def batch_from(rows: Sequence[Row], first: int, batch_size: int) -> Batch:
    """Return the batch of ``batch_size`` rows from index ``first`` on, fewer at the end of the rows, for evaluation."""
    indices = range(first, min(first + batch_size, len(rows)))
    return collate([rows[index] for index in indices], indices)
