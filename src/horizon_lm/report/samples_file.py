"""``samples.jsonl``: what the model answered to the run's prompts, and after which step."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from horizon_lm.report.checked import check_lines


@dataclass(frozen=True, slots=True)
class Sample:
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class SamplesLine:
    step: int
    samples: list[Sample]


_LINE = TypeAdapter(SamplesLine)


def read_samples(path: Path) -> list[SamplesLine]:
    """The lines of a file. ConfigError as of `check_lines`."""
    return list(check_lines(path, lambda line: _LINE))
