"""The steps after which a run does something besides training, by its settings or because a part requests it."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

from horizon_lm.planning.arithmetic.request import Saves
from horizon_lm.runs.config import RunConfig


def num_steps_of(number_or_share: float, num_steps: int) -> int:
    """Return the steps in a setting by transformers' rule: a number, or a fraction of all steps if below 1."""
    return int(number_or_share) if number_or_share >= 1 else math.ceil(number_or_share * num_steps)


@dataclass(frozen=True, slots=True)
class Control:
    """The actions that parts of a run request at the end of a step.

    Attributes:
        log, evaluate, save: do so after this step, whatever the settings are.
        stop: end as after the last step: export and evaluate the model. The run is finished, and cannot be resumed.
        interrupt: end as after a signal: write a checkpoint that the run goes on from, export nothing, and exit with code 75.
            It is the reason, which the message names ("interrupted after step 3 of 8 by REASON"). Empty for none.
    """

    log: bool = False
    evaluate: bool = False
    save: bool = False
    stop: bool = False
    interrupt: str = ""

    @classmethod
    def of_all(cls, requests: Iterable[tuple[Any, ...]]) -> Self:
        """Return the actions that are in any of these requests, each of them the fields of a `Control`."""
        # The maximum of booleans is true if any of them is; the maximum of texts is empty only if all of them are.
        return cls(*map(max, zip(*requests, strict=True)))


@dataclass(frozen=True, slots=True)
class Intervals:
    """The steps after which a run logs, evaluates, saves and answers sample prompts. Steps are counted from 1.

    ``requests`` returns the actions that are due now, whatever the settings are; any event may change them.
    """

    config: RunConfig
    num_steps: int
    steps_per_epoch: int
    requests: Callable[[], Control] = Control

    def logs(self, step: int) -> bool:
        """Return whether to log a step."""
        is_due = step in (1, self.num_steps) or step % self._interval_of(self.config.logging_steps) == 0
        return is_due or self.requests().log

    def evaluates(self, step: int) -> bool:
        """Return whether to evaluate after a step. After the last one every run evaluates, so False unless a part requests it."""
        config = self.config
        is_due = self._is_due(config.eval_strategy, config.eval_steps or config.logging_steps, step)
        return is_due or self.requests().evaluate

    def saves(self, step: int) -> bool:
        """Return whether to save after a step. After the last one every run exports its model, so False unless a part requests it."""
        return self._is_due(self.config.save_strategy, self.config.save_steps, step) or self.requests().save

    def samples(self, step: int) -> bool:
        """Return whether to answer the sample prompts after a step, which may turn out to be the last one (`Control.stop`)."""
        if self.config.sample_prompts is None:
            return False
        is_due = step == self.num_steps or step % self._interval_of(self.config.sample_steps) == 0
        return is_due or self.requests().stop

    def planned_saves(self) -> Saves:
        """Return the checkpoints that the run writes and keeps, if each evaluation finds a better model."""
        config, last_step = self.config, self.num_steps - 1  # the last one after which settings decide whether to save
        save_interval = self._steps_between(config.save_strategy, config.save_steps)
        num_regular = last_step // save_interval
        num_of_best = 0  # checkpoints that are written only because they are the best
        if config.load_best_model_at_end:
            eval_interval = self._steps_between(config.eval_strategy, config.eval_steps or config.logging_steps)
            num_of_both = last_step // math.lcm(save_interval, eval_interval)
            # One more, because the last model is saved before the best one is loaded.
            num_of_best = last_step // eval_interval - num_of_both + 1
        num = num_regular + num_of_best
        kept = min(num, config.save_total_limit or num) + config.load_best_model_at_end  # the best one is never deleted
        return Saves(num=num, kept=kept, of_best=num_of_best, only_model=config.save_only_model)

    def _is_due(self, strategy: str, interval: float, step: int) -> bool:
        return step != self.num_steps and step % self._steps_between(strategy, interval) == 0

    def _steps_between(self, strategy: str, interval: float) -> int:
        """Return the interval of a strategy in steps; that of ``no`` is the whole run, at whose end nothing is due."""
        if strategy == "no":
            return self.num_steps
        return self.steps_per_epoch if strategy == "epoch" else self._interval_of(interval)

    def _interval_of(self, number_or_share: float) -> int:
        return max(1, num_steps_of(number_or_share, self.num_steps))
