"""Read and check the files of a run. A missing file is None, which the page reports."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from horizon_lm.common.paths import near_path
from horizon_lm.errors import ConfigError
from horizon_lm.planning.arithmetic.plan_file import PlanFile
from horizon_lm.schedule.trace import Trace

T = TypeVar("T")


class NotJsonError(ConfigError):
    """A line that is not JSON, such as the last line of a run that was killed while writing it."""


def read_bytes(path: Path) -> bytes:
    """Return the content of a file. Raise ConfigError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error


def check_json(adapter: TypeAdapter[T], content: bytes, place: str) -> T:
    """Parse JSON into a dataclass.

    Raises:
        NotJsonError: the content is not JSON.
        ConfigError: a field is missing or has the wrong type; the message names the first such field.
    """
    try:
        return adapter.validate_json(content, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise NotJsonError(f"{place}: {first['msg']}") from error
        name = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{place}: {name + ': ' if name else ''}{first['msg']}") from error


def check_lines(path: Path, adapter_of: Callable[[bytes], TypeAdapter[T]]) -> Iterator[T]:
    """Parse the lines of a JSONL file, each with the adapter that the function returns for it.

    A truncated last line, left by a killed run, is skipped.

    Raises:
        ConfigError: another line is invalid; the message has its number.
    """
    *lines, unfinished = read_bytes(path).split(b"\n")
    for number, line in enumerate([*lines, unfinished], start=1):
        if not line.strip():
            continue
        try:
            yield check_json(adapter_of(line), line, f"{path}:{number}")
        except NotJsonError as error:
            if number <= len(lines):  # not the unfinished last line
                raise ConfigError(f"{error}; remove the line, or the file") from error


@dataclass(frozen=True, slots=True)
class TrainingLine:
    """The fields of a training line that the report uses, described in `horizon_lm.runs.training.metrics`.

    A line has more fields, which depend on the objective; the report accepts any value of them.
    """

    step: int
    loss: float | None
    learning_rate: float
    tokens_total: int
    trained_tokens_per_second: float
    tokens_per_second: float
    device_bytes_peak: int
    host_bytes: int
    seconds: float
    host_joules_per_token: float | None = None
    device_joules_per_token: float | None = None
    cores_of_others: float | None = None
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
    """The lines of ``metrics.jsonl`` and the time of its last change."""

    training: list[TrainingLine]
    evaluations: list[Evaluation]
    written: datetime

    @property
    def losses(self) -> list[tuple[int, float]]:
        """The steps with a loss, and their losses."""
        return [(line.step, line.loss) for line in self.training if line.loss is not None]

    @property
    def of_preferences(self) -> bool:
        """True if the run learns preferences."""
        return any(each.margin is not None for lines in (self.training, self.evaluations) for each in lines)

    @property
    def loss_title(self) -> str:
        """The axis title of a loss, which is a mean per pair or per token."""
        return "loss per pair" if self.of_preferences else "loss per token"

    @property
    def step_seconds(self) -> float | None:
        """The median seconds of a step, without evaluation and exports; None with fewer than two lines."""
        seconds_of_steps = [  # from the speed, which leaves out evaluation and exports
            (after.tokens_total - before.tokens_total) / after.tokens_per_second / (after.step - before.step)
            for before, after in pairwise(self.training)
            if after.step > before.step and after.tokens_per_second
        ]
        return median(seconds_of_steps) if seconds_of_steps else None


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class SamplesLine:
    step: int
    samples: list[Sample]


@dataclass(frozen=True, slots=True)
class _TraceFile:
    """The content of a trace, with the field names of Chrome's trace format."""

    traceEvents: list[dict[str, Any]]  # noqa: N815
    otherData: dict[str, Any] = field(default_factory=dict)  # noqa: N815


_TRAINING_LINE: TypeAdapter[TrainingLine | Evaluation] = TypeAdapter(TrainingLine)
_EVALUATION: TypeAdapter[TrainingLine | Evaluation] = TypeAdapter(Evaluation)
_SAMPLES_LINE = TypeAdapter(SamplesLine)
_PLAN = TypeAdapter(PlanFile)
_TRACE = TypeAdapter(_TraceFile)


def read_metrics(path: Path) -> MetricsFile:
    """Read the metrics in a file. Raise ConfigError like `check_lines`."""
    lines = list(check_lines(path, lambda line: _EVALUATION if b'"eval_loss"' in line else _TRAINING_LINE))
    return MetricsFile(
        [line for line in lines if isinstance(line, TrainingLine)],
        [line for line in lines if isinstance(line, Evaluation)],
        datetime.fromtimestamp(path.stat().st_mtime).astimezone(),
    )


def read_plan(path: Path) -> PlanFile:
    """Read a plan. Raise ConfigError with the invalid field."""
    return check_json(_PLAN, read_bytes(path), str(path))


def read_trace(path: Path) -> Trace:
    """Read a trace. Raise ConfigError with the event that is invalid."""
    content = check_json(_TRACE, read_bytes(path), str(path))
    try:
        return Trace.read(content.traceEvents, content.otherData)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def read_samples(path: Path) -> list[SamplesLine]:
    """Read the sample answers in a file. Raise ConfigError like `check_lines`."""
    return list(check_lines(path, lambda line: _SAMPLES_LINE))


def _read_settings(path: Path) -> dict[str, Any]:
    """Read the settings in a file. Raise ConfigError with the line that is not YAML."""
    from horizon_lm.runs.config.yaml_file import parse_yaml

    try:
        settings = parse_yaml(read_bytes(path).decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must have one setting per line, such as learning_rate: 1e-5")
    return {str(name): value for name, value in settings.items()}


METRICS, SETTINGS, PLAN = "metrics.jsonl", "config.yaml", "plan.json"
PREDICTED, MEASURED = "predicted_trace.json", "trace.json"
SAMPLES = "samples.jsonl"


@dataclass(frozen=True, slots=True)
class Run:
    """The files of a run's folder."""

    folder: Path
    metrics: MetricsFile | None
    settings: dict[str, Any] | None
    plan: PlanFile | None
    predicted: Trace | None
    measured: Trace | None
    samples: list[SamplesLine] | None = None


def load_run(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
        ConfigError: it has no files of a run, or one of them is invalid.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder{near_path(folder) or '; name the output_dir of a run'}")

    def read(name: str, reader: Callable[[Path], T]) -> T | None:
        """Read a file, if it exists."""
        return reader(folder / name) if (folder / name).exists() else None

    run = Run(
        folder=folder,
        metrics=read(METRICS, read_metrics),
        settings=read(SETTINGS, _read_settings),
        plan=read(PLAN, read_plan),
        predicted=read(PREDICTED, read_trace),
        measured=read(MEASURED, read_trace),
        samples=read(SAMPLES, read_samples),
    )
    if all(part is None for part in (run.metrics, run.settings, run.plan, run.predicted, run.measured)):
        names = ", ".join((METRICS, SETTINGS, PLAN, PREDICTED, MEASURED))
        raise ConfigError(f"{folder}: no files of a run; name the output_dir of a run, which has {names}")
    return run
