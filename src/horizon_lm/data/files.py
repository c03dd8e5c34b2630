"""JSON and JSONL files, row by row, each with its place.

They are read here and not by `datasets`, which would make one type of all rows: fields of tools' arguments would be
joined, dates parsed, and an error would name neither file nor line (docs/decisions/009-rows-as-they-are-written.md).
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

from horizon_lm.errors import DataError, first_line

ENDINGS = (".json", ".jsonl")
_LONGEST_WORD = 16  # characters that may be cut off from a value without a mark of its own, such as false or \\u00e9
_PIECE = 2**20  # characters read at once of a file that is one list


def read_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Rows of a JSON list or a JSONL file, each with its place: ``rows.jsonl:LINE`` or ``rows.json, row NUMBER``.

    Raises:
        DataError: the file is not JSON, or not UTF-8 text.
    """
    try:
        with Path(path).expanduser().open(encoding="utf-8-sig") as stream:
            is_list = _first_character(stream) == "["
            stream.seek(0)
            yield from _read_list(path, stream) if is_list else _read_lines(path, stream)
    except UnicodeDecodeError as error:
        raise DataError(f"{_undecodable(path)}: not UTF-8 text; save the file as UTF-8") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _first_character(stream: TextIO) -> str:
    while piece := stream.read(_PIECE):
        if text := piece.strip():
            return text[0]
    return ""


def _undecodable(path: str) -> str:
    """The line of a file that is no text."""
    with Path(path).expanduser().open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f"{path}:{number}:{error.start + 1}"
    return path


def _read_lines(path: str, lines: TextIO) -> Iterator[tuple[str, Any]]:
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
        except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
            raise DataError(f"{path}:{number}: cannot be read ({first_line(error)})") from error
        yield f"{path}:{number}", row


def _read_list(path: str, stream: TextIO) -> Iterator[tuple[str, Any]]:
    """Entries of one list, of which never much more than one entry is in memory."""
    text = _Text(path, stream)
    text.skip("[")
    number = 0
    while text.peek() != "]":
        if number:
            text.skip(",")
        number += 1
        yield f"{path}, row {number}", text.value()
    text.skip("]")
    if text.peek():
        text.fail("there is more after the list", text.position)


class _Text:
    """The text of a file, read piece by piece; what has been read of it is forgotten."""

    def __init__(self, path: str, stream: TextIO) -> None:
        self._path, self._stream, self._decoder = path, stream, json.JSONDecoder()
        self._text, self.position, self._line, self._column = "", 0, 1, 1

    def peek(self) -> str:
        """The next character that is no space; nothing at the end."""
        while True:
            while self.position < len(self._text):
                if not self._text[self.position].isspace():
                    return self._text[self.position]
                self.position += 1
            if not self._read():
                return ""

    def skip(self, wanted: str) -> None:
        found = self.peek()
        if found != wanted:
            self.fail(f"expecting {wanted!r}" + ("" if found else ", but the file ends"), self.position)
        self.position += 1

    def value(self) -> Any:
        """The next value, whatever its length."""
        self.peek()
        while True:
            try:
                value, stop = self._decoder.raw_decode(self._text, self.position)
            except json.JSONDecodeError as error:
                cut = error.msg.startswith("Unterminated") or error.pos > len(self._text) - _LONGEST_WORD
                if not (cut and self._read()):
                    self.fail(error.msg, error.pos)
                continue
            except (ValueError, RecursionError) as error:
                self.fail(first_line(error), self.position)
            if self._text[stop : stop + 1] in (*", ]\t\r\n",) or not self._read():  # a number could go on
                self.position = stop
                return value

    def fail(self, message: str, position: int) -> NoReturn:
        line, column = self._place(position)
        raise DataError(
            f"{self._path}:{line}:{column}: not valid JSON ({message}); a file that begins with '[' must be one JSON list "
            "of rows"
        )

    def _place(self, position: int) -> tuple[int, int]:
        before = self._text[:position]
        newlines = before.count("\n")
        column = len(before) - before.rfind("\n") if newlines else self._column + len(before)
        return self._line + newlines, column

    def _read(self) -> bool:
        """Drop what is behind, and read on: as much again as is not understood yet, so that the work stays linear."""
        piece = self._stream.read(max(_PIECE, len(self._text) - self.position))
        if piece:
            self._line, self._column = self._place(self.position)
            self._text, self.position = self._text[self.position :] + piece, 0
        return bool(piece)
