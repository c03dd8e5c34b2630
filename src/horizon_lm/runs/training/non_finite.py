"""Reject or skip steps whose loss or gradient is NaN or infinite, name the rows that cause it, and save the batch:
``bad-batches/step-N.json``.
"""

import json
import math
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from horizon_lm.common.constants import IGNORE_INDEX
from horizon_lm.common.disk import Disk, write_file
from horizon_lm.device.host_copy import HostCopy
from horizon_lm.errors import NonFiniteError, NonFiniteWarning
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.training.bad_rows import BadRows, find_bad_rows
from horizon_lm.runs.training.run import Run, Training

_MOST_TOKENS = 65536  # of a file, which then has about two megabytes
_MOST_FILES = 100  # of a run
_MOST_SEARCHES = 10  # in a run that skips such steps: a search takes as long as a few steps


class NonFinite:
    """Checks the loss and the gradient of each step of a run."""

    def __init__(self, run: Run, training: Training) -> None:
        self._config, self._tokenizer, self._ranks = run.settings.config, run.tokenizer, run.session.ranks
        self._run_dir, self._reporter = run.session.run_dir, run.session.reporter
        self._model, self._objective = training.model, training.objectives.training
        self._rows, self._num_searches, self._own_loss = run.data.loader.rows, 0, 0.0

    def check_loss(self, loss: HostCopy, step: int, batch: Batch) -> float:
        """Return the sum of all ranks' losses, and remember this rank's own. Raise NonFiniteError if the sum is NaN or infinite, unless
        such steps are skipped.
        """
        self._own_loss = float(loss.read())
        value = self._ranks.sum("the loss of a step", self._own_loss)
        if not math.isfinite(value) and self._config.non_finite == "raise":
            problem, cause = self._explain_and_save(None, value, step, batch)
            raise NonFiniteError(self._message(problem, cause, step, batch))
        return value

    def update(self, optimizer: Any, loss: float, step: int, batch: Batch) -> None:
        """Run an optimizer step. If it rejects or skips a loss or gradient that is not finite, report the rows of the step."""
        skipped_before = optimizer.num_skipped
        try:
            if not math.isfinite(loss):
                # This only marks the step; `step` below raises the error, or skips it.
                optimizer.reject_step(f"the loss is {loss}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NonFiniteWarning)  # reported below, with the rows
                optimizer.step()
        except NonFiniteError as error:
            raise self._rejection(error, optimizer, loss, step, batch) from error
        if optimizer.num_skipped > skipped_before:
            problem, cause = self._explain_and_save(optimizer.non_finite_unit, loss, step, batch)
            self._reporter.print(f"step {step}: skipped, because {problem}. {cause} Its rows: {shown_places(batch)}")

    def _rejection(self, error: NonFiniteError, optimizer: Any, loss: float, step: int, batch: Batch) -> NonFiniteError:
        """Return the error of a step that the optimizer has rejected with ``error``."""
        problem, cause = self._explain_and_save(optimizer.non_finite_unit, loss, step, batch)
        # If weights were changed already, the message must not promise the weights from before the step.
        if optimizer.partial_update:
            return NonFiniteError(f"{error} {cause} Rows of this step: {shown_places(batch)}")
        if self._config.non_finite == "skip":  # too many steps in a row were skipped, so the optimizer raised
            limit = self._config.max_consecutive_skips
            problem += f", and {limit} steps before it were skipped (max_consecutive_skips)"
        return NonFiniteError(self._message(problem, cause, step, batch))

    def _explain_and_save(self, grad_unit: str | None, loss: float, step: int, batch: Batch) -> tuple[str, str]:
        """Search for the rows that cause a problem, and save the batch. Return the problem, and sentences about the rows and the file.

        All ranks call this, because the sums of losses and of squared gradients that are checked are the same on all of them.

        ``grad_unit``: the unit whose gradient is not finite; ignored if the loss is not finite, because the first unit with such an
        output is searched then.
        """
        bad = self._search_rows(batch, with_gradient=math.isfinite(loss))
        if math.isfinite(loss):
            unit, problem = grad_unit, f"the gradient of {grad_unit} is not finite"
        else:
            unit = None if bad is None or bad.unit is None else str(bad.unit)
            problem = f"the loss is {loss}" + (f", and {unit} is the first unit not to be finite" if unit else "")
        sentences = [] if bad is None else [bad.describe(batch.places)]
        culprits: Sequence[int] = [] if bad is None else bad.rows
        own_rows = _rows_as_json(batch, culprits, self._tokenizer, _MOST_TOKENS // self._ranks.size)
        of_this_rank = [math.isfinite(self._own_loss), own_rows]
        of_ranks = self._ranks.exchange("the rows of a step that is not finite", of_this_rank)
        ranks_at_fault = [str(rank) for rank, (is_finite, _) in enumerate(of_ranks) if not is_finite]
        if self._ranks.size > 1 and ranks_at_fault:
            sentences.append(
                f"It comes from the rows of {'rank' if len(ranks_at_fault) == 1 else 'ranks'} {', '.join(ranks_at_fault)}."
            )
        # The rows of the ranks at fault come first.
        rows = [row for _, of_rank in sorted(of_ranks, key=lambda each: bool(each[0])) for row in of_rank]
        try:
            if self._ranks.is_first:
                folder = self._run_dir.path / "bad-batches"
                file = _save_batch(folder, step, rows, len(batch.all_places), problem, unit, bad)
                sentences.append("" if file is None else f"The batch is in {file}.")
        except OSError as error:
            sentences.append(f"The batch could not be saved ({error.strerror}).")
        return problem, " ".join(filter(None, sentences))

    def _search_rows(self, batch: Batch, with_gradient: bool) -> BadRows | None:
        """Return the rows whose loss or gradient is not finite; None if they are unknown."""
        self._num_searches += 1
        if self._num_searches > _MOST_SEARCHES or self._ranks.size > 1:
            return None  # several ranks would have to run the same passes, but each has other rows
        try:
            return find_bad_rows(self._model, self._objective, batch, self._rows, with_gradient=with_gradient)
        except Exception:  # the step is rejected anyway, and its error must not be replaced by one of the search
            return None

    def _message(self, problem: str, cause: str, step: int, batch: Batch) -> str:
        """Return the message of an error: the problem and its cause, the weights and files that are kept, and the remedy."""
        weights = f"those after step {step - 1}" if step > 1 else "those that were loaded"
        remedy = "lower learning_rate" if step > 1 else "check the weights of the model"
        return (
            f"step {step}: {problem}. {cause}{' ' if cause else ''}The weights are {weights}, no model was exported, and the "
            f"metrics so far are in {self._run_dir.metrics.path}. Remedy: {remedy}, or check the rows of this step: "
            f"{shown_places(batch)}"
        )


def shown_places(batch: Batch) -> str:
    """Return the origins of the first rows of a step, for a message."""
    places = batch.all_places
    return ", ".join(places[:8]) + (", ..." if len(places) > 8 else "")


# The file of a batch


def _save_batch(
    folder: Path, step: int, rows: list[Any], num_rows: int, problem: str, unit: str | None, bad: BadRows | None
) -> Path | None:
    """Write the rows of a step. Return the file; None if the folder is full.

    The file is plain ASCII: JSON escapes control characters and all others, so that it is safe to print on a terminal.

    Args:
        folder: the folder of such files.
        step: the step, counted from 1.
        rows: its rows as JSON, those that cause the problem first.
        num_rows: their number, of which some may be left out.
        problem: a sentence about what is not finite.
        unit: the unit where it was found; None if that is unknown.
        bad: the rows that cause it; None if they are unknown.

    Raises:
        OSError: the file cannot be written.
    """
    path = folder / f"step-{step}.json"
    if not path.exists() and len(list(folder.glob("step-*.json"))) >= _MOST_FILES:
        return None
    content = {
        "step": step, "problem": problem, "unit": unit, "causing_rows": None if bad is None else list(bad.rows),
        "micro_batches": None if bad is None else list(bad.micro_batches), "num_rows": num_rows, "rows": rows,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    write_file(Disk(), path, json.dumps(content, indent=1).encode("ascii"))
    return path


def _rows_as_json(batch: Batch, culprits: Sequence[int], tokenizer: Any, tokens_left: int) -> list[dict[str, Any]]:
    """Return the rows of a batch as JSON, culprits first. After ``tokens_left`` tokens, a row is cut and the others are left out."""
    rows: list[dict[str, Any]] = []
    for row in [*culprits, *(row for row in range(len(batch.places)) if row not in culprits)]:
        if tokens_left <= 0:
            break
        described = _row_as_json(batch, row, row in culprits, tokenizer, tokens_left)
        rows.append(described)
        tokens_left -= sum(len(sequence["input_ids"]) for sequence in described["sequences"])
    return rows


def _row_as_json(batch: Batch, row: int, is_culprit: bool, tokenizer: Any, tokens_left: int) -> dict[str, Any]:
    """Return a row as JSON, with at most ``tokens_left`` tokens."""
    sequences = []
    for index in range(row, len(batch.input_ids), len(batch.places)):  # one, or a chosen and a rejected answer
        length = _length(batch, index)
        ids = batch.input_ids[index, : min(length, tokens_left)].tolist()
        labels = batch.labels[index, : len(ids)].tolist()
        tokens_left -= len(ids)
        targets = [label for label in labels if label != IGNORE_INDEX]
        sequences.append(
            {
                "num_tokens": length, "text": _decode(tokenizer, ids), "target_text": _decode(tokenizer, targets),
                "input_ids": ids, "labels": labels,
            }
        )  # fmt: skip
    number = batch.rows[row] if batch.rows else None
    return {"place": batch.places[row], "row": number, "causes_it": is_culprit, "sequences": sequences}


def _length(batch: Batch, index: int) -> int:
    """Return the number of tokens of a sequence, without its padding. In packed rows, which have no mask, the padding counts."""
    if batch.attention_mask is None:
        return int(batch.input_ids.shape[1])
    return int(batch.attention_mask[index].sum())


def _decode(tokenizer: Any, ids: list[int]) -> str | None:
    try:
        return str(tokenizer.decode(ids))
    except Exception:  # a tokenizer's own code; the ids are in the file anyway
        return None
