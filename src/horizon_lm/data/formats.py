"""Files of rows, in the shapes people have them in, to conversations.

Three shapes, told apart by the fields of a file's first row: ``messages`` (a list of role and content), alpaca
(``instruction``, ``input``, ``output``) and ``prompt`` / ``completion`` (text, or lists of messages).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from horizon_lm.config import DatasetConfig
from horizon_lm.errors import DataError

ROLES = ("system", "user", "assistant")
_MAX_SHOWN = 5  # problems listed in one error

Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages that alternate as the chat template wants them, and where they come from (``rows.jsonl:12``)."""

    messages: list[Message]
    place: str


def read_conversations(datasets: Sequence[DatasetConfig]) -> list[Conversation]:
    """All rows of all files, in order.

    Raises:
        DataError: a file that cannot be read, or rows that cannot be used; the message lists the first of them.
    """
    conversations: list[Conversation] = []
    problems: list[str] = []
    for dataset in datasets:
        conversations += _read_file(dataset, problems)
    if problems:
        heading = "" if len(problems) == 1 else f"{len(problems)} rows cannot be used:\n"
        more = f"\n... and {len(problems) - _MAX_SHOWN} more" if len(problems) > _MAX_SHOWN else ""
        raise DataError(heading + "\n".join(problems[:_MAX_SHOWN]) + more)
    return conversations


def _read_file(dataset: DatasetConfig, problems: list[str]) -> Iterator[Conversation]:
    shape: _Shape | None = None
    empty = True
    for place, row in read_rows(dataset.path):
        empty = False
        try:
            if not isinstance(row, dict):
                raise _RowError(f"a row must be an object with fields, but this is {_kind(row)}")
            renamed = _rename(row, dataset.columns or {})
            shape = shape or _detect(renamed)
            yield Conversation(shape.convert(renamed), place)
        except _RowError as error:
            problems.append(f"{place}: {error}")
            if shape is None:  # without a shape every further row would say the same
                return
    if empty:
        raise DataError(f"{dataset.path}: the file has no rows")


def read_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Rows of a JSON list or a JSONL file, each with its place: ``rows.jsonl:LINE`` or ``rows.json, row NUMBER``.

    Raises:
        DataError: the file is not JSON, or not UTF-8 text.
    """
    file = Path(path).expanduser()
    try:
        with file.open(encoding="utf-8-sig") as stream:
            first = next((char for line in stream for char in line if not char.isspace()), "")
            stream.seek(0)
            yield from _read_list(path, stream.read()) if first == "[" else _read_lines(path, stream)
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}); save the file as UTF-8") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _read_list(path: str, text: str) -> Iterator[tuple[str, Any]]:
    try:
        rows = json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}:{error.lineno}:{error.colno}: not valid JSON ({error.msg}); a file that begins with '[' must be "
            "one JSON list of rows"
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{path}, row {number}", row


def _read_lines(path: str, lines: Iterator[str]) -> Iterator[tuple[str, Any]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}:{number}:{error.colno}: not valid JSON ({error.msg}); a JSONL file has one object a line, a "
                "JSON file one list of rows"
            ) from error
        yield f"{path}:{number}", row


# Shapes


class _RowError(Exception):
    """What is wrong with a row; the caller knows its place."""


@dataclass(frozen=True)
class _Shape:
    name: str
    fields: tuple[str, ...]  # that a row must have
    convert: Callable[[Mapping[str, Any]], list[Message]]


def _rename(row: dict[str, Any], columns: dict[str, str]) -> dict[str, Any]:
    missing = [theirs for theirs in columns.values() if theirs not in row]
    if missing:
        raise _RowError(f"field {missing[0]!r}, which columns names, is missing; the row has {_names(row)}")
    return row | {ours: row[theirs] for ours, theirs in columns.items()}


def _detect(row: Mapping[str, Any]) -> _Shape:
    for shape in _SHAPES:
        if all(name in row for name in shape.fields):
            return shape
    wanted = "; ".join(f"{' and '.join(shape.fields)} ({shape.name})" for shape in _SHAPES)
    raise _RowError(f"the fields {_names(row)} make no known shape; rows have {wanted}. Rename them with columns")


def _from_messages(row: Mapping[str, Any]) -> list[Message]:
    return _checked(_messages(row, "messages"))


def _from_alpaca(row: Mapping[str, Any]) -> list[Message]:
    if row.get("history"):
        raise _RowError("field 'history' is not read; write the conversation as messages")
    parts = [_text(row, "instruction"), _text(row, "input", optional=True)]
    system = _text(row, "system", optional=True)
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": "\n".join(part for part in parts if part)})
    messages.append({"role": "assistant", "content": _text(row, "output")})
    return messages


def _from_prompt(row: Mapping[str, Any]) -> list[Message]:
    if isinstance(row.get("prompt"), str):
        return [
            {"role": "user", "content": _text(row, "prompt")},
            {"role": "assistant", "content": _text(row, "completion")},
        ]
    completion = _messages(row, "completion")
    if len(completion) != 1:
        raise _RowError(f"field 'completion' has {len(completion)} messages; a completion is one, or use messages")
    prompt = _messages(row, "prompt")
    if any(message["role"] == "assistant" for message in prompt):
        raise _RowError("field 'prompt' has an assistant's message; in messages every assistant's turn is trained on")
    return _checked(prompt + completion)


_SHAPES = (
    _Shape("a list of role and content", ("messages",), _from_messages),
    _Shape("alpaca", ("instruction", "output"), _from_alpaca),
    _Shape("text or messages", ("prompt", "completion"), _from_prompt),
)


def _text(row: Mapping[str, Any], name: str, optional: bool = False) -> str:
    value = row.get(name)
    if optional and value is None:
        return ""
    if name not in row:
        raise _RowError(f"field {name!r} is missing; the row has {_names(row)}")
    if not isinstance(value, str):
        raise _RowError(f"field {name!r} must be text, but is {_kind(value)}")
    return value


def _messages(row: Mapping[str, Any], name: str) -> list[Message]:
    value = row.get(name)
    if not isinstance(value, list) or not value:
        raise _RowError(f"field {name!r} must be a list of {{role, content}}, but is {_kind(value)}")
    return [_message(entry, f"{name}[{number}]") for number, entry in enumerate(value)]


def _message(entry: Any, where: str) -> Message:
    if not isinstance(entry, dict):
        raise _RowError(f"{where} must be {{role, content}}, but is {_kind(entry)}")
    for key in ("role", "content"):
        if not isinstance(entry.get(key), str):
            raise _RowError(f"{where}.{key} must be text, but is {_kind(entry.get(key))}")
    if entry["role"] not in ROLES:
        raise _RowError(f"{where}.role is {entry['role']!r}; it must be one of {', '.join(ROLES)}")
    unread = [key for key, value in entry.items() if key not in ("role", "content") and value]
    if unread:
        raise _RowError(f"{where}.{unread[0]} is not read; remove it, or leave the row out")
    return {"role": entry["role"], "content": entry["content"]}


def _checked(messages: list[Message]) -> list[Message]:
    """Messages in an order that has something to learn."""
    roles = [message["role"] for message in messages]
    if "system" in roles[1:]:
        raise _RowError("the system message must be the first one")
    if "assistant" not in roles:
        raise _RowError("there is no message of the assistant, so nothing to learn")
    turns = roles[1:] if roles[0] == "system" else roles
    for number, (before, role) in enumerate(pairwise(turns), 1):
        if before == role:
            raise _RowError(f"turns {number} and {number + 1} are both the {role}'s; join them or remove one")
    return messages


def _names(row: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, row)) if row else "no fields"


def _kind(value: Any) -> str:
    """A JSON value's kind, as its author would call it."""
    if value is None:
        return "missing or null"
    if isinstance(value, list):
        return "an empty list" if not value else "a list"
    if isinstance(value, bool):
        return "true or false"
    return {str: "text", dict: "an object", int: "a number", float: "a number"}[type(value)]
