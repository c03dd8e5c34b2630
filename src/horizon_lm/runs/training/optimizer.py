"""The optimizer of a run, and the schedule of its learning rate."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from horizon_lm.common.quantities import counted
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.training.intervals import num_steps_of


def build_optimizer(model: Any, config: RunConfig, num_steps: int) -> tuple[Any, Any]:
    """Build the optimizer of a run and its learning-rate scheduler."""
    from horizon_lm.optim.choosing import make_optimizer

    optimizer = make_optimizer(
        config.optim, model, config, max_grad_norm=config.max_grad_norm or None,
        params=_decay_groups(model, config.weight_decay), seed=config.seed, moments=config.moments,
        non_finite=config.non_finite, max_consecutive_skips=config.max_consecutive_skips,
        update_in_backward=config.update_in_backward,
    )  # fmt: skip
    return optimizer, _build_scheduler(optimizer, config, num_steps)


def _build_scheduler(optimizer: Any, config: RunConfig, num_steps: int) -> Any:
    """Return transformers' scheduler of the learning rate. Raise ConfigError if it rejects its arguments."""
    from horizon_lm.model.adapters import without_bitsandbytes_messages

    with without_bitsandbytes_messages():
        from transformers import get_scheduler

    num_warmup_steps = num_steps_of(config.warmup_steps, num_steps)
    with _rejecting_arguments(config):
        return get_scheduler(
            config.lr_scheduler_type, optimizer, num_warmup_steps, num_steps, config.lr_scheduler_kwargs
        )


@contextmanager
def _rejecting_arguments(config: RunConfig) -> Iterator[None]:
    """Context manager: turn an error that a schedule's code raises about its arguments into ConfigError."""
    try:
        yield
    except (TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(
            f"lr_scheduler_kwargs: rejected by {config.lr_scheduler_type}: {first_line(error)}"
        ) from error


class SchedulePosition:
    """The position of a schedule, as a part of a run's state. The rates there follow from the run's settings."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule, which is plain data."""
        return dict(self._scheduler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the position in ``state``, with the learning rates that this run's settings give there."""
        scheduler = self._scheduler
        shares = [share_at(state["last_epoch"]) for share_at in scheduler.lr_lambdas]
        rates = [rate * share for rate, share in zip(scheduler.base_lrs, shares, strict=True)]
        scheduler.load_state_dict({**state, "base_lrs": scheduler.base_lrs, "_last_lr": rates})
        for group, rate in zip(scheduler.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


_CHECKED_STEPS = 100  # of a run, at most, whose learning rates are computed before it
_SMALLEST_PEAK = 0.001  # the least share of the learning rate that the warm-up of a run has to reach


def require_sane_schedule(config: RunConfig, num_steps: int) -> None:
    """Raise ConfigError if the learning rate of a run never gets near its peak, or is not between 0 and the peak."""
    num_warmup_steps = num_steps_of(config.warmup_steps, num_steps)
    # A few steps of a run are often tried with the warm-up of the whole run, so a warm-up that does not end is no mistake yet.
    if num_warmup_steps * _SMALLEST_PEAK > num_steps:
        raise ConfigError(
            f"warmup_steps: {num_warmup_steps:,}: the learning rate would not reach {_SMALLEST_PEAK:.1%} of its peak in the "
            f"{counted(num_steps, 'step')} of the run; set a fraction, such as 0.03"
        )
    arguments = config.lr_scheduler_kwargs or {}
    for name in ("num_cycles", "num_decay_steps"):
        if isinstance(arguments.get(name), int | float) and arguments[name] > num_steps:
            raise ConfigError(
                f"lr_scheduler_kwargs: {name}: {arguments[name]:g}: is more than the {counted(num_steps, 'step')} of the run; set a smaller number"
            )
    for step, share in _shares_of_peak(config, num_steps):
        if not (isinstance(share, int | float) and 0 <= share <= 1 + 1e-9):
            raise ConfigError(
                f"lr_scheduler_kwargs: the learning rate of step {step + 1:,} would be {share:g} times learning_rate; correct them"
            )


def _shares_of_peak(config: RunConfig, num_steps: int) -> Iterator[tuple[int, Any]]:
    """Yield at most `_CHECKED_STEPS` steps of a run, counted from 0, each with its share of the peak of the learning rate."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.empty(0))], lr=config.learning_rate)  # a stand-in
    scheduler = _build_scheduler(optimizer, config, num_steps)
    for step in range(0, num_steps, -(-num_steps // _CHECKED_STEPS)):
        with _rejecting_arguments(config):
            share = scheduler.lr_lambdas[0](step)
        yield step, share


def _decay_groups(model: Any, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups by transformers' rule: no weight decay for biases and norms.

    The groups are the same if the weight decay is 0, so that a run may be resumed with another value.
    """
    from transformers.trainer_pt_utils import get_parameter_names

    from horizon_lm.optim.choosing import decay_groups

    not_decayed = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]
    return decay_groups(model, set(get_parameter_names(model, [nn.LayerNorm], not_decayed)), weight_decay)
