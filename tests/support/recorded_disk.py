"""Record the operations on a disk, and replay power cuts: what was not synced may be there or not.

The model promises what POSIX promises and no more: a file has its contents once it is synced, and its name once its folder is
synced. Before, the contents may be anything shorter, or zeros, and each change of a folder's names is there or not, whatever came
before and after it. Only a rename or an exchange inside one folder is never half there.
"""

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from horizon_lm.common.disk import Disk

Tree = dict[str, bytes]  # the contents of files, by their path
Names = dict[str, Any]  # the files and folders in a folder; in a change, None for a name that is gone


@dataclass
class _File:
    written: bytes = b""
    synced: bytes = b""

    def sync(self) -> None:
        self.synced = self.written


@dataclass
class _Folder:
    names: Names = field(default_factory=dict)
    synced: Names = field(default_factory=dict)
    changes: list[Names] = field(default_factory=list)  # since then

    def change(self, **names: Any) -> None:
        self.names = _changed(self.names, names)
        self.changes.append(names)

    def sync(self) -> None:
        self.synced, self.changes = self.names, []


def _changed(names: Names, change: Names) -> Names:
    return {name: node for name, node in {**names, **change}.items() if node is not None}


class Operation(NamedTuple):
    """An operation: write, make, rename, exchange, remove, sync, or a report to the user."""

    kind: str
    path: str
    other: str = ""
    data: bytes = b""


class ModelDisk:
    """What a disk holds, in memory and for certain."""

    def __init__(self) -> None:
        self._root = _Folder()

    def find(self, path: str) -> Any:
        """Return a file or a folder; None if there is none."""
        node: Any = self._root
        for name in Path(path).parts:
            node = node.names.get(name) if isinstance(node, _Folder) else None
        return node

    def apply(self, operation: Operation) -> None:
        """Do an operation in memory; syncing makes it certain."""
        kind, path, other, data = operation
        if kind == "report":
            return
        node, folder, name = self.find(path), self.find(str(Path(path).parent)), Path(path).name
        if kind == "make":
            folder.change(**{name: _Folder()})
        elif kind == "create":
            folder.change(**{name: _File()})
        elif kind == "write":
            node.written += data
        elif kind == "remove":
            folder.change(**{name: None})
        elif kind == "sync":
            node.sync()
        else:
            before = {name: self.find(other) if kind == "exchange" else None}
            target = self.find(str(Path(other).parent))
            if target is folder:
                folder.change(**before, **{Path(other).name: node})
            else:
                folder.change(**before)
                target.change(**{Path(other).name: node})

    def after_power_cut(self, pick: random.Random | None, keeps_names: bool = False) -> Tree:
        """Return the files that are there after a power cut.

        Args:
            pick: decides about everything that was not synced; None to drop all of it.
            keeps_names: with None, the names that were not synced are there, with empty files.
        """
        return dict(_files(self._root, "", pick, keeps_names))


def _files(folder: _Folder, prefix: str, pick: random.Random | None, keeps_names: bool) -> Iterator[tuple[str, bytes]]:
    names = folder.synced
    for change in folder.changes:
        if pick.random() < 0.5 if pick else keeps_names:
            names = _changed(names, change)
    for name, node in names.items():
        if isinstance(node, _Folder):
            yield from _files(node, f"{prefix}{name}/", pick, keeps_names)
        else:
            yield prefix + name, _contents(node, pick)


def _contents(file: _File, pick: random.Random | None) -> bytes:
    if pick is None or file.written == file.synced:
        return file.synced
    size = len(file.written)
    return pick.choice([file.synced, file.written, bytes(size), file.written[: pick.randrange(size)]])


class RecordedDisk(Disk):
    """Does all operations, and keeps them. Files that others have written are noticed at the next operation.

    Args:
        root: the folder whose operations are kept; empty.
        forgets: whether syncing a file or a folder is left out, for controls.
        exchanges: whether the system can exchange two folders.
    """

    def __init__(self, root: Path, forgets: Callable[[str], bool] = lambda path: False, exchanges: bool = True) -> None:
        self.operations: list[Operation] = []
        self._root, self._forgets, self._exchanges = root, forgets, exchanges
        self._model, self._lock = ModelDisk(), threading.RLock()

    def note(self, kind: str, path: Path | str, other: Path | str = "", data: Any = b"") -> None:
        """Keep an operation that was done, or a report to the user."""
        paths = [str(each.relative_to(self._root)) if isinstance(each, Path) else each for each in (path, other)]
        with self._lock:
            if kind == "sync" and self._forgets(paths[0]):
                return
            self.operations.append(Operation(kind, *paths, bytes(data)))
            self._model.apply(self.operations[-1])

    def _notice_others(self) -> None:
        for path in sorted(self._root.rglob("*")):
            if self._model.find(str(path.relative_to(self._root))) is None:
                self.note("make" if path.is_dir() else "create", path)
                if path.is_file():
                    self.note("write", path, data=path.read_bytes())

    def create(self, path: Path, *, direct: bool = False) -> Any:
        with self._lock:
            file = super().create(path, direct=direct)
            self.note("create", path)
        return _RecordedFile(self, path, file)

    def make_folder(self, path: Path) -> None:
        with self._lock:
            missing = [each for each in (path, *path.parents) if not each.exists()]
            path.mkdir(parents=True, exist_ok=True)
            for each in reversed(missing):
                self.note("make", each)
            for each in missing:
                self.sync(each.parent)

    def rename(self, source: Path, target: Path) -> None:
        with self._lock:
            self._notice_others()
            super().rename(source, target)
            self.note("rename", source, target)

    def exchange(self, one: Path, other: Path) -> bool:
        with self._lock:
            self._notice_others()
            done = self._exchanges and super().exchange(one, other)
            if done:
                self.note("exchange", one, other)
        return done

    def remove(self, path: Path) -> None:
        with self._lock:
            self._notice_others()
            inside = sorted(path.rglob("*"), key=lambda each: len(each.parts), reverse=True) if path.is_dir() else []
            for each in [*inside, *([path] if path.exists() else [])]:
                super().remove(each)
                self.note("remove", each)

    def sync(self, path: Path) -> None:
        with self._lock:
            self._notice_others()
        super().sync(path)
        self.note("sync", path)


class _RecordedFile:
    def __init__(self, disk: RecordedDisk, path: Path, file: Any) -> None:
        self._disk, self._path, self._file = disk, path, file

    def __enter__(self) -> Any:
        return self

    def write(self, data: Any) -> None:
        self._file.write(data)
        self._disk.note("write", self._path, data=data)

    def __exit__(self, kind: Any, *error: Any) -> None:
        self._file.__exit__(kind, *error)
        if kind is None:
            self._disk.note("sync", self._path)
