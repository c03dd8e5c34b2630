"""Recognise the folder of a run and its checkpoints, which are no folders of models, by the names of their files."""

import re
from pathlib import Path

from horizon_lm.errors import ConfigError

MANIFEST, UNITS = "manifest.json", "units"  # the last file that is written, and the folder of the units' files


def is_checkpoint(folder: Path) -> bool:
    """Return whether a folder is a checkpoint, complete or damaged, and not an exported model."""
    return (folder / MANIFEST).exists() or (folder / UNITS).is_dir()


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in the folder of a run, in the order of their steps. All were complete once, but may be damaged now."""
    matches = {path: re.fullmatch(r"checkpoint-(\d+)", path.name) for path in folder.glob("checkpoint-*")}
    return sorted(
        (path for path, match in matches.items() if match and is_checkpoint(path)),
        key=lambda path: int(path.name.removeprefix("checkpoint-")),
    )


def place_of_model(folder: Path) -> str:
    """Return a sentence that names the place of the model, if a folder that was given as a model or adapters is a checkpoint or the folder
    of a run; empty for any other folder.
    """
    if is_checkpoint(folder):
        return f"{folder} is a checkpoint of a run; make a model of it: horizon-lm export {folder} OUT"
    if _is_model(folder):
        return ""
    if _is_model(folder / "model"):
        return f"{folder} is the folder of a run; its model is in {folder / 'model'}"
    if not (checkpoints := checkpoints_in(folder)):
        return ""
    last = checkpoints[-1]
    return (
        f"{folder} is the folder of a run that has not exported its model yet; its last checkpoint is {last} "
        f"(horizon-lm export {last} OUT)"
    )


def require_model_folder(folder: Path) -> None:
    """Raise ConfigError with the place of the model if a folder is a checkpoint or the folder of a run, and not that of a model or adapters."""
    if place := place_of_model(folder):
        raise ConfigError(place)


def _is_model(folder: Path) -> bool:
    """Return whether a folder is that of a model, or of adapters."""
    return any((folder / name).is_file() for name in ("config.json", "adapter_config.json"))
