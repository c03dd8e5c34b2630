"""A run's folder, read and checked. A file that is not there is None: a page can say so, and show the rest."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from horizon_lm.errors import ConfigError
from horizon_lm.report.checked import read_bytes
from horizon_lm.report.metrics_file import MetricsFile, read_metrics
from horizon_lm.report.plan_file import Plan, read_plan
from horizon_lm.report.samples_file import SamplesLine, read_samples
from horizon_lm.report.trace_file import TraceFile, read_trace

T = TypeVar("T")

METRICS, SETTINGS, PLAN = "metrics.jsonl", "config.yaml", "plan.json"
PREDICTED, MEASURED = "predicted_trace.json", "trace.json"
SAMPLES = "samples.jsonl"


@dataclass(frozen=True, slots=True)
class Run:
    """What there is of a run."""

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
        ConfigError: there is nothing of a run in it, or a file that is not what its name says.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: there is no such folder; name the output_dir of a run")

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
        raise ConfigError(f"{folder}: nothing of a run is in it; name the output_dir of a run, which has {names}")
    return run


def _read_settings(path: Path) -> dict[str, Any]:
    """The settings in a file; ConfigError with the place that is not YAML."""
    from ruamel.yaml import YAML
    from ruamel.yaml.error import MarkedYAMLError, YAMLError

    try:
        settings = YAML(typ="safe", pure=True).load(read_bytes(path))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from error
    except (YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: not the settings of a run, one a line, such as learning_rate: 1e-5")
    return {str(name): value for name, value in settings.items()}
