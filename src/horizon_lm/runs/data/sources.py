"""Open data files and datasets as rows on disk, accessed by index and not held in memory."""

import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

from horizon_lm.errors import DataError, first_line
from horizon_lm.runs.config import DatasetConfig
from horizon_lm.runs.data.foreign_tables import read_files, read_hub
from horizon_lm.runs.data.local_files import JSON_SUFFIXES, READERS, find_files, reader_of
from horizon_lm.runs.data.table_cache import discard_altered, record
from horizon_lm.runs.data.text_encoding import encoding_of, not_utf8

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


@contextmanager
def progress_bars() -> Iterator[None]:
    """Context manager: let `datasets` show progress bars on a terminal only, and log nothing."""
    from datasets import logging

    def show(is_shown: bool) -> None:
        (logging.enable_progress_bar if is_shown else logging.disable_progress_bar)()

    were_shown, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    show(sys.stderr.isatty())
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        show(were_shown)


_JSON, _PLACE = "row", "place"  # columns of a table with rows read from JSON


@dataclass(frozen=True)
class Source:
    """The rows of one entry of ``datasets``, on disk.

    Attributes:
        config: the entry.
        table: a `datasets.Dataset`. Rows read from JSON are kept as JSON text with their place, since a table would
            force all rows into the same fields.
        fingerprint: hash of the content, or of the files' names, sizes and times.
        is_json: the table has JSON text.
    """

    config: DatasetConfig
    table: Any
    fingerprint: str
    is_json: bool

    def __len__(self) -> int:
        return len(self.table)

    def without_table(self) -> "Source":
        """Return a copy without rows, for worker processes that receive the rows as columns."""
        return replace(self, table=self.table.select([]))

    def rows(self, columns: Mapping[str, Sequence[Any]]) -> list[Any]:
        """Return the rows of a part of the table, given as columns. Null fields are removed, unless rows are JSON: a table adds them."""
        if self.is_json:
            return [json.loads(text) for text in columns[_JSON]]
        names, values = list(columns), list(columns.values())
        return [_without_nulls(dict(zip(names, row, strict=True))) for row in zip(*values, strict=True)]

    def row(self, index: int) -> Any:
        """Return the row at an index."""
        return self.rows(self.table[index : index + 1])[0]

    def place(self, index: int) -> str:
        """Return the place of a row, for messages."""
        if self.is_json:
            return str(self.table[index][_PLACE])
        return f"{self.config.path}, row {index + 1}"


def open_source(config: DatasetConfig) -> Source:
    """Open the rows of an entry of ``datasets``.

    Raises:
        DataError: a file or dataset cannot be found or read, or has no rows.
    """
    import datasets

    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # or each use of a reader is reported to the hub
    splits = find_files(config)
    with progress_bars():
        if splits is None:
            table = read_hub(config)
            source = Source(config, table, digest(table._fingerprint, []), is_json=False)
        else:
            source = _read_splits(config, splits)
    if not len(source):
        raise DataError(f"{config.path}: no rows found")
    if config.max_samples is not None and config.max_samples < len(source):
        first = source.table.select(range(config.max_samples))
        source = replace(source, table=first, fingerprint=digest(source.fingerprint, config.max_samples))
    return source


def _read_splits(config: DatasetConfig, splits: Mapping[str, list[Path]]) -> Source:
    """Return the rows of local files that ``split`` selects, such as ``train[:10%]+test``.

    ``splits``: the files of each split, with ``train`` if ``split`` is None (`find_files`).
    """
    if config.split is None:
        return _read_files(config, splits["train"])
    names = list(dict.fromkeys(part.partition("[")[0].strip() for part in config.split.split("+")))
    if unknown := [name for name in names if name not in splits]:
        raise DataError(
            f"{config.path}: split: {config.split}: there is no split {unknown[0]!r}; there are {', '.join(splits) or 'none'}"
        )
    sources = {name: _read_files(config, splits[name]) for name in names}
    if len(kinds := {source.is_json for source in sources.values()}) > 1:
        raise DataError(
            f"{config.path}: split: {config.split}: the splits have files of different types; list each by its own path"
        )
    table = _select_split(config, sources)
    fingerprint = digest(config.split, [source.fingerprint for source in sources.values()])
    return Source(config, table, fingerprint, kinds.pop())


def _select_split(config: DatasetConfig, sources: Mapping[str, Source]) -> Any:
    """Return the rows that ``split`` selects from ``sources`` (by the name of their split), as one table, in the order of ``split``."""
    import datasets

    try:
        instruction = datasets.ReadInstruction.from_spec(config.split)
        chosen = instruction.to_absolute({name: len(source) for name, source in sources.items()})
    except (ValueError, AssertionError) as error:
        raise DataError(f"{config.path}: split: {config.split}: {first_line(error)}") from error
    tables = []
    for part in chosen:
        source = sources[part.splitname]
        tables.append(source.table.select(range(len(source))[part.from_ : part.to]))
    return datasets.concatenate_datasets(tables)


def _read_files(config: DatasetConfig, files: Sequence[Path]) -> Source:
    """Return the rows of files of one type."""
    reader = require_known_type(config, files)
    if files[0].suffix in JSON_SUFFIXES:
        return _read_json(config, files)
    state = _file_states(files)  # by default, `datasets` mistakes a new file with an old timestamp for the old file
    table = read_files(config, reader, files, _cache_folder(digest(state)))
    return Source(config, record(table), digest(table._fingerprint, state), is_json=False)


def require_known_type(config: DatasetConfig, files: Sequence[Path]) -> str:
    """Return the name of the reader of files of one type; raise DataError if there are no files, or no reader of them."""
    if not files:
        raise DataError(f"{config.path}: no rows found")
    reader = reader_of(files[0])
    if reader is None:
        others = ", ".join(suffix for suffix in READERS if suffix not in JSON_SUFFIXES)
        raise DataError(
            f"{config.path}: files with suffix {files[0].suffix or '(none)'} are not supported; use .json, .jsonl, {others}"
        )
    return reader


def names_in_messages(config: DatasetConfig, files: Sequence[Path]) -> list[str]:
    """Return the names of JSON files for the places of their rows: the path as the user wrote it, if the entry is one file."""
    return [config.path] if Path(config.path).expanduser().is_file() else [str(file) for file in files]


# JSON, read by our own reader


def _file_states(files: Sequence[Path]) -> list[Any]:
    """Return the path, size and times of each file: values that change when its content changes."""
    stats = [(os.path.realpath(file), file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]


def _read_json(config: DatasetConfig, files: Sequence[Path]) -> Source:
    """Return the rows of JSON files as a table of JSON texts and places, from the cache if they are there."""
    import datasets

    names = names_in_messages(config, files)
    fingerprint = digest(names, _file_states(files))
    if next(_generate_json_rows(names), None) is None:
        raise DataError(f"{', '.join(names)}: no rows found")
    cache = _cache_folder(fingerprint)
    features = datasets.Features({_JSON: datasets.Value("large_string"), _PLACE: datasets.Value("string")})
    try:
        table = datasets.Dataset.from_generator(
            _generate_json_rows, features=features, gen_kwargs={"files": names}, fingerprint=fingerprint, cache_dir=str(cache),
        )  # fmt: skip
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        raise DataError(f"{', '.join(names)}: {first_line(error.__cause__ or error)}") from error
    except OSError as error:
        raise DataError(f"{', '.join(names)}: {cannot_be_cached(error)}") from error
    return Source(config, record(table), fingerprint, is_json=True)


def cannot_be_cached(error: OSError) -> str:
    """Return the message, with the remedy, about an error of writing or reading the cache of `datasets`."""
    return (
        f"cannot be cached ({first_line(error)}); set HF_DATASETS_CACHE to a folder with space that can be written to"
    )


def _cache_folder(key: str) -> Path:
    """Return the folder for prepared rows in the cache. Delete it first if a table in it was altered since it was written."""
    import datasets

    folder = Path(datasets.config.HF_DATASETS_CACHE) / "horizon-lm" / key
    try:
        discard_altered(folder)
    except OSError as error:
        raise DataError(cannot_be_cached(error)) from error
    return folder


def _generate_json_rows(files: list[str]) -> Iterator[dict[str, str]]:
    """Yield the rows of files as JSON text, with their places. Raise DataError for unpaired surrogates, which Arrow cannot hold."""
    for file in files:
        for place, row in read_rows(file):
            text = json.dumps(row, ensure_ascii=False)
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{place}: unpaired surrogate (\\ud800 to \\udfff) in {text[:60]!r}; remove it"
                ) from error
            yield {_JSON: text, _PLACE: place}


def _without_nulls(value: Any) -> Any:
    """Return a value without null fields, which tables add for fields that a row lacks."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def digest(*parts: Any) -> str:
    """Return a hash of JSON-like values that is the same in every process."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]
