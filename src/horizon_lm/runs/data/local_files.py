"""Find the files of rows of a local path, their type and encoding by their names and first bytes: neither a card nor an info file is read.

`datasets` lets a card (`README.md`) and info files name the files to open, any address among them, and their types.
"""

import codecs
import glob
import json
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from horizon_lm.common.paths import require_inside, require_regular
from horizon_lm.errors import DataError
from horizon_lm.runs.config import DatasetConfig

JSON_SUFFIXES = (".json", ".jsonl")
READERS = {
    ".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".txt": "text", ".arrow": "arrow", ".json": "json", ".jsonl": "json",
}  # fmt: skip
COMPRESSED_SUFFIXES = (".gz", ".zst", ".xz", ".bz2", ".zip")  # after .json or .jsonl
_IGNORED_SUFFIXES = (".md", ".yaml", ".yml", ".py", "")  # files that accompany rows
_IGNORED_NAMES = ("dataset_info.json", "dataset_infos.json")
_MAX_FILES = 100_000  # in a folder of rows
_MAX_INFO_BYTES = 2**20  # of a file that lists other files
_SPLIT_WORDS = {
    "train": "train|training", "test": "test|testing|eval|evaluation", "validation": "val|valid|validation|dev",
}  # fmt: skip
_SPLIT_NAMES = {name: re.compile(rf"(^|[._\- ])({words})([._\- ]|$)") for name, words in _SPLIT_WORDS.items()}
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip  # UTF-32 before UTF-16, whose mark is the beginning of its own


@dataclass(frozen=True, slots=True)
class RowFiles:
    """Files of rows of one type, at least one.

    Attributes:
        paths: the files.
        names: their names in messages: the path as the user wrote it, if the entry of ``datasets`` is one file.
        reader: the name of their reader in `datasets`.
        is_json: they are JSON lists or JSONL files, and not compressed.
    """

    paths: Sequence[Path]
    names: Sequence[str]
    reader: str
    is_json: bool


def find_files(config: DatasetConfig) -> dict[str, RowFiles] | None:
    """Return the files of a local path, or None for a name on the hub: of each split that ``split`` names, otherwise all as ``train``.

    Raises:
        DataError: there are no files of rows, files of several types or of an unknown one, a file that looks held out, or no such split.
        ConfigError: a file of the folder is a link that leads out of it.
    """
    splits = _find_splits(config)
    if splits is None:
        return None
    names = ["train"]
    if config.split is not None:
        names = list(dict.fromkeys(part.partition("[")[0].strip() for part in config.split.split("+")))
    if unknown := [name for name in names if name not in splits]:
        raise DataError(
            f"{config.path}: split: {config.split}: there is no split {unknown[0]!r}; there are {', '.join(splits) or 'none'}"
        )
    return {name: _row_files(config, splits[name]) for name in names}


def _row_files(config: DatasetConfig, paths: Sequence[Path]) -> RowFiles:
    """Return files with their type; raise DataError if there are none, or no reader of them."""
    if not paths:
        raise DataError(f"{config.path}: no rows found")
    first = paths[0]
    is_compressed = first.suffix in COMPRESSED_SUFFIXES and first.with_suffix("").suffix in JSON_SUFFIXES
    reader = "json" if is_compressed else READERS.get(first.suffix)
    if reader is None:
        others = ", ".join(suffix for suffix in READERS if suffix not in JSON_SUFFIXES)
        raise DataError(
            f"{config.path}: files with suffix {first.suffix or '(none)'} are not supported; use .json, .jsonl, {others}"
        )
    names = [config.path] if Path(config.path).expanduser().is_file() else [str(path) for path in paths]
    return RowFiles(paths, names, reader, is_json=first.suffix in JSON_SUFFIXES)


def _find_splits(config: DatasetConfig) -> dict[str, list[Path]] | None:
    """Return the files of a local path by split, or None for a name on the hub. Files of no split count as ``train``."""
    path = Path(config.path).expanduser()
    require_regular(path, DataError)
    if path.is_file():
        return {"train": [path]}
    if not path.is_dir():
        if config.path in READERS.values() and config.data_files:  # the name of a reader, with files for it
            return {"train": _files_matching(config, Path())}
        return None
    folder = path / config.data_dir if config.data_dir else path
    try:
        splits = _files_of_folder(config, folder)
    except OSError as error:
        raise DataError(f"{config.path}: {error.filename or folder}: {error.strerror or error}") from error
    for file in (file for files in splits.values() for file in files):
        require_regular(file, DataError)
        require_inside(file, path)
    return splits


def _files_of_folder(config: DatasetConfig, folder: Path) -> dict[str, list[Path]]:
    """Return the files of rows in a folder, by split. All are ``train`` if ``split`` is not set, or if no file names a split."""
    if config.data_files:
        return {"train": _files_matching(config, folder)}
    if (saved := _saved_splits(config, folder)) is not None:
        return saved
    files = [file for file in _visible_files(config, folder) if file.suffix not in _IGNORED_SUFFIXES]
    files = [file for file in files if file.name not in _IGNORED_NAMES]
    if not files:
        raise DataError(f"{config.path}: no files of rows in this folder")
    splits = _by_split(folder, files)
    if config.split is None:
        _reject_held_out(config, folder, splits)
    if config.split is None or list(splits) == [""]:
        splits = {"train": files}
    splits.pop("", None)  # files that name no split, beside others that do
    for files_of_split in splits.values():
        _require_one_type(config, files_of_split)
    return splits


def _reject_held_out(config: DatasetConfig, folder: Path, splits: Mapping[str, list[Path]]) -> None:
    """Raise DataError if some files, but not all, name a split other than ``train``: a run would train on rows that are held out."""
    held_out = [file for name in splits if name not in ("", "train") for file in splits[name]]
    if held_out and len(held_out) < sum(map(len, splits.values())):
        raise DataError(
            f"{config.path}: {held_out[0].relative_to(folder)} looks like held-out rows; select files with data_files, or list each by its "
            "own path"
        )


def _visible_files(config: DatasetConfig, folder: Path) -> list[Path]:
    """Return the visible files below a folder, sorted, without following links to other folders."""
    found: list[Path] = []

    def raise_error(error: OSError) -> None:
        raise error

    for root, folders, names in os.walk(folder, onerror=raise_error):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]  # which `os.walk` enters
        found += [Path(root, name) for name in names if not name.startswith((".", "_"))]
        if len(found) > _MAX_FILES:
            raise DataError(
                f"{config.path}: the folder has more than {_MAX_FILES:,} files; name the folder of the rows, or select files with data_files"
            )
    return sorted(file for file in found if file.exists() and not file.is_dir())


def _by_split(folder: Path, files: Iterable[Path]) -> dict[str, list[Path]]:
    """Return files by the split that a part of their path names; ``""`` for none, and for several the last one in `_SPLIT_NAMES`."""
    splits: dict[str, list[Path]] = {}
    for file in files:
        parts = file.relative_to(folder).with_suffix("").parts
        names = [name for name, pattern in _SPLIT_NAMES.items() if any(map(pattern.search, parts))]
        splits.setdefault(names[-1] if names else "", []).append(file)
    return splits


def _require_one_type(config: DatasetConfig, files: Sequence[Path]) -> None:
    """Raise DataError if files have several suffixes; JSON and JSONL are one type."""
    if len(suffixes := {file.suffix for file in files}) > 1 and not suffixes <= set(JSON_SUFFIXES):
        raise DataError(
            f"{config.path}: the folder has files of several types ({', '.join(sorted(suffixes))}); select files with data_files"
        )


def _files_matching(config: DatasetConfig, folder: Path) -> list[Path]:
    """Return the files below the folder that the patterns in ``data_files`` match. ``Path()`` stands for an entry that names a reader
    instead of a folder, whose patterns may be any paths.
    """
    is_reader = folder == Path()
    files: set[Path] = set()
    for pattern in config.data_files or ():
        if "://" in pattern or (not is_reader and Path(pattern).is_absolute()):
            raise DataError(
                f"{config.path}: {pattern} in data_files is not in this folder; name it as a path of its own"
            )
        names = glob.glob(str(Path(pattern).expanduser()), root_dir=folder, recursive=True)
        found = [folder / name for name in names if (folder / name).is_file()]
        if not found:
            raise DataError(f"{config.path}: no file matches {pattern} in data_files")
        files |= set(found)
    _require_one_type(config, sorted(files))
    return sorted(files)


# Folders that `save_to_disk` of `datasets` has written


def _saved_splits(config: DatasetConfig, folder: Path) -> dict[str, list[Path]] | None:
    """Return the files of a saved `Dataset` or `DatasetDict` by split, or None for any other folder."""
    if (folder / "dataset_dict.json").is_file():
        names = _read_info(folder / "dataset_dict.json", "splits")
        splits = {str(name): _saved_files(folder / str(name)) for name in names}
        if config.split is None and "train" not in splits:
            raise DataError(f"{config.path}: has the splits {', '.join(splits) or '(none)'}; choose one with split")
        return splits
    return {"train": _saved_files(folder)} if (folder / "state.json").is_file() else None


def _saved_files(folder: Path) -> list[Path]:
    """Return the files of a saved `Dataset`; raise DataError if one is not in its folder."""
    names = [
        entry.get("filename") if isinstance(entry, dict) else None
        for entry in _read_info(folder / "state.json", "_data_files")
    ]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or not (folder / name).is_file():
            raise DataError(
                f"{folder / 'state.json'}: names {name}, which is no file of this folder; save the dataset again"
            )
    return [folder / str(name) for name in names]


def _read_info(path: Path, key: str) -> list[Any]:
    """Return the list under a key of a JSON file; raise DataError if there is none, or the file is too long."""
    require_regular(path, DataError)
    try:
        if path.stat().st_size > _MAX_INFO_BYTES:
            raise ValueError("too long")
        entries = json.loads(path.read_text(encoding="utf-8"))[key]
        if not isinstance(entries, list):
            raise TypeError("no list")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: has no list {key!r}; save the dataset again with save_to_disk") from error
    return entries


# The encoding of files


def encoding_of(file: Path) -> str:
    """Return the encoding that the byte order mark of a file names; utf-8 without a mark."""
    with file.open("rb") as stream:
        first = stream.read(4)
    return next((encoding for mark, encoding in _MARKS.items() if first.startswith(mark)), "utf-8")


def not_utf8(file: Path, name: str | None = None) -> str | None:
    """Return a message with the line and column of the first byte of a file that is not UTF-8; None if there is none."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return (
                    f"{name or file}:{number}:{error.start + 1}: not UTF-8 text; save the file as UTF-8{_command(file)}"
                )
    return None


def _command(file: Path) -> str:
    """Return the hint at a command that converts a file, whose copy keeps the suffix by which it is read; empty if it is compressed."""
    if file.suffix in COMPRESSED_SUFFIXES:
        return ""
    source, copy = (shlex.quote(str(each)) for each in (file, file.with_suffix(f".utf8{file.suffix}")))
    return f", as Latin-1 for example: iconv -f LATIN1 -t UTF-8 {source} > {copy}"
