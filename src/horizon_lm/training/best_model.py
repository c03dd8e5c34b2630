"""The best evaluation of a run, and early stopping."""

import math
from collections.abc import Mapping
from typing import Any

from horizon_lm.config import RunConfig
from horizon_lm.errors import ConfigError


class BestModel:
    """Tracks the metric that decides which model is best, as transformers' Trainer and EarlyStoppingCallback do.

    Args:
        config: settings of the run.

    Attributes:
        metric: the best value so far; None before the first evaluation.
        step: the step of that evaluation.
        stops: early stopping ends the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self.is_used = config.load_best_model_at_end or config.early_stopping_patience is not None
        name = config.metric_for_best_model or "eval_loss"
        self._name = name if name.startswith("eval_") else f"eval_{name}"
        greater = config.greater_is_better
        self._greater = not self._name.endswith("loss") if greater is None else greater
        self._patience, self._threshold = config.early_stopping_patience, config.early_stopping_threshold
        self.metric: float | None = None
        self.step, self._num_worse = 0, 0

    def update(self, line: Mapping[str, Any]) -> bool:
        """Add an evaluation, and return whether it is the best so far. The one before training does not count.

        Raises:
            ConfigError: the evaluation does not have the metric.
        """
        if not self.is_used:
            return False
        value = line.get(self._name)
        if not isinstance(value, int | float):
            names = ", ".join(
                name for name, each in line.items() if name.startswith("eval_") and isinstance(each, float)
            )
            raise ConfigError(f"metric_for_best_model: evaluations have no {self._name}; choose one of {names}")
        if line["step"] == 0:
            return False
        gain = math.inf if self.metric is None else (value - self.metric) * (1 if self._greater else -1)
        self._num_worse = 0 if gain > self._threshold else self._num_worse + 1
        if not gain > 0:
            return False
        self.metric, self.step = value, line["step"]
        return True

    @property
    def stops(self) -> bool:
        """True once as many evaluations as ``early_stopping_patience`` were not better."""
        return self._patience is not None and self._num_worse >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {"metric": self.metric, "step": self.step, "num_worse": self._num_worse}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` has returned."""
        self.metric, self.step, self._num_worse = state["metric"], state["step"], state["num_worse"]
