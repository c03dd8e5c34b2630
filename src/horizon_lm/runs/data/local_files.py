"""Find the files of rows of a local path by their names: neither a card nor an info file of a folder is read.

`datasets` lets a card (`README.md`) and info files name the files to open, any address among them, and their types.
"""

import glob
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
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


def reader_of(file: Path) -> str | None:
    """Return the name of the reader of a file, or None if such files are not read."""
    if file.suffix in COMPRESSED_SUFFIXES and file.with_suffix("").suffix in JSON_SUFFIXES:
        return "json"
    return READERS.get(file.suffix)


def find_files(config: DatasetConfig) -> dict[str, list[Path]] | None:
    """Return the files of a local path by split, or None for a name on the hub. Files of no split count as ``train``.

    Raises:
        DataError: the folder has no files of rows, files of several types, or a file that looks held out.
        ConfigError: a file of the folder is a link that leads out of it.
    """
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
