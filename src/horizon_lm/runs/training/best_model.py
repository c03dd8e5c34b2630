"""The best evaluation of a run, and early stopping."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from horizon_lm.errors import ConfigError
from horizon_lm.runs.config import RunConfig

_TOKEN_METRICS = ("loss", "perplexity", "tokens", "entropy", "mean_token_accuracy")
_METRICS = {  # of an evaluation, by objective
    "sft": _TOKEN_METRICS,
    "pretrain": _TOKEN_METRICS,
    "dpo": (
        "loss", "rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected", "entropy",
        "mean_token_accuracy",
    ),
}  # fmt: skip


def eval_metrics(objective: str, eval_sets: Sequence[str]) -> list[str]:
    """Return the names of the metrics in the evaluations of a run."""
    prefixes = ["eval_", *(f"eval_{name}_" for name in eval_sets if len(eval_sets) > 1)]
    return [prefix + name for prefix in prefixes for name in _METRICS[objective]]


def require_known_metric(config: RunConfig) -> None:
    """Raise ConfigError if the metric that decides which model is best is none of the run's evaluations."""
    known = eval_metrics(config.objective, config.eval_set_names)
    if config.metric_for_best_model is not None and _full_name(config) not in known:
        raise ConfigError(
            f"metric_for_best_model: evaluations have no {_full_name(config)}; choose one of {', '.join(known)}"
        )


def _full_name(config: RunConfig) -> str:
    name = config.metric_for_best_model or "eval_loss"
    return name if name.startswith("eval_") else f"eval_{name}"


class BestModel:
    """Tracks the metric that decides which model is best, as transformers' Trainer and EarlyStoppingCallback do.

    Args:
        config: settings of the run.

    Attributes:
        is_used: the run asks for the best model, or for early stopping.
        metric: the best value so far; None before the first evaluation.
        step: the step of the evaluation with this value; 0 before the first one.
        stops: early stopping ends the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self.is_used = config.load_best_model_at_end or config.early_stopping_patience is not None
        self._name = _full_name(config)
        self._is_greater_better = config.greater_is_better
        if self._is_greater_better is None:
            self._is_greater_better = not self._name.endswith("loss")
        self._patience, self._threshold = config.early_stopping_patience, config.early_stopping_threshold
        self.metric: float | None = None
        self.step, self._num_without_gain = 0, 0

    def update(self, line: Mapping[str, Any]) -> bool:
        """Add an evaluation by its line of metrics. Return whether it is the best so far; one before the first step does not count."""
        if not self.is_used or line["step"] == 0:
            return False
        value = line[self._name]
        if math.isnan(value):
            gain = -math.inf
        elif self.metric is None:
            gain = math.inf
        else:
            gain = value - self.metric if self._is_greater_better else self.metric - value
        # A smaller gain is one all the same: it makes the model the best, but does not reset the patience.
        self._num_without_gain = 0 if gain > self._threshold else self._num_without_gain + 1
        is_best = gain > 0
        if is_best:
            self.metric, self.step = value, line["step"]
        return is_best

    @property
    def stops(self) -> bool:
        """True once ``early_stopping_patience`` evaluations in a row had no gain above the threshold."""
        return self._patience is not None and self._num_without_gain >= self._patience

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain data."""
        return {"metric": self.metric, "step": self.step, "num_worse": self._num_without_gain}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `state_dict` has returned."""
        self.metric, self.step, self._num_without_gain = state["metric"], state["step"], state["num_worse"]
