"""The folders that a run writes into: rejecting an ``output_dir`` that it may not or cannot use, its lock, and a second place for the trained model.

Nothing here needs torch.
"""

import errno
import fcntl
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from horizon_lm.common.paths import exists
from horizon_lm.common.quantities import format_bytes
from horizon_lm.common.resources import disk_free, file_system, is_in_memory, takes_files
from horizon_lm.errors import ConfigError, DoesNotFitError
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.config.text import RUN_CONFIG_HEADER

_RUN_FILES = (
    "config.yaml", "plan.json", "metrics.jsonl", "samples.jsonl", "trace.json", "predicted_trace.json", "loss.png", "model",
)  # fmt: skip


def output_folder(config: RunConfig) -> Path:
    """Return the folder of a run."""
    return Path(config.output_dir).expanduser()


def holds_a_run(folder: Path) -> bool:
    """Return whether a folder has the settings file of an earlier run."""
    try:
        with (folder / "config.yaml").open(encoding="utf-8") as stream:
            return stream.readline().strip() == RUN_CONFIG_HEADER
    except (OSError, UnicodeDecodeError):
        return False


def require_usable(config: RunConfig, resumes: bool) -> None:
    """Raise ConfigError if a run may not write into its folder, or cannot. ``resumes``: it goes on from a checkpoint."""
    folder = output_folder(config)
    if not holds_a_run(folder):
        _reject_foreign_files(folder)
        _reject_inputs(config, folder)
    reject_finished_run(config)
    if not resumes:
        _reject_checkpoints(config, folder)
    require_writable("output_dir", folder)


def _reject_foreign_files(folder: Path) -> None:
    """Raise ConfigError if a run would overwrite a file that no run has written."""
    for name in _RUN_FILES:
        if (folder / name).exists():
            raise ConfigError(
                f"output_dir: {folder / name} was not written by horizon-lm and would be overwritten; choose another folder"
            )


def _reject_inputs(config: RunConfig, folder: Path) -> None:
    """Raise ConfigError if the model or rows are in a run's folder: a later run would read the files of this one as its inputs."""
    run_folder = folder.resolve()
    for each in (*(config.datasets or ()), *(config.eval_datasets or ())):
        if not exists(each.path):
            continue
        rows = Path(each.path).expanduser().resolve()
        has_rows = run_folder == rows.parent if rows.is_file() else run_folder.is_relative_to(rows)
        if has_rows:
            raise ConfigError(f"output_dir: {folder} is a folder of the rows in {each.path}; choose another folder")
    for name in (config.model_name_or_path, config.adapter_name_or_path):
        if name is not None and exists(name) and run_folder == Path(name).expanduser().resolve():
            raise ConfigError(f"output_dir: {folder} is the folder of the model to start from; choose another folder")


def reject_finished_run(config: RunConfig) -> None:
    """Raise ConfigError if the folder has a trained model that may not be replaced."""
    if (output_folder(config) / "model").exists() and not config.overwrite_output_dir:
        raise ConfigError(
            f"output_dir: {output_folder(config)} holds a finished run; choose another folder, or set "
            "overwrite_output_dir: true to replace its model once the new one is trained"
        )


def _reject_checkpoints(config: RunConfig, folder: Path) -> None:
    """Raise ConfigError if a folder has checkpoints of another run, beside which a run that begins anew may not write."""
    checkpoints = sorted(each.name for each in folder.glob("checkpoint-*"))
    if checkpoints and not config.overwrite_output_dir:
        raise ConfigError(
            f"output_dir: {folder} holds {checkpoints[0]} of another run; choose another folder, or set "
            "overwrite_output_dir: true to write beside it"
        )


def require_writable(setting: str, folder: Path) -> None:
    """Raise ConfigError, naming the setting, if a folder, or the one in which it would be created, cannot be written to."""
    existing = next(each for each in (folder, *folder.resolve().parents) if each.exists())
    if existing.is_file():
        raise ConfigError(f"{setting}: {existing} is a file; choose another folder")
    if not existing.is_dir() or not os.access(existing, os.W_OK) or not takes_files(existing):
        raise ConfigError(f"{setting}: {existing} cannot be written to; choose another folder")


_LOCK = ".horizon-lock"
_NOT_SUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # by some network file systems: then nothing is locked


def require_unlocked(folder: Path) -> None:
    """Raise ConfigError if another run has locked a folder, which need not exist. Nothing is written."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDWR)
    except OSError:  # no such file, or none that may be opened, which `locked` reports
        return
    try:
        _lock(descriptor, folder)
    finally:
        os.close(descriptor)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context manager: hold the lock of a run's folder, a file with this process and host. Raise ConfigError if another run holds it.

    The system frees it when the process ends, however it ends, so a file that is left behind is no obstacle.
    """
    path = folder / _LOCK
    with ExitStack() as opened:
        is_current = False
        while not is_current:
            opened.close()  # a file that the run before removed after it was opened here
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
            opened.callback(os.close, descriptor)
            _lock(descriptor, folder)
            is_current = path.exists() and os.path.samestat(os.fstat(descriptor), path.stat())
        try:
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
            yield
        finally:
            with suppress(OSError):
                path.unlink(missing_ok=True)  # while it is held, so that no other run's file is removed


def _lock(descriptor: int, folder: Path) -> None:
    """Lock an open file for this process; raise ConfigError if another one has it. File systems without locks are accepted."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ConfigError(
            f"output_dir: another run is writing into {folder} ({_holder(descriptor)}); wait for its end, or choose another folder"
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
