"""Reject or skip steps whose loss or gradient is NaN or infinite, and name their rows."""

import math
import warnings
from typing import Any

from horizon_lm.config import RunConfig
from horizon_lm.data.loader import Batch
from horizon_lm.errors import NonFiniteError, NonFiniteWarning
from horizon_lm.objective.base import Loss
from horizon_lm.quantities import counted
from horizon_lm.training.metrics import Reporter
from horizon_lm.training.run_dir import RunDir


def finite_loss(loss: Loss, step: int, batch: Batch, config: RunConfig, run_dir: RunDir) -> float:
    """Return the loss as a number. Raise NonFiniteError if it is NaN or infinite, unless such steps are skipped."""
    value = float(loss.value.item())
    if not math.isfinite(value) and config.non_finite == "raise":
        raise NonFiniteError(_message(f"the loss is {value}", step, batch, run_dir))
    return value


def update(optimizer: Any, step: int, batch: Batch, config: RunConfig, run_dir: RunDir, reporter: Reporter) -> None:
    """Run an optimizer step. If it rejects or skips a non-finite gradient, report the rows of the step."""
    try:
        skipped = optimizer.num_skipped
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteWarning)  # reported below, with the rows
            optimizer.step()
    except NonFiniteError as error:
        if optimizer.partial_update:
            raise NonFiniteError(f"{error} Rows of this step: {_places(batch)}") from error
        problem = "the gradient is not finite"
        if config.non_finite == "skip":
            problem += (
                f", after {counted(config.max_consecutive_skips or 0, 'skipped step')} in a row (max_consecutive_skips)"
            )
        raise NonFiniteError(_message(problem, step, batch, run_dir)) from error
    if optimizer.num_skipped > skipped:
        reporter.print(f"step {step}: skipped, because the gradient is not finite. Its rows: {_places(batch)}")


def _places(batch: Batch) -> str:
    return ", ".join(batch.places[:8]) + (", ..." if len(batch.places) > 8 else "")


def _message(problem: str, step: int, batch: Batch, run_dir: RunDir) -> str:
    weights = f"those after step {step - 1}" if step > 1 else "those that were loaded"
    remedy = "lower learning_rate" if step > 1 else "check the weights of the model"
    return (
        f"step {step}: {problem}. The weights are {weights}, no model was exported, and the metrics so far are in "
        f"{run_dir.metrics_file}. Remedy: {remedy}, or check the rows of this step: {_places(batch)}"
    )
