"""Write a model into a folder: what an error of the system means, and what happens to files that are not ours."""

import errno
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from horizon_lm.common.disk import Disk, error_number, is_of_system, replacing
from horizon_lm.common.quantities import format_bytes
from horizon_lm.common.resources import disk_free
from horizon_lm.errors import ConfigError, DoesNotFitError, HorizonError, first_line, warn

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


def unwritable(name: str, folder: Path, error: Exception, num_bytes: int = 0) -> HorizonError:
    """Return the error that says why a model cannot be written into a folder.

    Args:
        name: the setting or option, for the message.
        folder: the folder.
        error: the error of the system, or of a library, whose errors have no number.
        num_bytes: bytes of the model; 0 if they are not known.
    """
    reason = (error.strerror if isinstance(error, OSError) else None) or first_line(error)
    if error_number(error) == errno.EFBIG:
        return DoesNotFitError(
            f"{name}: {folder} takes no file of this size ({reason}); raise the limit: ulimit -f unlimited."
        )
    if not _is_full(folder, error, num_bytes):
        return ConfigError(f"{name}: {folder} cannot be written to ({reason}).")
    needed, free = "make room", ""
    with suppress(OSError):
        left = disk_free(folder)
        free = f"; {format_bytes(left)} are free"
        if left < num_bytes:  # otherwise another limit holds, such as a quota
            needed = f"the exported model takes {format_bytes(num_bytes)}"
    return DoesNotFitError(f"{name}: no space is left for {folder} ({reason}): {needed}{free}.")


def _is_full(folder: Path, error: Exception, num_bytes: int) -> bool:
    """Return whether a folder could not be written for lack of space: by the number of the error or, without one, by the free space."""
    number = error_number(error)
    if number is not None:
        return number in _NO_SPACE
    with suppress(OSError):
        return disk_free(folder) < num_bytes
    return False


def require_new(path: Path) -> None:
    """Raise ConfigError if a file or folder exists."""
    if path.exists():
        raise ConfigError(f"{path} exists; choose another name")


def write_new_folder(folder: Path, fill: Callable[[Path], None]) -> None:
    """Write a folder as `write_new` does; ``fill`` is given an empty one."""

    def make(part: Path) -> None:
        """Create the folder, and write its files."""
        Disk().make_folder(part)
        fill(part)

    write_new(folder, make)


def write_new(target: Path, fill: Callable[[Path], None]) -> None:
    """Write a file or folder that did not exist when the command began. It gets its name once it is complete and durable.

    What another program has written there meanwhile is kept under another name, with a warning.

    Args:
        target: the file or folder.
        fill: a function that writes it under the path that it is given.

    Raises:
        ConfigError, DoesNotFitError: it cannot be written; nothing of it is left.
    """
    disk = Disk()
    try:
        disk.make_folder(target.parent)
        with replacing(disk, target, may_delete=lambda old: False) as new:
            fill(new.part)
    except Exception as error:
        if is_of_system(error):
            raise unwritable("OUT", target, error) from error
        raise
    if new.kept is not None:
        warn(f"{target} appeared meanwhile, and is now {new.kept}", RuntimeWarning)
