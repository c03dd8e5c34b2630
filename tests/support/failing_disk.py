"""A disk that is full, or fails, at a chosen operation."""

import errno
import threading
from itertools import count
from pathlib import Path
from typing import Any

from horizon_lm.common.disk import Disk


class FailingDisk(Disk):
    """Fails at one of its operations, in the middle of it if it is a write.

    Args:
        at: the number of the operation.
        stays_full: all later ones but renames fail, too.
        exchanges: whether the system can exchange two folders.
    """

    def __init__(self, at: int, stays_full: bool = False, exchanges: bool = True) -> None:
        self._at, self._stays_full, self._exchanges = at, stays_full, exchanges
        self._done, self._lock = count(), threading.Lock()
        self.failed_at = ""

    def pass_by(self, what: str) -> None:
        with self._lock:
            is_full = self._stays_full and self.failed_at and not what.startswith(("rename", "exchange"))
            if next(self._done) == self._at or is_full:
                self.failed_at = self.failed_at or what
                raise OSError(errno.ENOSPC, "No space left on device", what)

    def create(self, path: Path, *, direct: bool = False) -> Any:
        self.pass_by(f"create {path.name}")
        return _FailingFile(self, path.name, super().create(path, direct=direct))

    def make_folder(self, path: Path) -> None:
        self.pass_by(f"make {path.name}")
        super().make_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self.pass_by(f"rename to {target.name}")
        super().rename(source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        self.pass_by(f"exchange {other.name}")
        return self._exchanges and super().exchange(one, other)

    def sync(self, path: Path) -> None:
        self.pass_by(f"sync {path.name}")
        super().sync(path)


class _FailingFile:
    def __init__(self, disk: FailingDisk, name: str, file: Any) -> None:
        self._disk, self._name, self._file = disk, name, file

    def __enter__(self) -> Any:
        return self

    def write(self, data: Any) -> None:
        view = memoryview(data).cast("B")
        self._file.write(view[: len(view) // 2])
        self._disk.pass_by(f"write {self._name}")
        self._file.write(view[len(view) // 2 :])

    def __exit__(self, kind: Any, *error: Any) -> None:
        self._file.__exit__(kind, *error)
        if kind is None:
            self._disk.pass_by(f"close {self._name}")
