"""The rows of a run, as far as memory and time depend on them."""

from collections.abc import Sequence
from dataclasses import dataclass

from horizon_lm.data.loader import Loader
from horizon_lm.data.tokenize import Row


@dataclass(frozen=True, slots=True)
class RowShape:
    """What of a run's rows decides how much memory they take.

    Attributes:
        length, eval_length: tokens of the longest one to train on, and of the longest held-out one.
        usual_length: tokens of the longest one of a step, as steps go; None for ``length``.
        tokens: of a step, without padding; None if that is not known.
        masked: rows differ in length, so that they are padded.
        distinct_tokens: that there are in all of them; None if that is not known.
    """

    length: int
    eval_length: int
    masked: bool = True
    distinct_tokens: int | None = None
    usual_length: int | None = None
    tokens: float | None = None

    @classmethod
    def of(cls, loader: Loader, held_out: Sequence[Row]) -> "RowShape":
        """Of rows that are there, and of the steps that they are trained in."""
        import numpy as np

        rows, lengths, present = loader.rows, [len(row) for row in loader.rows], np.zeros(0, dtype=bool)
        for row in (*rows, *held_out):
            if (largest := int(row.input_ids.max())) >= len(present):
                present = np.pad(present, (0, 2 * largest + 1 - len(present)))
            present[row.input_ids] = True
        # Where rows are padded there is the padding's token, too.
        distinct = int(present.sum()) + 1
        steps = [[lengths[i] for i in loader.sampler.rows(step)] for step in range(loader.sampler.steps_per_epoch)]
        usual = sum(max(step) * len(step) for step in steps) / sum(map(len, steps))
        return cls(
            max(lengths),
            max(map(len, held_out), default=0),
            masked=min(lengths) < max(lengths),
            distinct_tokens=distinct,
            usual_length=round(usual),
            tokens=sum(lengths) / len(steps),
        )
