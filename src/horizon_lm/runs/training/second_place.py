"""A second place for the trained model, chosen and checked before the training, if its own folder cannot be written to."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from horizon_lm.common.quantities import format_bytes
from horizon_lm.common.resources import disk_free, file_system, is_in_memory
from horizon_lm.errors import ConfigError, DoesNotFitError
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.training.output_folder import require_writable


def find_second_place(config: RunConfig, num_bytes: int) -> Path | None:
    """Return a folder for the trained model besides ``output_dir``: ``fallback_dir``, or one of the system that has room, if any.

    Args:
        config: settings of the run.
        num_bytes: bytes of the exported model.

    Raises:
        ConfigError: ``fallback_dir`` cannot be written to.
        DoesNotFitError: ``fallback_dir`` has no room.
    """
    if config.fallback_dir is None:
        output_dir = Path(os.path.abspath(Path(config.output_dir).expanduser()))
        return next((each for each in _candidates(output_dir) if _has_room(each, num_bytes)), None)
    folder = Path(config.fallback_dir).expanduser()
    require_writable("fallback_dir", folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"\0")
    except (OSError, ValueError) as error:
        raise ConfigError(f"fallback_dir: {folder} cannot be written to ({error}); choose another folder") from error
    if not _has_room(folder, num_bytes):
        raise DoesNotFitError(
            f"fallback_dir: {folder} has {format_bytes(disk_free(folder))} of free space, and the exported model takes "
            f"{format_bytes(num_bytes)}; make room, or choose another folder"
        )
    return folder


def _candidates(output_dir: Path) -> list[Path]:
    """Return folders to try; folders on other disks than ``output_dir`` come first."""
    folders = [Path(tempfile.gettempdir()), Path(os.path.expanduser("~")), output_dir.parent]
    reachable = [each for each in folders if _is_on_disk(each)]
    with suppress(OSError):
        own_disk = file_system(output_dir)
        reachable.sort(key=lambda each: file_system(each) == own_disk)  # False comes first
    return reachable


def _is_on_disk(folder: Path) -> bool:
    """Return whether a folder can be reached, and takes no memory from the model."""
    with suppress(OSError):
        return not is_in_memory(folder)
    return False


def _has_room(folder: Path, num_bytes: int) -> bool:
    with suppress(OSError):
        return os.access(folder, os.W_OK | os.X_OK) and folder.is_dir() and disk_free(folder) > num_bytes
    return False
