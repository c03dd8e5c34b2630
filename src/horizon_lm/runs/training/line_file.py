"""A file of lines that loses none when the disk is full for a while."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash


class LineFile:
    """A text file that grows by whole lines. Lines that cannot be written are kept, and written before the next one.

    Args:
        path: the file, which is created by the first line.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting: list[str] = []

    @property
    def num_waiting(self) -> int:
        """The number of lines that could not be written yet."""
        return len(self._waiting)

    def append(self, line: str) -> None:
        """Write a line, after those that wait. Raise OSError if this fails; the lines wait for the next attempt."""
        self._waiting.append(line + "\n")
        self.flush()

    def flush(self) -> None:
        """Write the lines that wait. Raise OSError if this fails; the file then ends as before."""
        if not self._waiting:
            return
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            _append(descriptor, "".join(self._waiting).encode())
        finally:
            os.close(descriptor)
        self._waiting.clear()

    def position(self) -> dict[str, Any]:
        """Return the end of the file for a checkpoint: its bytes and their hash. Write the lines before it to the disk, if possible."""
        content = b""
        if self.path.exists():
            with self.path.open("rb") as stream:
                content = stream.read()
                with suppress(OSError):  # a checkpoint is worth more than these lines
                    os.fsync(stream.fileno())
        return {"bytes": len(content), "xxh3_128": xxhash.xxh3_128_hexdigest(content)}

    def cut_to(self, position: Mapping[str, Any]) -> bool:
        """Remove the lines after an end that `position` has returned. Return False, and leave the file, if the bytes before it changed."""
        content = self.path.read_bytes()[: position["bytes"]] if self.path.exists() else b""
        if xxhash.xxh3_128_hexdigest(content) != position["xxh3_128"]:
            return False
        if self.path.exists():
            os.truncate(self.path, position["bytes"])
        return True

    def set_aside(self) -> None:
        """Rename the file, if it exists, to one with the next free number, such as ``metrics-1.jsonl``."""
        number = 1
        while (target := self.path.with_name(f"{self.path.stem}-{number}{self.path.suffix}")).exists():
            number += 1
        if self.path.exists():
            self.path.rename(target)


def _append(descriptor: int, data: bytes) -> None:
    """Append bytes to an open file. If that fails, raise OSError and leave the file as it was, without half a line."""
    end, rest = os.fstat(descriptor).st_size, memoryview(data)
    try:
        while rest:
            rest = rest[os.write(descriptor, rest) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(descriptor, end)
        raise


class LineFiles:
    """Files of lines, whose ends are in the checkpoints of a run. A resumed run removes the lines after them.

    Args:
        files: the files.
        report: prints a line about a file that has changed meanwhile.
    """

    def __init__(self, files: Sequence[LineFile], report: Callable[[str], None]) -> None:
        self._files, self._report = files, report

    def state_dict(self) -> dict[str, Any]:
        """Return the end of each file, by its name."""
        return {file.path.name: file.position() for file in self._files}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remove the lines after the ends that `state_dict` has returned; set a file aside that has changed before its end."""
        for file in self._files:
            if not file.cut_to(state[file.path.name]):
                self._report(f"resume: {file.path} has changed since, so its lines are set aside")
                file.set_aside()
