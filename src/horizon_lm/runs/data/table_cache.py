"""Keep tables in the cache of `datasets`, and find those that were cut off or altered before they are mapped.

Arrow would read outside of such a file. A file ``TABLE.arrow.xxh3`` beside each table has its size and hash.
"""

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from horizon_lm.errors import DataError, first_line

_SUFFIX = ".xxh3"


def digest(*parts: Any) -> str:
    """Return a hash of JSON-like values that is the same in every process."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


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


def cache_folder(key: str) -> Path:
    """Return the folder for the table of a key (`digest`). Delete it first if a table in it was altered since it was written."""
    import datasets

    folder = Path(datasets.config.HF_DATASETS_CACHE) / "horizon-lm" / key
    try:
        if any(_altered_tables(folder)):
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise DataError(cannot_be_cached(error)) from error
    return folder


def cannot_be_cached(error: OSError) -> str:
    """Return the message, with the remedy, about an error of writing or reading the cache of `datasets`."""
    return (
        f"cannot be cached ({first_line(error)}); set HF_DATASETS_CACHE to a folder with space that can be written to"
    )


def record(table: Any) -> Any:
    """Write the size and hash of the files of a `datasets.Dataset` beside them, unless that was done before; return the table."""
    for path in (Path(each["filename"]) for each in table.cache_files):
        note = path.with_name(path.name + _SUFFIX)
        if path.suffix == ".arrow" and not note.exists():
            part = note.with_name(f"{note.name}.{os.getpid()}.part")
            part.write_text(_describe(path), encoding="ascii")
            part.replace(note)
    return table


def map_cached(table: Any, function: Callable[..., Any], fingerprint: str, **options: Any) -> Any:
    """Return a `datasets.Dataset` that a function makes from batches of another, from the cache if it is there and unaltered.

    Args:
        table: the other table. Altered tables in the folders of its files, where tables made from it are, too, are deleted.
        function: function from the columns of a batch to the new columns.
        fingerprint: hash of everything that the new table depends on.
        options: further arguments of ``Dataset.map``.

    Raises:
        OSError: the table cannot be cached.
    """
    for folder in {Path(each["filename"]).parent for each in table.cache_files}:
        for path in _altered_tables(folder):
            path.unlink(missing_ok=True)
            path.with_name(path.name + _SUFFIX).unlink()
    return record(table.map(function, batched=True, new_fingerprint=fingerprint, **options))


def _altered_tables(folder: Path) -> list[Path]:
    """Return the tables in a folder whose size or hash is not the recorded one."""
    altered = []
    for note in folder.rglob(f"*.arrow{_SUFFIX}"):
        path = note.with_suffix("")
        if not path.is_file() or note.read_text(encoding="ascii", errors="replace") != _describe(path):
            altered.append(path)
    return altered


def _describe(path: Path) -> str:
    """Return the size and hash of a file as text."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
        return f"{file.tell()} {digest.hexdigest()}\n"
