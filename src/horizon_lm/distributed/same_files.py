"""Find the ranks that see the same files: a path may lead to another copy on another machine."""

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from horizon_lm.distributed.mesh import Mesh, fail_together

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SeenFiles:
    """The files of a folder as each rank sees them. All ranks create it at the same place of the program.

    Files are the same if they have the same inode number, size and times of change, of which no user can set the last: on a
    shared file system all machines see the same ones, and a copy has others.

    Args:
        mesh: the ranks.
        folder: the folder, which may be another one on each rank.
        names: the files, by their paths inside the folder; the same on all ranks.

    Attributes:
        readers: the ranks that read the files of the first rank on its machine, the first one included.
        other_readers: the ranks that read the next copy of the files, on one machine; none if there is no other copy.

    Raises:
        ConfigError: a rank cannot find a file. It is raised on all ranks.
    """

    def __init__(self, mesh: Mesh, folder: Path, names: Iterable[str]) -> None:
        seen_here: tuple[str, dict[str, tuple[int, ...]]] = "", {}
        with fail_together(mesh, "the search for files"):
            seen_here = _seen(folder, names)
        seen: list[Any] = mesh.exchange("the identity of files", seen_here)  # by rank: its machine, and the files
        self._files = [files for _, files in seen]
        self._rank, ranks = mesh.rank, range(mesh.size)
        self.readers = [rank for rank in ranks if seen[rank] == seen[0]]
        first_other = next((rank for rank in ranks if self._files[rank] != self._files[0]), None)
        self.other_readers = [] if first_other is None else [rank for rank in ranks if seen[rank] == seen[first_other]]

    @property
    def are_one(self) -> bool:
        """True if all ranks read the same files on one machine, so that they read the same bytes."""
        return len(self.readers) == len(self._files)

    @property
    def is_first_of_copy(self) -> bool:
        """True for the first rank that sees these files."""
        return self._files.index(self._files[self._rank]) == self._rank

    def are_same(self, one: int, other: int, name: str) -> bool:
        """Return whether two ranks see the same file."""
        return bool(self._files[one][name] == self._files[other][name])


def _seen(folder: Path, names: Iterable[str]) -> tuple[str, dict[str, tuple[int, ...]]]:
    """Return a text that identifies the machine and its file systems with the files, and the numbers of `_identity` of each file."""
    stats = {name: (folder / name).stat() for name in names}
    devices = sorted({stat.st_dev for stat in stats.values()})
    files = {name: _identity(stat) for name, stat in stats.items()}
    return f"{_machine()} {devices}", files


def _identity(stat: os.stat_result) -> tuple[int, ...]:
    """Return the numbers that are equal for two ranks only if they see the same file."""
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def _machine() -> str:
    """Return a text that no other running machine has."""
    return _BOOT_ID.read_text() if _BOOT_ID.exists() else os.uname().nodename
