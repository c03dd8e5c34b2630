"""Find checkpoints by the names of their files. Nothing here needs torch."""

import re
from pathlib import Path

from horizon_lm.errors import ConfigError
from horizon_lm.paths import near_path

MANIFEST, UNITS = "manifest.json", "units"  # the last file that is written, and the folder of the units' files


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, complete or damaged, and not an exported model."""
    return (folder / MANIFEST).exists() or (folder / UNITS).is_dir()


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in the folder of a run, in the order of their steps. They have been complete, and may be damaged now."""
    steps = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in folder.glob("checkpoint-*")}
    return sorted(
        (path for path, match in steps.items() if match and is_checkpoint(path)),
        key=lambda path: int(path.name.removeprefix("checkpoint-")),
    )


def require_manifest(folder: Path) -> None:
    """Raise ConfigError if a folder does not exist, or has no manifest."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder{near_path(folder)}")
    if not (folder / MANIFEST).exists():
        raise ConfigError(f"{folder} is not a checkpoint of horizon-lm: it has no {MANIFEST}")


def named_checkpoint(name: str) -> Path:
    """Return the checkpoint that ``resume_from_checkpoint`` names: a folder, or the last one in the folder of a run."""
    folder = Path(name).expanduser()
    return folder if is_checkpoint(folder) or not (found := checkpoints_in(folder)) else found[-1]


def require_checkpoint(wanted: bool | str, output: Path) -> None:
    """Raise ConfigError if there is no checkpoint where ``resume_from_checkpoint`` demands one. ``output``: the folder of the run."""
    if wanted is True and not checkpoints_in(output):
        raise ConfigError(f"resume_from_checkpoint: {output} has no checkpoint; set auto to begin anew")
    if isinstance(wanted, str) and wanted != "auto":
        require_manifest(named_checkpoint(wanted))
