"""The batch of any step, without having seen the steps before it."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from horizon_lm.constants import IGNORE_INDEX
from horizon_lm.data.token_dataset import Row
from horizon_lm.data.tokenize import Tokens


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one step, padded on the right to the longest. (B, T) tensors of int64.

    Preferences have all chosen answers first, then all rejected ones, in the same order.

    Attributes:
        attention_mask: 0 where padding is; None for packed rows.
        position_ids: of packed rows: they begin anew with each row in a row, and with the padding; else None.
        num_trained: tokens that are targets; the loss of a step is their mean.
        num_tokens: tokens without padding.
        rows: numbers of the rows in their data set.
        places: where the rows come from.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    labels: torch.Tensor
    num_trained: int
    num_tokens: int
    rows: tuple[int, ...]
    places: tuple[str, ...]

    def inputs(self) -> dict[str, Any]:
        """What a model's forward is given, but for the labels."""
        given = {"input_ids": self.input_ids, "attention_mask": self.attention_mask, "position_ids": self.position_ids}
        return {name: tensor for name, tensor in given.items() if tensor is not None}


def collate(rows: Sequence[Row], numbers: Sequence[int] = ()) -> Batch:
    """Rows side by side. What is padding is told by the attention mask, never by a token's id."""
    sequences = [row.sequences[index] for index in range(len(rows[0].sequences)) for row in rows]
    shape = (len(sequences), max(len(each.ids) for each in sequences))
    # The padding id is never seen: attention skips it and no label is there. Zero is in every vocabulary.
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
        labels[position_ids == 0] = IGNORE_INDEX  # nothing before it is seen
    lengths = [len(each.ids) for each in sequences]
    return Batch(
        input_ids,
        None if packed else _mask(sequences, shape),
        position_ids,
        labels,
        num_trained=int((labels[:, 1:] != IGNORE_INDEX).sum()),
        num_tokens=sum(lengths),
        rows=tuple(numbers),
        places=tuple(row.place for row in rows),
    )


def _mask(sequences: Sequence[Tokens], shape: tuple[int, int]) -> torch.Tensor:
    mask = torch.zeros(shape, dtype=torch.int64)
    for index, each in enumerate(sequences):
        mask[index, : len(each.ids)] = 1
    return mask


def _positions(rows: Sequence[Row], shape: tuple[int, int]) -> torch.Tensor:
    """Each row in a row, and the padding, from 0."""
    positions = torch.zeros(shape, dtype=torch.int64)
    for index, row in enumerate(rows):
        segments = [*(row.segments or [len(row)]), shape[1] - len(row)]
        positions[index] = torch.cat([torch.arange(length) for length in segments])
    return positions


@dataclass(frozen=True)
class Sampler:
    """Which rows a step has: a function of seed, epoch and step alone, so that a run can go on anywhere.

    Every epoch is a permutation of its own. Its last step has what is left over, as in transformers.

    Args:
        num_rows: rows of the data; of each data set, where there are several.
        rows_per_step: rows of one optimizer step.
        seed: of the order.
        weights: how often the rows of each data set come in an epoch; empty for once. What is left over of a weight are
            rows that every epoch chooses anew.
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
        weights = self.weights or (1.0,) * len(self._sizes)
        return sum(int(weight) * size + _rest(weight, size) for weight, size in zip(weights, self._sizes, strict=True))

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.rows_per_epoch / self.rows_per_step)

    def num_steps(self, num_epochs: float) -> int:
        """Steps of so many epochs, at least one."""
        return max(1, math.ceil(num_epochs * self.steps_per_epoch))

    def rows(self, step: int) -> list[int]:
        """Indices of the rows of step ``step``, counted from 0."""
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        start = step_of_epoch * self.rows_per_step
        weights = self.weights or (1.0,) * len(self._sizes)
        return _order(self._sizes, weights, self.seed, epoch)[start : start + self.rows_per_step].tolist()


def _rest(weight: float, size: int) -> int:
    """Rows that come once more than the others; at least one, if no row would come at all."""
    return min(size, max(0 if int(weight) else 1, round((weight - int(weight)) * size)))


@lru_cache(maxsize=1)
def _order(sizes: tuple[int, ...], weights: tuple[float, ...], seed: int, epoch: int) -> np.ndarray:
    """The rows of an epoch."""
    chosen, start = [], 0
    for index, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        rest = np.random.default_rng((seed, epoch, index)).permutation(size)[: _rest(weight, size)]
        chosen.append(start + np.concatenate([np.tile(np.arange(size), int(weight)), rest]))
        start += size
    rows = np.concatenate(chosen)
    return rows[np.random.default_rng((seed, epoch)).permutation(len(rows))]


class Loader:
    """Batches of a data set by step."""

    def __init__(self, rows: Sequence[Row], sampler: Sampler) -> None:
        self.rows, self.sampler = rows, sampler

    def batch(self, step: int) -> Batch:
        """The batch of step ``step``, counted from 0."""
        numbers = self.sampler.rows(step)
        return collate([self.rows[number] for number in numbers], numbers)


def in_order(rows: Sequence[Row], batch_size: int) -> Iterator[Batch]:
    """All rows once, in their order: for evaluation."""
    for start in range(0, len(rows), batch_size):
        numbers = range(start, min(start + batch_size, len(rows)))
        yield collate([rows[number] for number in numbers], numbers)
