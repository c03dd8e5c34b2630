"""Open data files and datasets as rows on disk, accessed by index and not held in memory."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from horizon_lm.errors import DataError, first_line
from horizon_lm.runs.config import DatasetConfig
from horizon_lm.runs.data.foreign_tables import read_files, read_hub, rows_without_nulls
from horizon_lm.runs.data.json_rows import PLACE, parse_rows, read_json
from horizon_lm.runs.data.local_files import RowFiles, find_files
from horizon_lm.runs.data.table_cache import cache_folder, digest, progress_bars, record


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

    @property
    def decode(self) -> Callable[[Mapping[str, Sequence[Any]]], list[Any]]:
        """The function that returns the rows of a part of the table, given as its columns."""
        return parse_rows if self.is_json else rows_without_nulls

    def row(self, index: int) -> Any:
        """Return the row at an index."""
        return self.decode(self.table[index : index + 1])[0]

    def first_rows(self, number: int) -> Iterator[Any]:
        """Yield the first ``number`` rows, or all if there are fewer."""
        return map(self.row, range(min(number, len(self))))

    def sample(self, seed: int) -> np.ndarray:
        """Return the indices of the rows that ``fraction`` of the entry selects, int (n,): the same ones each time, by ``seed``."""
        if self.config.fraction is None:
            return np.arange(len(self))
        number = max(1, round(self.config.fraction * len(self)))
        return np.sort(np.random.default_rng((seed, len(self))).permutation(len(self))[:number])

    def place(self, index: int) -> str:
        """Return the place of a row, for messages."""
        if self.is_json:
            return str(self.table[index][PLACE])
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
        elif config.split is None:
            source = _read_files(config, splits["train"])
        else:
            source = _join_splits(config, {name: _read_files(config, files) for name, files in splits.items()})
    if not len(source):
        raise DataError(f"{config.path}: no rows found")
    if config.max_samples is not None and config.max_samples < len(source):
        first = source.table.select(range(config.max_samples))
        source = replace(source, table=first, fingerprint=digest(source.fingerprint, config.max_samples))
    return source


def _join_splits(config: DatasetConfig, sources: Mapping[str, Source]) -> Source:
    """Return the rows that ``split``, such as ``train[:10%]+test``, selects from the splits of local files, by their names."""
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


def _read_files(config: DatasetConfig, files: RowFiles) -> Source:
    """Return the rows of files of one type."""
    # By default, `datasets` mistakes a new file with an old timestamp for the old file.
    stats = [(os.path.realpath(path), path.stat()) for path in files.paths]
    state = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
    if files.is_json:
        fingerprint = digest(files.names, state)
        return Source(config, read_json(files.names, fingerprint), fingerprint, is_json=True)
    table = read_files(config, files, cache_folder(digest(state)))
    return Source(config, record(table), digest(table._fingerprint, state), is_json=False)
