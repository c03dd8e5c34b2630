"""``samples.jsonl``: what the model answered to the run's prompts, and after which step."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from horizon_lm.errors import ConfigError
from horizon_lm.report.checked import NotJsonError, check_json, read_bytes


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
    """The lines of a file. A last line without its end is of a run that was killed, and is left out.

    Raises:
        ConfigError: any other line that is not one of samples, with its number.
    """
    *lines, rest = read_bytes(path).split(b"\n")
    found: list[SamplesLine] = []
    for number, line in enumerate([*lines, rest], start=1):
        try:
            if line.strip():
                found.append(check_json(_LINE, line, f"{path}:{number}"))
        except NotJsonError as error:
            if number > len(lines):
                break
            raise ConfigError(f"{error}; remove the line, or the file") from error
    return found
