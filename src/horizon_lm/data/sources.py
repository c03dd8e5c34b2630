"""Open data files and data sets as rows that are reached by number without being held in memory."""

import csv
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, TextIO

from horizon_lm.config import DatasetConfig
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


@contextmanager
def progress_bars() -> Iterator[None]:
    """Inside, `datasets` shows how far it is on a terminal, and nothing elsewhere."""
    from datasets.utils.logging import (
        CRITICAL,
        disable_progress_bar,
        enable_progress_bar,
        get_verbosity,
        is_progress_bar_enabled,
        set_verbosity,
    )  # fmt: skip

    before, verbosity = is_progress_bar_enabled(), get_verbosity()
    set_verbosity(CRITICAL)
    (enable_progress_bar if sys.stderr.isatty() else disable_progress_bar)()
    try:
        yield
    finally:
        set_verbosity(verbosity)
        (enable_progress_bar if before else disable_progress_bar)()


_BUILDERS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".txt": "text", ".arrow": "arrow"}
_NO_ROWS = (".md", ".yaml", ".yml", ".py", "")  # endings of what lies beside rows
_HELD_OUT = re.compile(r"(^|[._\- ])(test|testing|val|valid|validation|eval|evaluation|dev)([._\- ]|$)")
_JSON, _PLACE = "row", "place"  # columns of rows that were read from JSON


@dataclass(frozen=True)
class Source:
    """Rows of one entry of ``datasets``, on disk.

    Attributes:
        config: the entry.
        table: a `datasets.Dataset`; with JSON text and its place where rows were read from JSON.
        fingerprint: of the content: of files, their names, sizes and times.
        is_json: the table has JSON text.
    """

    config: DatasetConfig
    table: Any
    fingerprint: str
    is_json: bool

    def __len__(self) -> int:
        return len(self.table)

    def without_table(self) -> "Source":
        """The same for another process, which is handed columns and needs no rows of its own."""
        return replace(self, table=self.table.select([]))

    def rows(self, columns: Mapping[str, Sequence[Any]]) -> list[Any]:
        """Rows from some columns of the table, as `datasets` hands them out. Fields that are null are left out."""
        if self.is_json:
            return [json.loads(text) for text in columns[_JSON]]
        names, values = list(columns), list(columns.values())
        return [_without_nulls(dict(zip(names, row, strict=True))) for row in zip(*values, strict=True)]

    def row(self, index: int) -> Any:
        return self.rows(self.table[index : index + 1])[0]

    def place(self, index: int) -> str:
        """Where a row comes from, for messages."""
        if self.is_json:
            return str(self.table[index][_PLACE])
        return f"{self.config.path}, row {index + 1}"


def open_source(config: DatasetConfig) -> Source:
    """The rows of an entry of ``datasets``.

    Raises:
        DataError: files that cannot be read, or without rows; a name that nothing has.
    """
    files = _own_files(config)
    with progress_bars():
        source = _read_json(config, files) if files and files[0].suffix in ENDINGS else _load(config, files)
    if not len(source):
        raise DataError(f"{config.path}: there are no rows")
    return source


# JSON: as it is written


def _own_files(config: DatasetConfig) -> list[Path]:
    """The files of a path on this machine; none where `datasets` is to choose, from a data set's own description.

    DataError for a folder of which it is not plain what is to be trained on.
    """
    path = Path(config.path).expanduser()
    if path.is_file():
        return [path]
    if not path.is_dir() or config.data_files or config.name or config.split:
        return []
    folder = path / config.data_dir if config.data_dir else path
    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
    files = [file for file in files if not any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)]
    files = [file for file in files if file.suffix not in _NO_ROWS and file.name != "dataset_info.json"]
    if not files:
        raise DataError(f"{config.path}: the folder has no files of rows")
    names = {file: file.relative_to(folder).with_suffix("").parts for file in files}
    held_out = [file for file, parts in names.items() if any(map(_HELD_OUT.search, parts))]
    if held_out and len(held_out) < len(files):
        raise DataError(
            f"{config.path}: {held_out[0].relative_to(folder)} looks like held-out rows; name the files to read with data_files, or each by its "
            "own path"
        )
    if len(kinds := {file.suffix for file in files}) > 1 and not kinds <= set(ENDINGS):
        raise DataError(
            f"{config.path}: the folder has files of several kinds ({', '.join(sorted(kinds))}); name those to read with data_files"
        )
    return files


def _read_json(config: DatasetConfig, files: Sequence[Path]) -> Source:
    names = [config.path] if Path(config.path).expanduser().is_file() else [str(file) for file in files]
    fingerprint = digest(names, _state(files))
    return Source(config, _generated(names, fingerprint), fingerprint, is_json=True)


def _state(files: Sequence[Path]) -> list[Any]:
    """What changes when a file does."""
    stats = [(os.path.realpath(file), file.stat()) for file in files]
    return [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]


def _generated(names: list[str], fingerprint: str) -> Any:
    import datasets

    if next(_lines(names), None) is None:
        raise DataError(f"{', '.join(names)}: the file has no rows")
    features = datasets.Features({_JSON: datasets.Value("large_string"), _PLACE: datasets.Value("string")})
    try:
        return datasets.Dataset.from_generator(
            _lines, features=features, gen_kwargs={"files": names}, fingerprint=fingerprint
        )
    except datasets.exceptions.DatasetGenerationError as error:
        if isinstance(error.__cause__, DataError):
            raise error.__cause__ from None
        raise DataError(f"{', '.join(names)}: {first_line(error.__cause__ or error)}") from error


def _lines(files: list[str]) -> Iterator[dict[str, str]]:
    for file in files:
        for place, row in read_rows(file):
            text = json.dumps(row, ensure_ascii=False)
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise DataError(
                    f"{place}: half a character (\\ud800 to \\udfff) in {text[:60]!r}; remove it"
                ) from error
            yield {_JSON: text, _PLACE: place}


# Everything else: as `datasets` reads it


def _load(config: DatasetConfig, files: Sequence[Path]) -> Source:
    import datasets

    path = Path(config.path).expanduser()
    state = _state(files or _described_files(config))
    if files:
        ending = files[0].suffix
        builder = _BUILDERS.get(ending) or ("json" if ".json" in files[0].name else None)
        if builder is None:
            raise DataError(
                f"{config.path}: files ending in {ending or 'nothing'} are not read; use .json, .jsonl, "
                f"{', '.join(_BUILDERS)}"
            )
        options: dict[str, Any] = {"path": builder, "data_files": {"train": [str(file) for file in files]}}
        if builder == "csv":
            options |= _of_csv(files[0])
    else:
        wanted = {"name": config.name, "data_dir": config.data_dir, "data_files": config.data_files}
        options = {"path": str(path) if path.is_dir() else config.path, **{k: v for k, v in wanted.items() if v}}
    if state:  # `datasets` would take a file with the time of an older one for that
        options["cache_dir"] = str(Path(datasets.config.HF_DATASETS_CACHE) / "horizon-lm" / digest(state))
    try:
        table = datasets.load_dataset(**options, split=config.split or "train")
    except Exception as error:  # whatever a reader of some format, or the hub, has to say
        raise DataError(f"{config.path}: {_reason(error)}") from error
    if any(name.startswith("__index_level_") for name in table.column_names):  # what pandas makes of the first ones
        raise DataError(
            f"{config.path}: rows have more fields than the header names; put texts that have commas between quotes"
        )
    return Source(config, table, digest(table._fingerprint, state), is_json=False)


def _described_files(config: DatasetConfig) -> list[Path]:
    """The files of a folder that `datasets` reads as its settings say."""
    folder = Path(config.path).expanduser() / (config.data_dir or "")
    named = [config.data_files] if isinstance(config.data_files, str) else config.data_files or ["**/*"]
    return sorted({file for pattern in named for file in folder.glob(pattern) if file.is_file()})


def _of_csv(file: Path) -> dict[str, Any]:
    """A text is what it is, even N/A or 7."""
    separator = "\t" if file.suffix == ".tsv" else ","
    try:
        with file.open(encoding="utf-8-sig", errors="replace", newline="") as stream:
            names = next(csv.reader(stream, delimiter=separator), [])
    except (OSError, csv.Error) as error:
        raise DataError(f"{file}: its header cannot be read ({first_line(error)})") from error
    return {"sep": separator, "converters": dict.fromkeys(names, str), "keep_default_na": False}


def _reason(error: BaseException) -> str:
    """The innermost of the errors that lie around each other: the others say that something went wrong."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"cannot be read as a dataset ({type(error).__name__}: {first_line(error)})"


def _without_nulls(value: Any) -> Any:
    """A table has every field in every row; what is null was not written."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        return [_without_nulls(each) for each in value]
    return value


def digest(*parts: Any) -> str:
    """A name for what these values are, the same in every process."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]
