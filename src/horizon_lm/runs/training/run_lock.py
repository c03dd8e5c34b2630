"""A lock on the folder of a run, so that two runs do not write into it at the same time."""

import errno
import fcntl
import json
import os
import socket
from contextlib import suppress
from pathlib import Path

from horizon_lm.errors import ConfigError

_NAME = ".horizon-lock"
_NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # by some network file systems: then nothing is locked


class RunLock:
    """The lock of a run's folder: a file with the process and the host that hold it.

    The system frees it when the process ends, however it ends, so a file that is left behind is no obstacle.

    Args:
        folder: the folder of the run, which need not exist yet.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / _NAME
        self._descriptor: int | None = None

    def require_free(self) -> None:
        """Raise ConfigError if another run holds the lock. Nothing is written."""
        try:
            descriptor = os.open(self._path, os.O_RDWR)
        except OSError:  # no such file, or none that may be opened, which `take` reports
            return
        try:
            self._lock(descriptor)
        finally:
            os.close(descriptor)

    def take(self) -> None:
        """Take the lock and hold it until `release`. Raise ConfigError if another run holds it."""
        while True:
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o666)
            try:
                self._lock(descriptor)
                is_current = os.path.exists(self._path) and os.path.samestat(os.fstat(descriptor), os.stat(self._path))
            except BaseException:
                os.close(descriptor)
                raise
            if is_current:
                break
            os.close(descriptor)  # of a file that the run before removed after it was opened here
        self._descriptor = descriptor
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())

    def release(self) -> None:
        """Free the lock and remove its file."""
        if self._descriptor is not None:
            with suppress(OSError):
                self._path.unlink(missing_ok=True)  # while it is held, so that no other run's file is removed
            os.close(self._descriptor)
            self._descriptor = None

    def _lock(self, descriptor: int) -> None:
        """Lock the file for this process; raise ConfigError if another one has it. File systems without locks are accepted."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"output_dir: another run is writing into {self._folder} ({_holder(descriptor)}); wait for its end, or choose "
                "another folder"
            ) from None
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise


def _holder(descriptor: int) -> str:
    """Return the process and the host in a lock file as text."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {int(holder['pid'])} on {str(holder['host'])!r}"
    except (OSError, ValueError, KeyError, TypeError):  # the other run has not written them yet
        return "a process that has just begun"
