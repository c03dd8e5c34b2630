"""What happens after which step."""

from dataclasses import dataclass

from horizon_lm.config import RunConfig
from horizon_lm.training.setup import in_steps


@dataclass(frozen=True, slots=True)
class Calendar:
    """The steps after which a run logs, evaluates, saves and answers sample prompts. Steps count from 1."""

    config: RunConfig
    num_steps: int
    steps_per_epoch: int

    @property
    def log_every(self) -> int:
        return self._interval(self.config.logging_steps)

    def logs(self, step: int) -> bool:
        return step in (1, self.num_steps) or step % self.log_every == 0

    def evaluates(self, step: int) -> bool:
        """The end of the run is not asked: it evaluates in any case."""
        config = self.config
        return self._due(config.eval_strategy, config.eval_steps or config.logging_steps, step)

    def saves(self, step: int) -> bool:
        """The end of the run is not asked: it exports in any case."""
        return self._due(self.config.save_strategy, self.config.save_steps, step)

    def samples(self, step: int) -> bool:
        return self.config.sample_prompts is not None and (
            step == self.num_steps or step % self._interval(self.config.sample_steps) == 0
        )

    def num_saves(self) -> int:
        """Exports on the way that are there at once, at most."""
        count = sum(map(self.saves, range(1, self.num_steps + 1)))
        return min(count, self.config.save_total_limit or count)

    def _due(self, strategy: str, interval: float, step: int) -> bool:
        if strategy == "no" or step == self.num_steps:
            return False
        return step % (self.steps_per_epoch if strategy == "epoch" else self._interval(interval)) == 0

    def _interval(self, number_or_share: float) -> int:
        return max(1, in_steps(number_or_share, self.num_steps))
