"""Find the checkpoint that a user names. Nothing here needs torch."""

import json
from pathlib import Path

from horizon_lm.common.paths import near_path
from horizon_lm.common.run_folders import MANIFEST, checkpoints_in, is_checkpoint, place_of_model
from horizon_lm.errors import ConfigError


def require_manifest(folder: Path) -> None:
    """Raise ConfigError if a folder does not exist, or has no manifest."""
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder{near_path(folder)}")
    if not (folder / MANIFEST).exists():
        place = "" if is_checkpoint(folder) else place_of_model(folder)
        raise ConfigError(f"{folder} is not a checkpoint of horizon-lm: it has no {MANIFEST}{place and f'. {place}'}")


def has_adapters(folder: Path) -> bool | None:
    """Return whether a checkpoint is of a training of adapters; None if its manifest cannot be read."""
    try:
        return bool(json.loads((folder / MANIFEST).read_bytes())["checkpoint"].get("base"))
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def require_same_kind(folder: Path, saved_adapters: bool, trains_adapters: bool, remedy: str = "") -> None:
    """Raise ConfigError, with a remedy, if a checkpoint is of a training of adapters and a model trains all weights, or the reverse."""
    if saved_adapters != trains_adapters:
        saved, trained = ("adapters", "all weights") if saved_adapters else ("all weights", "adapters")
        raise ConfigError(f"{folder} is of a training of {saved}, and this model trains {trained}{remedy}")


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
