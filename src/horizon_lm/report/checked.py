"""Read JSON files into dataclasses; errors name the file, line and field."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from horizon_lm.errors import ConfigError

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
        field = ".".join(map(str, first["loc"]))
        raise ConfigError(f"{place}: {field + ': ' if field else ''}{first['msg']}") from error


def check_lines(path: Path, adapter_of: Callable[[bytes], TypeAdapter[T]]) -> Iterator[T]:
    """Parse the lines of a JSONL file. A truncated last line, left by a killed run, is skipped.

    Args:
        path: the file.
        adapter_of: function that returns the type that a line must have.

    Raises:
        ConfigError: another line is invalid; the message has its number.
    """
    *lines, rest = read_bytes(path).split(b"\n")
    for number, line in enumerate([*lines, rest], start=1):
        if not line.strip():
            continue
        try:
            yield check_json(adapter_of(line), line, f"{path}:{number}")
        except NotJsonError as error:
            if number <= len(lines):
                raise ConfigError(f"{error}; remove the line, or the file") from error
