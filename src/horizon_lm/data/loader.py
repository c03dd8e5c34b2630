"""Build the batch of any step, independently of the steps before it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
import torch

from horizon_lm.constants import IGNORE_INDEX
from horizon_lm.data.batch import Batch
from horizon_lm.data.dealing import deal
from horizon_lm.data.token_dataset import Row, TokenTable
from horizon_lm.data.tokenize import Tokens


def collate(rows: Sequence[Row], indices: Sequence[int] = (), length: int = 0) -> Batch:
    """Build the batch of some rows with their indices. The attention mask marks padding; no token id does.

    The batch is as long as its longest sequence, and at least ``length`` tokens.
    """
    sequences = [row.sequences[index] for index in range(len(rows[0].sequences)) for row in rows]
    shape = (len(sequences), max(length, _longest(rows)))
    # The token id of padding has no effect, since attention and loss skip padding. Zero is in every vocabulary.
    input_ids = torch.zeros(shape, dtype=torch.int64)
    labels = torch.full(shape, IGNORE_INDEX, dtype=torch.int64)
    for index, each in enumerate(sequences):
        ids = torch.from_numpy(each.ids.astype(np.int64))
        input_ids[index, : len(ids)] = ids
        labels[index, : len(ids)] = torch.where(torch.from_numpy(each.trained), ids, IGNORE_INDEX)
    packed = any(row.segments is not None for row in rows)
    position_ids = _positions(rows, shape) if packed else None
    labels[:, 0] = IGNORE_INDEX
    if position_ids is not None:
        labels[position_ids == 0] = IGNORE_INDEX  # the first token of a packed row has no context
    lengths = [len(each.ids) for each in sequences]
    return Batch(
        input_ids,
        None if packed else _mask(sequences, shape),
        position_ids,
        labels,
        num_trained=int((labels[:, 1:] != IGNORE_INDEX).sum()),
        num_tokens=sum(lengths),
        rows=tuple(indices),
        places=tuple(row.place for row in rows),
    )


def _longest(rows: Sequence[Row]) -> int:
    return max(len(each.ids) for row in rows for each in row.sequences)


def _mask(sequences: Sequence[Tokens], shape: tuple[int, int]) -> torch.Tensor:
    """Return a mask of the shape (B, T): 1 for the tokens of each sequence, 0 for the padding."""
    mask = torch.zeros(shape, dtype=torch.int64)
    for index, each in enumerate(sequences):
        mask[index, : len(each.ids)] = 1
    return mask


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
        num_rows: number of rows, or the numbers of rows of several datasets.
        rows_per_step: number of rows in one optimizer step.
        seed: seed of the order.
        weights: number of times that the rows of each dataset are used in an epoch; empty to use each row once. For the
            fractional part of a weight, every epoch samples different rows.
    """

    num_rows: int | tuple[int, ...]
    rows_per_step: int
    seed: int
    weights: tuple[float, ...] = field(default=())

    @property
    def _sizes(self) -> tuple[int, ...]:
        return (self.num_rows,) if isinstance(self.num_rows, int) else self.num_rows

    @property
    def rows_per_epoch(self) -> int:
        """The number of rows in one epoch."""
        weights = self.weights or (1.0,) * len(self._sizes)
        return sum(
            int(weight) * size + _num_extra(weight, size) for weight, size in zip(weights, self._sizes, strict=True)
        )

    @property
    def steps_per_epoch(self) -> int:
        """The number of steps in one epoch."""
        return math.ceil(self.rows_per_epoch / self.rows_per_step)

    def num_steps(self, num_epochs: float) -> int:
        """Return the number of steps in a number of epochs, at least 1."""
        return max(1, math.ceil(num_epochs * self.steps_per_epoch))

    def rows(self, step: int) -> list[int]:
        """Return the indices of the rows in step ``step``, counted from 0."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        start = step_of_epoch * self.rows_per_step
        return self.epoch_order(epoch)[start : start + self.rows_per_step].tolist()

    def epoch_order(self, epoch: int) -> np.ndarray:
        """Return the indices of the rows of an epoch in order, int (n,). Epochs are counted from 0."""
        weights = self.weights or (1.0,) * len(self._sizes)
        return _epoch_order(self._sizes, weights, self.seed, epoch)


def _num_extra(weight: float, size: int) -> int:
    """Return the number of rows that an epoch uses one extra time; at least 1 if it would otherwise use no rows."""
    return min(size, max(0 if int(weight) else 1, round((weight - int(weight)) * size)))


@lru_cache(maxsize=1)
def _epoch_order(sizes: tuple[int, ...], weights: tuple[float, ...], seed: int, epoch: int) -> np.ndarray:
    """Return the row indices of an epoch in order."""
    parts, start = [], 0
    for index, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        extra = np.random.default_rng((seed, epoch, index)).permutation(size)[: _num_extra(weight, size)]
        parts.append(start + np.concatenate([np.tile(np.arange(size), int(weight)), extra]))
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
        pads_to_step: whether the batches of all ranks are padded to the longest row of the step, because dropout depends on the
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
        own = deal(self.rows.num_tokens[indices].tolist(), self._unit, self._num_ranks)[self._rank]
        if not own:
            return stand_in(self.rows[indices[0]], indices[0])
        chosen = indices[own.start : own.stop]
        length = _longest([self.rows[index] for index in indices]) if self.pads_to_step else 0
        batch = collate([self.rows[index] for index in chosen], chosen, length)
        return replace(batch, share=len(chosen) / len(indices))


def stand_in(row: Row, index: int) -> Batch:
    """Return a batch without targets, which a rank computes while others have rows."""
    batch = collate([row], [index])
    labels = torch.full_like(batch.labels, IGNORE_INDEX)
    return replace(batch, labels=labels, num_trained=0, num_tokens=0, places=(), share=0.0)


def batch_from(rows: Sequence[Row], first: int, batch_size: int) -> Batch:
    """Return the batch of a row and those after it, fewer at the end, for evaluation."""
    indices = range(first, min(first + batch_size, len(rows)))
    return collate([rows[index] for index in indices], indices)
