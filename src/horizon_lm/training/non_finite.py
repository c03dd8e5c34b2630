"""Losses and gradients that are NaN or infinite: a step with them is not applied, and its rows are named."""

import math
import warnings
from typing import Any

from horizon_lm.config import RunConfig
from horizon_lm.data.loader import Batch
from horizon_lm.errors import NonFiniteError, NonFiniteWarning
from horizon_lm.objective.base import Loss
from horizon_lm.training.metrics import Reporter
from horizon_lm.training.run_dir import RunDir


def finite(loss: Loss, step: int, batch: Batch, config: RunConfig, folder: RunDir) -> float:
    """The loss as a number; NonFiniteError if it is NaN or infinite, unless such steps are left out."""
    value = float(loss.value.item())
    if not math.isfinite(value) and config.non_finite == "raise":
        raise NonFiniteError(_non_finite(f"the loss is {value}", step, batch, folder))
    return value


def update(optimizer: Any, step: int, batch: Batch, config: RunConfig, folder: RunDir, reporter: Reporter) -> None:
    """An optimizer step; it refuses gradients that are not finite, and this tells where they come from."""
    try:
        skipped = optimizer.num_skipped
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", NonFiniteWarning)  # said below, with the rows
            optimizer.step()
    except NonFiniteError as error:
        if optimizer.partial_update:
            raise NonFiniteError(f"{error} Rows of this step: {_places(batch)}") from error
        what = "the gradient is not finite"
        if config.non_finite == "skip":
            what += f", and {config.max_consecutive_skips} steps before it were skipped (max_consecutive_skips)"
        raise NonFiniteError(_non_finite(what, step, batch, folder)) from error
    if optimizer.num_skipped > skipped:
        reporter.say(f"step {step}: skipped, because the gradient is not finite. Its rows: {_places(batch)}")


def _places(batch: Batch) -> str:
    return ", ".join(batch.places[:8]) + (", ..." if len(batch.places) > 8 else "")


def _non_finite(what: str, step: int, batch: Batch, folder: RunDir) -> str:
    before = f"as step {step - 1} left them" if step > 1 else "as they were loaded"
    remedy = "lower learning_rate" if step > 1 else "check the weights of the model"
    return (
        f"step {step}: {what}. The weights are {before}, nothing was exported, and the metrics so far are in "
        f"{folder.metrics_file}. Remedy: {remedy}, or look at the rows of this step: {_places(batch)}"
    )
