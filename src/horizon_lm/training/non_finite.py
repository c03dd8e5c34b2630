"""Reject or skip steps whose loss or gradient is NaN or infinite, name the rows that cause it, and save the batch."""

import math
import warnings
from typing import Any

from horizon_lm.data.batch import Batch
from horizon_lm.errors import NonFiniteError, NonFiniteWarning
from horizon_lm.objective.base import Loss
from horizon_lm.training.bad_batches import save_bad_batch
from horizon_lm.training.bad_rows import BadRows, find_bad_rows
from horizon_lm.training.run import Run, Training
from horizon_lm.units import Unit

_MOST_SEARCHES = 10  # in a run that skips such steps: a search takes as long as a few steps


class NonFinite:
    """The check of each step of a run."""

    def __init__(self, run: Run, training: Training) -> None:
        self._config, self._tokenizer, self._ranks = run.settings.config, run.tokenizer, run.session.ranks
        self._run_dir, self._reporter = run.session.run_dir, run.session.reporter
        self._model, self._objective = training.model, training.objectives.training
        self._loss, self._num_searches = 0.0, 0

    def finite_loss(self, loss: Loss, step: int, batch: Batch) -> float:
        """Return the loss as a number. Raise NonFiniteError if it is NaN or infinite, unless such steps are skipped."""
        self._loss = self._ranks.sum("the loss of a step", float(loss.value.item()))
        if not math.isfinite(self._loss) and self._config.non_finite == "raise":
            raise NonFiniteError(self._message(*self._explain(None, step, batch), step, batch))
        return self._loss

    def update(self, optimizer: Any, step: int, batch: Batch) -> None:
        """Run an optimizer step. If it rejects or skips a non-finite gradient, report the rows of the step."""
        try:
            skipped = optimizer.num_skipped
            if not math.isfinite(self._loss):
                optimizer.reject_step(f"the loss is {self._loss}")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", NonFiniteWarning)  # reported below, with the rows
                optimizer.step()
        except NonFiniteError as error:
            problem, cause = self._explain(optimizer.non_finite_unit, step, batch)
            if optimizer.partial_update:
                raise NonFiniteError(f"{error} {cause} Rows of this step: {shown_places(batch)}") from error
            if self._config.non_finite == "skip":
                limit = self._config.max_consecutive_skips
                problem += f", and {limit} steps before it were skipped (max_consecutive_skips)"
            raise NonFiniteError(self._message(problem, cause, step, batch)) from error
        if optimizer.num_skipped > skipped:
            problem, cause = self._explain(optimizer.non_finite_unit, step, batch)
            self._reporter.print(f"step {step}: skipped, because {problem}. {cause} Its rows: {shown_places(batch)}")

    def _explain(self, unit: Unit | None, step: int, batch: Batch) -> tuple[str, str]:
        """Return what is not finite, and sentences about its rows and the file in which they were saved."""
        bad = self._search(batch, with_gradient=math.isfinite(self._loss))
        if math.isfinite(self._loss):
            problem = f"the gradient of {unit} is not finite"
        else:
            unit = None if bad is None else bad.unit
            problem = f"the loss is {self._loss}" + (f", and {unit} is the first unit not to be finite" if unit else "")
        sentences = [] if bad is None else [bad.describe(batch.places)]
        try:
            if self._ranks.is_first:
                folder = self._run_dir.path / "bad-batches"
                file = save_bad_batch(folder, step, batch, self._tokenizer, problem, unit, bad)
                sentences.append("" if file is None else f"The batch is in {file}.")
        except OSError as error:
            sentences.append(f"The batch could not be saved ({error.strerror}).")
        return problem, " ".join(filter(None, sentences))

    def _search(self, batch: Batch, with_gradient: bool) -> BadRows | None:
        """Return the rows whose loss or gradient is not finite; None if they are unknown."""
        self._num_searches += 1
        if self._num_searches > _MOST_SEARCHES or self._ranks.mesh is not None:
            return None  # ranks would have to search equally long
        try:
            return find_bad_rows(self._model, self._objective, batch, with_gradient=with_gradient)
        except Exception:  # the step is rejected anyway, and its error must not be replaced by one of the search
            return None

    def _message(self, problem: str, cause: str, step: int, batch: Batch) -> str:
        """Return what has failed, what is kept, and the remedy."""
        weights = f"those after step {step - 1}" if step > 1 else "those that were loaded"
        remedy = "lower learning_rate" if step > 1 else "check the weights of the model"
        return (
            f"step {step}: {problem}. {cause}{' ' if cause else ''}The weights are {weights}, no model was exported, and the "
            f"metrics so far are in {self._run_dir.metrics.path}. Remedy: {remedy}, or check the rows of this step: "
            f"{shown_places(batch)}"
        )


def shown_places(batch: Batch) -> str:
    """Return the origins of the first rows of a batch, for a message."""
    return ", ".join(batch.places[:8]) + (", ..." if len(batch.places) > 8 else "")
