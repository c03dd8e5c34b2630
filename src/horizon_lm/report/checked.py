"""Files of a run are checked against dataclasses, so that what is wrong in one is said with its place."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from horizon_lm.errors import ConfigError

T = TypeVar("T")


class NotJsonError(ConfigError):
    """Not JSON at all, as the last line of a run that was killed while it wrote."""


def read_bytes(path: Path) -> bytes:
    """The content of a file; ConfigError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from error


def check_json(adapter: TypeAdapter[T], content: bytes, place: str) -> T:
    """A value of a dataclass from JSON.

    Raises:
        NotJsonError: it is not JSON.
        ConfigError: a field is missing or of another type; the message names the first one.
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
    """The lines of a file of JSON lines. A last line without its end is of a run that was killed, and is left out.

    Args:
        adapter_of: from a line to what it has to be.

    Raises:
        ConfigError: any other line is something else, with its number.
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
