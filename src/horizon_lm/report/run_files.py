"""Read and check the files of a run. A missing file is None, which the page reports."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any, Literal, TypeVar

from pydantic import Field, TypeAdapter

from horizon_lm.errors import ConfigError
from horizon_lm.report.checked import check_json, check_lines, read_bytes
from horizon_lm.report.trace_file import TraceFile, read_trace


@dataclass(frozen=True, slots=True)
class TrainingLine:
    """The fields of a training line that the report uses, described in `horizon_lm.training.metrics`."""

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
        spans = [
            (after.tokens_total - before.tokens_total) / after.tokens_per_second / (after.step - before.step)
            for before, after in pairwise(self.training)
            if after.step > before.step and after.tokens_per_second
        ]
        return median(spans) if spans else None


_TRAINING_LINE: TypeAdapter[TrainingLine | Evaluation] = TypeAdapter(TrainingLine)
_EVALUATION: TypeAdapter[TrainingLine | Evaluation] = TypeAdapter(Evaluation)


def read_metrics(path: Path) -> MetricsFile:
    """Read the metrics in a file. Raise ConfigError like `check_lines`."""
    lines = list(check_lines(path, lambda line: _EVALUATION if b'"eval_loss"' in line else _TRAINING_LINE))
    return MetricsFile(
        [line for line in lines if isinstance(line, TrainingLine)],
        [line for line in lines if isinstance(line, Evaluation)],
        datetime.fromtimestamp(path.stat().st_mtime).astimezone(),
    )


@dataclass(frozen=True, slots=True)
class Item:
    name: str
    bytes: int
    note: str


@dataclass(frozen=True, slots=True)
class Limit:
    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Place:
    """The planned bytes of the host, the device or the disk.

    Attributes:
        items: the parts that add up to ``bytes``.
        bytes: all planned bytes.
        available: the smallest of ``limits``; None if unknown.
        limits: limits of this machine.
    """

    items: list[Item]
    bytes: int
    available: int | None
    limits: list[Limit]

    @property
    def is_used(self) -> bool:
        """True if any bytes are planned. A CPU has no device memory, so its buffers are planned on the host."""
        return bool(self.items)


@dataclass(frozen=True, slots=True)
class PlannedModel:
    name: str
    parameters: int
    active_parameters: int
    num_blocks: int
    hidden: int
    vocabulary: int


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """The shape of a step and the settings chosen by the plan, with the reasons."""

    rows: int
    length: int
    tokens: int
    num_steps: int | None
    precision: str
    device: str
    settings: dict[str, Any]
    reasons: list[str]


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """The simulated step: its duration, stalls of compute by cause, and the busy share of each stream."""

    seconds: float
    tokens_per_second: float
    model_tflops: float
    limited_by: str
    exposed_seconds: dict[str, float]
    busy: dict[str, float]
    hidden_from_tokens: dict[str, int | None]
    run_seconds: float | None


@dataclass(frozen=True, slots=True)
class PlannedMemory:
    """The memory in use over a step; each value holds from its moment in ``seconds`` on."""

    seconds: list[float]
    device: list[float]
    host: list[float]

    def __post_init__(self) -> None:
        if not len(self.seconds) == len(self.device) == len(self.host):
            raise ValueError("seconds, device and host must have the same number of values")


@dataclass(frozen=True, slots=True)
class Plan:
    """The content of ``plan.json``. ``buffers`` is the engine's share of the device, if the run limits it."""

    version: Literal[1]
    model: PlannedModel
    run: PlannedRun
    host: Place
    device: Place
    disk: Place
    hardware: dict[str, Any] | None
    step: PlannedStep | None
    memory: PlannedMemory | None
    buffers: Place | None = None

    @property
    def device_peak(self) -> Place | None:
        """The planned bytes to compare with ``device_bytes_peak``, or None if no bytes are planned."""
        if self.buffers is not None and self.buffers.is_used:
            return self.buffers
        return self.device if self.device.is_used else None


_PLAN = TypeAdapter(Plan)


def read_plan(path: Path) -> Plan:
    """Read a plan. Raise ConfigError with the invalid field."""
    return check_json(_PLAN, read_bytes(path), str(path))


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class SamplesLine:
    step: int
    samples: list[Sample]


_SAMPLES_LINE = TypeAdapter(SamplesLine)


def read_samples(path: Path) -> list[SamplesLine]:
    """Read the sample answers in a file. Raise ConfigError like `check_lines`."""
    return list(check_lines(path, lambda line: _SAMPLES_LINE))


T = TypeVar("T")

METRICS, SETTINGS, PLAN = "metrics.jsonl", "config.yaml", "plan.json"
PREDICTED, MEASURED = "predicted_trace.json", "trace.json"
SAMPLES = "samples.jsonl"


@dataclass(frozen=True, slots=True)
class Run:
    """The files of a run's folder."""

    folder: Path
    metrics: MetricsFile | None
    settings: dict[str, Any] | None
    plan: Plan | None
    predicted: TraceFile | None
    measured: TraceFile | None
    samples: list[SamplesLine] | None = None


def load_run(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
        ConfigError: it has no files of a run, or one of them is invalid.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; name the output_dir of a run")

    def read(name: str, reader: Callable[[Path], T]) -> T | None:
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


def _read_settings(path: Path) -> dict[str, Any]:
    """Read the settings in a file. Raise ConfigError with the line that is not YAML."""
    from horizon_lm.config.yaml_file import parse_yaml

    try:
        settings = parse_yaml(read_bytes(path).decode("utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: must have one setting per line, such as learning_rate: 1e-5")
    return {str(name): value for name, value in settings.items()}
