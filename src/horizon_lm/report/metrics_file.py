"""``metrics.jsonl``: what a run measured, line by line."""

from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated

from pydantic import Field, TypeAdapter

from horizon_lm.report.checked import check_lines


@dataclass(frozen=True, slots=True)
class TrainingLine:
    """What the report shows of a training line; its fields are told in `horizon_lm.training.metrics`."""

    step: int
    loss: float | None
    learning_rate: float
    tokens_total: int
    trained_tokens_per_second: float
    tokens_per_second: float
    device_bytes_peak: int
    host_bytes: int
    seconds: float
    margin: Annotated[float | None, Field(validation_alias="rewards/margins")] = None
    accuracy: Annotated[float | None, Field(validation_alias="rewards/accuracies")] = None


@dataclass(frozen=True, slots=True)
class Evaluation:
    step: int
    eval_loss: float
    margin: Annotated[float | None, Field(validation_alias="eval_rewards/margins")] = None
    accuracy: Annotated[float | None, Field(validation_alias="eval_rewards/accuracies")] = None


@dataclass(frozen=True, slots=True)
class MetricsFile:
    """Lines in the order of the file, and when the last one was written."""

    training: list[TrainingLine]
    evaluations: list[Evaluation]
    written: datetime

    @property
    def losses(self) -> list[tuple[int, float]]:
        """Steps that have a loss, with it."""
        return [(line.step, line.loss) for line in self.training if line.loss is not None]

    @property
    def of_preferences(self) -> bool:
        """The run learns which of two answers is preferred."""
        return any(each.margin is not None for lines in (self.training, self.evaluations) for each in lines)

    @property
    def loss_title(self) -> str:
        """What the mean of a loss is taken over."""
        return "loss per pair" if self.of_preferences else "loss per token"

    @property
    def step_seconds(self) -> float | None:
        """Median seconds of a step between two lines, without what stands between steps; None without two lines."""
        spans = [
            (after.tokens_total - before.tokens_total) / after.tokens_per_second / (after.step - before.step)
            for before, after in pairwise(self.training)
            if after.step > before.step and after.tokens_per_second
        ]
        return median(spans) if spans else None


_TRAINING_LINE: TypeAdapter[TrainingLine | Evaluation] = TypeAdapter(TrainingLine)
_EVALUATION: TypeAdapter[TrainingLine | Evaluation] = TypeAdapter(Evaluation)


def read_metrics(path: Path) -> MetricsFile:
    """The lines of a file. ConfigError as of `check_lines`."""
    lines = list(check_lines(path, lambda line: _EVALUATION if b'"eval_loss"' in line else _TRAINING_LINE))
    return MetricsFile(
        [line for line in lines if isinstance(line, TrainingLine)],
        [line for line in lines if isinstance(line, Evaluation)],
        datetime.fromtimestamp(path.stat().st_mtime).astimezone(),
    )
