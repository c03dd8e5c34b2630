"""The rows of a run, as far as memory and time depend on them."""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from horizon_lm.data.loader import Loader
from horizon_lm.data.table import TokenTable


@dataclass(frozen=True, slots=True)
class RowShape:
    """What of a run's rows decides how much memory they take.

    Attributes:
        length, eval_length: tokens of the longest one to train on, and of the longest held-out one.
        usual_length: tokens of the longest one of a step, as steps go; None for ``length``.
        tokens: of a step, without padding; None if that is not known.
        prompt_length: tokens of the longest sample prompt; 0 without any, or if that is not known.
        masked: attention needs a mask, because rows are padded or packed.
        distinct_tokens: that there are in all of them; None if that is not known.
    """

    length: int
    eval_length: int
    masked: bool = True
    distinct_tokens: int | None = None
    usual_length: int | None = None
    tokens: float | None = None
    prompt_length: int = 0

    @classmethod
    def of(cls, loader: Loader, held_out: Iterable[TokenTable], prompt_length: int = 0) -> "RowShape":
        """Of rows that are there, and of the steps that they are trained in."""
        rows, held_out, present = loader.rows, list(held_out), np.zeros(1, dtype=bool)
        assert isinstance(rows, TokenTable)
        for ids in (ids for table in (rows, *held_out) for ids in table.token_ids() if len(ids)):
            if (largest := int(ids.max())) >= len(present):
                present = np.pad(present, (0, 2 * largest + 1 - len(present)))
            present[ids] = True
        # Where rows are padded there is the padding's token, too.
        distinct = int(present.sum()) + 1 + prompt_length
        steps = [rows.lengths[loader.sampler.rows(step)] for step in range(loader.sampler.steps_per_epoch)]
        usual = sum(step.max() * len(step) for step in steps) / sum(map(len, steps))
        in_epoch = sum(rows.num_tokens[loader.sampler.rows(step)].sum() for step in range(len(steps)))
        return cls(
            int(rows.lengths.max()),
            max((int(table.lengths.max()) for table in held_out), default=0),
            masked=any(table.needs_mask for table in (rows, *held_out)),
            distinct_tokens=distinct,
            usual_length=round(usual),
            tokens=float(in_epoch) / len(steps),
            prompt_length=prompt_length,
        )
