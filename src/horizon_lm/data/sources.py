"""Where rows are, to rows that can be reached by their number without being in memory."""

import csv
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from horizon_lm.config import DatasetConfig
from horizon_lm.data.files import ENDINGS, read_rows
from horizon_lm.data.progress import progress_bars
from horizon_lm.errors import DataError, first_line

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
