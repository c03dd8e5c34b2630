"""Find cached tables that were cut off or altered, before they are mapped: arrow would read outside of such a file.

A file ``TABLE.arrow.xxh3`` beside each table has its size and hash.
"""

import hashlib
import os
import shutil
from pathlib import Path
from typing import Any

import xxhash

_SUFFIX = ".xxh3"


def record(table: Any) -> Any:
    """Write the size and hash of the files of a `datasets.Dataset` beside them, unless that was done before; return the table."""
    for path in (Path(each["filename"]) for each in table.cache_files):
        note = path.with_name(path.name + _SUFFIX)
        if path.suffix == ".arrow" and not note.exists():
            part = note.with_name(f"{note.name}.{os.getpid()}.part")
            part.write_text(_describe(path), encoding="ascii")
            part.replace(note)
    return table


def discard_altered(folder: Path) -> None:
    """Delete a folder of our own in the cache if a table in it is not as it was recorded."""
    if any(_altered_tables(folder)):
        shutil.rmtree(folder, ignore_errors=True)


def discard_altered_beside(table: Any) -> None:
    """Delete the altered tables in the folders in which a `datasets.Dataset` has its files, where tables made from it are, too."""
    for folder in {Path(each["filename"]).parent for each in table.cache_files}:
        for path in _altered_tables(folder):
            path.unlink(missing_ok=True)
            path.with_name(path.name + _SUFFIX).unlink()


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
