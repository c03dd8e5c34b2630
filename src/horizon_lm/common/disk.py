"""Durable writes: after a crash or a power cut, a file or folder is either the old one or the new one, and complete.

A file is durable once it is synced, and its name once its folder is synced. Everything that must survive goes through a
`Disk`, so that a test can record each operation and replay every prefix of them without what was not yet synced. A folder is
written by a `Replacement`, a file by `new_file`. Both write under a temporary name.
"""

import ctypes
import errno
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, Self

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # linux/fcntl.h, linux/fs.h


class OutputFile:
    """Context manager: a new file, which is synced at the end unless there was an error.

    Args:
        path: its path; an existing file is replaced.
        direct: bypass the page cache, where the file system can (O_DIRECT). Each write must then be whole pages at a
            page-aligned address.
    """

    def __init__(self, path: Path, direct: bool) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._direct = getattr(os, "O_DIRECT", 0) if direct else 0
        try:
            self._descriptor = os.open(path, flags | self._direct, 0o666)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
            self._direct = 0  # a file system without it, such as an older tmpfs
            self._descriptor = os.open(path, flags, 0o666)

    def __enter__(self) -> Self:
        return self

    def write(self, data: Any) -> None:
        """Append a bytes-like object."""
        view = memoryview(data).cast("B")
        while len(view):
            view = view[self._write(view) :]

    def _write(self, view: memoryview) -> int:
        """Write the first bytes of a view, and return their number. Once the disk rejects direct I/O, go on without it."""
        try:
            return os.write(self._descriptor, view)
        except OSError as error:
            if not self._direct or error.errno != errno.EINVAL:
                raise
            import fcntl

            self._direct = 0  # rejected after a short write, or on a device with larger sectors
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, 0)
            return os.write(self._descriptor, view)

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            if kind is None:
                os.fsync(self._descriptor)
        finally:
            os.close(self._descriptor)


class Disk:
    """The file operations of the operating system."""

    def create(self, path: Path, *, direct: bool = False) -> OutputFile:
        """Create a file, with the arguments of `OutputFile`."""
        return OutputFile(path, direct)

    def make_folder(self, path: Path) -> None:
        """Create a folder and its missing parents, whose names are durable afterwards."""
        missing = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        for each in missing:
            self.sync(each.parent)

    def rename(self, source: Path, target: Path) -> None:
        """Rename a file or a folder. An existing file is replaced."""
        source.replace(target)

    def set_aside(self, path: Path, name: str = "") -> Path:
        """Rename a file or a folder to a free name that ends with the present time. Return its new path.

        Args:
            path: the file or folder.
            name: the beginning of the new name; empty for that of ``path``.
        """
        target = free_path(path.with_name(f"{name or path.name}.{time.strftime('%Y%m%d-%H%M%S')}"))
        self.rename(path, target)
        return target

    def exchange(self, one: Path, other: Path) -> bool:
        """Exchange the names of two files or folders in one operation. Return False if the system cannot."""
        try:
            rename = ctypes.CDLL(None, use_errno=True).renameat2
        except (AttributeError, OSError):  # not Linux, or an old C library
            return False
        if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
            return True
        number = ctypes.get_errno()
        if number in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
            return False
        raise OSError(number, os.strerror(number), str(one))

    def remove(self, path: Path) -> None:
        """Remove a file or a folder tree, if it exists. If it cannot be removed, rename it, so that its name becomes free."""
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)
        except OSError:  # files of another user in it, say
            if not os.path.lexists(path):
                return
            names = (path.with_name(f".{path.name.lstrip('.')}.horizon-left-{number}") for number in count(1))
            path.rename(next(each for each in names if not os.path.lexists(each)))

    def sync(self, path: Path) -> None:
        """Make a file's contents, or the names in a folder, durable."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:  # some file systems cannot sync a folder
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):
                raise
        finally:
            os.close(descriptor)


def free_path(path: Path) -> Path:
    """Return a path that does not exist: this one, or with a number at its end."""
    names = (f"{path.name}{f'-{number}' if number else ''}" for number in count())
    return next(each for each in map(path.with_name, names) if not os.path.lexists(each))


def sync_tree(disk: Disk, folder: Path) -> None:
    """Make a file, or everything in a folder, durable. Libraries that write files do not sync them."""
    if folder.is_file():
        disk.sync(folder)
    for path, _, files in os.walk(folder):
        for name in files:
            disk.sync(Path(path) / name)
        disk.sync(Path(path))


def _part_of(target: Path) -> Path:
    """Return the temporary path of a file or folder that is being written or deleted."""
    return target.with_name(f".{target.name}.horizon-part")


def _old_path(target: Path) -> Path:
    return target.with_name(f".{target.name}.horizon-old")


@contextmanager
def new_file(disk: Disk, path: Path) -> Iterator[OutputFile]:
    """Context manager: write a file that gets its name once it is complete. After an error nothing of it is left."""
    part = _part_of(path)
    try:
        with disk.create(part) as file:
            yield file
    except BaseException:
        with suppress(OSError):
            disk.remove(part)
        raise
    disk.rename(part, path)


def write_file(disk: Disk, path: Path, data: bytes) -> None:
    """Write a small file that gets its name once it is complete. The name is durable once its folder is synced."""
    with new_file(disk, path) as file:
        file.write(data)


@contextmanager
def new_files(disk: Disk, folder: Path, name: str) -> Iterator[Path]:
    """Context manager: yield an empty folder, for libraries that write files in place. The files are moved into ``folder`` once they are
    durable, and replace files of the same names there.

    Args:
        disk: the operations to use.
        folder: the folder of the files.
        name: a name for the empty folder, by which a later call finds and removes what is left of it.
    """
    part = _part_of(folder / name)
    for left in folder.glob(f"{part.name}*"):
        disk.remove(left)
    disk.make_folder(part)
    try:
        yield part
        sync_tree(disk, part)
        for file in part.iterdir():
            disk.rename(file, folder / file.name)
    finally:
        with suppress(OSError):  # the next call removes it
            disk.remove(part)


class Replacement:
    """A file or folder that gets its name once it is complete and durable. Only then is an old one of that name deleted.

    Call `begin`, write it as `part`, and call `publish`; after an error, call `discard`. `replacing` does all that.

    Args:
        disk: the operations to use.
        target: the path of the file or folder.
        may_delete: returns whether the old file or folder, given under its new name, may be deleted. Otherwise it is kept under a
            name with the present time.

    Attributes:
        part: the temporary path.
        kept: the new path of an old file or folder that is kept; None if there is none.
    """

    def __init__(self, disk: Disk, target: Path, may_delete: Callable[[Path], bool] = lambda old: True) -> None:
        self._disk, self._target, self._may_delete = disk, target, may_delete
        self.part = _part_of(target)
        self.kept: Path | None = None

    def begin(self) -> None:
        """Remove what an interrupted replacement has left, once an old file or folder has its name back."""
        restore_folder(self._disk, self._target)
        self._disk.remove(self.part)

    def publish(self) -> None:
        """Make what was written durable, and give it its name. After an error it has its temporary name again, and an old file or folder
        its own.
        """
        sync_tree(self._disk, self.part)
        old = self._swap()
        if old is None:
            return
        with suppress(OSError):  # the next replacement removes it
            if self._may_delete(old):
                self._disk.remove(old)
            else:
                self.kept = self._disk.set_aside(old, self._target.name)

    def discard(self) -> None:
        """Remove what was written, as far as possible; `begin` does the rest."""
        with suppress(OSError):
            restore_folder(self._disk, self._target)
            self._disk.remove(self.part)

    def _swap(self) -> Path | None:
        """Give the new file or folder its name, durably or not at all. Return the new path of an old one; None if there is none."""
        disk, part, target = self._disk, self.part, self._target
        old: Path | None = None
        with ExitStack() as undo:  # after an error, in reverse order
            if not os.path.lexists(target):
                disk.rename(part, target)
                undo.callback(disk.rename, target, part)
            elif disk.exchange(part, target):
                old = part
                undo.callback(disk.exchange, part, target)
            else:
                old = _old_path(target)
                disk.remove(old)
                disk.rename(target, old)  # `restore_folder` undoes a crash before the next line
                undo.callback(disk.rename, old, target)
                disk.rename(part, target)
                undo.callback(disk.rename, target, part)
            disk.sync(target.parent)
            undo.pop_all()
        return old


@contextmanager
def replacing(disk: Disk, target: Path, may_delete: Callable[[Path], bool] = lambda old: True) -> Iterator[Replacement]:
    """Context manager: replace a file or folder by the one that is written as the `part` of the `Replacement`. After an error nothing of
    it is left.
    """
    new = Replacement(disk, target, may_delete)
    try:
        new.begin()
        yield new
        new.publish()
    except BaseException:
        new.discard()
        raise


def restore_folder(disk: Disk, target: Path) -> None:
    """Give an old folder its name back, if a replacement was interrupted where folders cannot be exchanged."""
    old = _old_path(target)
    if old.exists() and not target.exists():
        disk.rename(old, target)
        disk.sync(target.parent)


def delete_folder(disk: Disk, folder: Path) -> None:
    """Delete a folder, so that a crash leaves all of it or nothing under its name. What cannot be deleted is left (`delete_parts`)."""
    part = _part_of(folder)
    with suppress(OSError):
        disk.remove(part)
        disk.rename(folder, part)
        disk.sync(folder.parent)  # also after a power cut
        disk.remove(part)


def delete_parts(disk: Disk, folder: Path, pattern: str) -> None:
    """Delete files and folders in ``folder`` whose writing or deletion was interrupted. ``pattern`` matches their names."""
    for part in folder.glob(_part_of(folder / pattern).name):
        disk.remove(part)


def is_of_system(error: Exception) -> bool:
    """Return whether an error is one of the system, such as a full disk. Writers of tokenizers and safetensors raise it in types of theirs."""
    return isinstance(error, OSError | MemoryError) or error_number(error) is not None


def error_number(error: Exception) -> int | None:
    """Return the system's number of an error; None if it has none. The writer of safetensors states it in its text alone."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    stated = re.search(r"\(os error (\d+)\)", str(error))
    return int(stated[1]) if stated else None
