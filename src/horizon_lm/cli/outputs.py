"""Check the name of a command's output, before anything is read."""

from pathlib import Path

from horizon_lm.common.paths import FILE_SUFFIXES
from horizon_lm.errors import ConfigError
from horizon_lm.runs.checkpoints.new_folder import require_new


def new_folder(path: Path, remedy: str = "") -> Path:
    """Return the path of a folder to write; raise ConfigError if it exists, or is named like a file. ``remedy``: ends the latter message."""
    path = path.expanduser()
    require_new(path)
    if path.name.endswith(FILE_SUFFIXES):
        raise ConfigError(f"{path}: a folder is written; choose a name without {path.suffix}{remedy}")
    return path


def file_to_write(path: Path, content: str, suffix: str) -> Path:
    """Return the path of a file that ``--output`` names. Raise ConfigError if it is a folder, is in none, or lacks the suffix.

    ``content``: why the suffix is needed, such as "the results are JSON".
    """
    path = path.expanduser()
    if path.is_dir():
        raise ConfigError(f"--output: {path} is a folder; name a file in it")
    if path.suffix != suffix:
        raise ConfigError(f"--output: {path}: {content}; choose a name with {suffix}")
    if not path.parent.is_dir():
        reason = "is not a folder" if path.parent.exists() else "does not exist; create it"
        raise ConfigError(f"--output: {path.parent} {reason}")
    return path
