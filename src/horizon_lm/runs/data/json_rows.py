"""Read the rows of JSON lists and JSONL files, each with its place, a chunk of a file at a time.

A table of them has the text and the place of each row: with columns of fields it would force all rows into the same ones.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TextIO

from horizon_lm.errors import DataError, first_line
from horizon_lm.runs.data.local_files import encoding_of, not_utf8
from horizon_lm.runs.data.table_cache import cache_folder, cannot_be_cached, record

PLACE = "place"  # column of a table with the places of its rows
_ROW = "row"  # column with their texts
_MAX_LITERAL_CHARS = 16  # length of the longest token that the end of a chunk may split, such as false or \\u00e9
_CHUNK_CHARS = 2**20  # characters per chunk of a JSON list


def read_rows(path: str) -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of each row of a JSON list or a JSONL file. Places are ``rows.jsonl:LINE`` or ``rows.json, row NUMBER``.

    Raises:
        DataError: the file is not JSON, or not UTF-8 text.
    """
    try:
        file = Path(path).expanduser()
        with file.open(encoding=encoding_of(file)) as stream:
            is_list = _first_character(stream) == "["
            stream.seek(0)
            yield from _read_list(path, stream) if is_list else _read_lines(path, stream)
    except UnicodeDecodeError as error:
        raise DataError(not_utf8(file, path) or f"{path}: not {error.encoding} text; save the file as UTF-8") from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror or error}") from error


def _first_character(stream: TextIO) -> str:
    """Return the first character of a file that is not whitespace, which tells a list from lines; empty without any."""
    while chunk := stream.read(_CHUNK_CHARS):
        if text := chunk.strip():
            return text[0]
    return ""


def _read_lines(path: str, lines: TextIO) -> Iterator[tuple[str, Any]]:
    """Yield the places and the rows of a JSONL file. Blank lines are skipped, but counted."""
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line.rstrip())
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}:{number}:{error.colno}: not valid JSON ({error.msg}); a JSONL file has one object per line, "
                "a JSON file one list of rows"
            ) from error
        except (ValueError, RecursionError) as error:  # thousands of digits or of nested brackets
            raise DataError(f"{path}:{number}: cannot be read ({first_line(error)})") from error
        yield f"{path}:{number}", row


def _read_list(path: str, stream: TextIO) -> Iterator[tuple[str, Any]]:
    """Yield the places and the entries of a JSON list while holding little more than one of them in memory."""
    reader = _JsonListReader(path, stream)
    reader.skip("[")
    number = 0
    while reader.peek() != "]":
        if number:
            reader.skip(",")
        number += 1
        yield f"{path}, row {number}", reader.value()
    reader.skip("]")
    if reader.peek():
        reader.fail("unexpected text after the list", reader.position)


class _JsonListReader:
    """A reader of JSON values that keeps only the text not yet parsed.

    Args:
        path: name of the file, for messages.
        stream: the opened file.

    Attributes:
        position: index of the next character in the text that is kept.
    """

    def __init__(self, path: str, stream: TextIO) -> None:
        self._path, self._stream, self._decoder = path, stream, json.JSONDecoder()
        self._text, self.position = "", 0
        self._line, self._column = 1, 1  # of the first character that is kept

    def peek(self) -> str:
        """Move on to the next character that is not whitespace, and return it; an empty string at the end of the file."""
        while True:
            while self.position < len(self._text):
                if not self._text[self.position].isspace():
                    return self._text[self.position]
                self.position += 1
            if not self._read_chunk():
                return ""

    def skip(self, wanted: str) -> None:
        """Move past the next character that is not whitespace; raise DataError if it is not the wanted one."""
        found = self.peek()
        if found != wanted:
            self.fail(f"expecting {wanted!r}" + ("" if found else ", but the file ends"), self.position)
        self.position += 1

    def value(self) -> Any:
        """Parse and return the next value, reading as many chunks as it needs."""
        self.peek()
        while True:
            try:
                value, stop = self._decoder.raw_decode(self._text, self.position)
            except json.JSONDecodeError as error:
                may_be_cut = error.msg.startswith("Unterminated") or error.pos > len(self._text) - _MAX_LITERAL_CHARS
                if not (may_be_cut and self._read_chunk()):
                    self.fail(error.msg, error.pos)
                continue
            except (ValueError, RecursionError) as error:
                self.fail(first_line(error), self.position)
            # A number may continue in the next chunk: it has ended if a delimiter or more than a few characters of text follow.
            is_ended = self._text[stop : stop + 1] in tuple(", ]\t\r\n") or stop < len(self._text) - _MAX_LITERAL_CHARS
            if is_ended or not self._read_chunk():
                self.position = stop
                return value

    def fail(self, message: str, position: int) -> NoReturn:
        """Raise DataError with the line and column of a position."""
        line, column = self._line_and_column(position)
        raise DataError(
            f"{self._path}:{line}:{column}: not valid JSON ({message}); a file that starts with '[' must be one JSON list "
            "of rows"
        )

    def _line_and_column(self, position: int) -> tuple[int, int]:
        """Return the line and column in the file of a position in the text that is kept."""
        before = self._text[:position]
        newlines = before.count("\n")
        column = len(before) - before.rfind("\n") if newlines else self._column + len(before)
        return self._line + newlines, column

    def _read_chunk(self) -> bool:
        """Drop the parsed text, and append another chunk. At the end of the file change nothing, and return False."""
        # A value split across chunks is parsed again from its start, so chunks grow with it to keep the total work
        # linear.
        chunk = self._stream.read(max(_CHUNK_CHARS, len(self._text) - self.position))
        if chunk:
            self._line, self._column = self._line_and_column(self.position)
            self._text, self.position = self._text[self.position :] + chunk, 0
        return bool(chunk)


def read_json(names: Sequence[str], fingerprint: str) -> Any:
    """Return the rows of JSON files as a `datasets.Dataset` of their texts and places, from the cache if they are there.

    Args:
        names: the names of the files, as messages show them.
        fingerprint: hash of the files' names, sizes and times.

    Raises:
        DataError: a file cannot be read, has no rows or a text that is not Unicode; or the rows cannot be cached.
    """
    import datasets

    files = ", ".join(names)
    if next(_generate_rows([*names]), None) is None:
        raise DataError(f"{files}: no rows found")
    cache = cache_folder(fingerprint)
    features = datasets.Features({_ROW: datasets.Value("large_string"), PLACE: datasets.Value("string")})
    try:
        table = datasets.Dataset.from_generator(
            _generate_rows, features=features, gen_kwargs={"files": [*names]}, fingerprint=fingerprint, cache_dir=str(cache),
        )  # fmt: skip
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        raise DataError(f"{files}: {first_line(error.__cause__ or error)}") from error
    except OSError as error:
        raise DataError(f"{files}: {cannot_be_cached(error)}") from error
    return record(table)


def _generate_rows(files: list[str]) -> Iterator[dict[str, str]]:
    """Yield the text and the place of each row. Raise DataError for unpaired surrogates, which Arrow cannot hold."""
    for file in files:
        for place, row in read_rows(file):
            text = json.dumps(row, ensure_ascii=False)
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{place}: unpaired surrogate (\\ud800 to \\udfff) in {text[:60]!r}; remove it"
                ) from error
            yield {_ROW: text, PLACE: place}


def parse_rows(columns: Mapping[str, Sequence[str]]) -> list[Any]:
    """Return the rows of a part of a table that `read_json` has made, given as its columns."""
    return [json.loads(text) for text in columns[_ROW]]
