"""Distinguish local paths from names on the hub, and keep the files of a model inside its folder."""

import re
import stat
from collections.abc import Iterable
from pathlib import Path

from horizon_lm.common.near_misses import closest_path
from horizon_lm.errors import ConfigError

FILE_SUFFIXES = (
    ".json", ".jsonl", ".parquet", ".csv", ".tsv", ".txt", ".arrow", ".gz", ".zst", ".xz", ".bz2", ".zip", ".jinja", ".j2",
    ".yaml", ".yml", ".safetensors", ".gguf", ".bin", ".pt", ".pkl",
)  # fmt: skip
_LONGEST_NAME = 200  # characters; the hub allows 96 for OWNER/NAME
_LARGEST_TEXT_BYTES = 64 * 2**20  # of a text file of a model; the largest published tokenizers have 35 MB
_LARGEST_SETTINGS_BYTES = 16 * 2**20  # of a JSON file of settings; the largest published ones have 2 MB
_MOST_VALUES = 2**18  # in a JSON file of settings
# The most values of JSON files that hold no settings, by name.
_MOST_VALUES_OF_TABLES = {
    "tokenizer.json": 2**22,
    "vocab.json": 2**22,
    "model.safetensors.index.json": 2**20,
}
_WEIGHT_SUFFIXES = (".safetensors", ".gguf", ".model")


def exists(name: str) -> bool:
    """Return whether a path exists; False for a text that cannot be a path, such as one that is too long."""
    try:
        return Path(name).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a null character, or the home of an unknown user
        return False


def near_path(name: str | Path, folder: Path | None = None) -> str:
    """Return the end of an error message about a missing path.

    It names the existing path that was probably meant, or else the folder in which the missing one begins. It is empty for an
    absolute path that resembles none.

    Args:
        name: the path that is missing.
        folder: the folder in which it begins; None for the working directory.
    """
    if hint := similar_path(name, folder):
        return hint
    if folder is not None:
        return f" in {folder}"
    return "" if str(name).startswith(("/", "~")) else f"; relative paths start in {Path.cwd()}"


def similar_path(name: str | Path, folder: Path | None = None) -> str:
    """Return the end of an error message that names the existing path which a missing one resembles; empty if there is none.

    Args:
        name: the path that is missing.
        folder: the folder in which it begins; None for the working directory.
    """
    place = Path(name) if folder is None else folder / name
    close = closest_path(place)
    if close is None or exists(str(place)):  # it exists, but is of another kind
        return ""
    shown = close if folder is None else close.relative_to(folder)
    return f"; did you mean {'./' if str(name).startswith('./') else ''}{shown}?"


def lasting_name(name: str) -> str:
    """Return a name that holds from any folder: the absolute path of what exists here, or the name unchanged."""
    return str(Path(name).expanduser().absolute()) if exists(name) else name


def may_be_on_hub(name: str) -> bool:
    """Return whether a name can be that of a repository on the hub: ``NAME`` or ``OWNER/NAME``, and no local path.

    A name is a path if it begins with a dot, a slash or ``~``, has another slash, ends like a file, exists, or begins with
    the name of a folder that exists here: ``runs/modle`` beside a folder ``runs`` is a mistyped path.
    """
    is_name = len(name) <= _LONGEST_NAME and re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name, re.ASCII)
    if not is_name or name.endswith(FILE_SUFFIXES):
        return False
    owner, slash, _ = name.partition("/")
    return not exists(name) and not (slash and exists(owner))


def require_own_files(folder: Path, patterns: Iterable[str]) -> None:
    """Raise ConfigError if a file of a model's folder is a link out of the folder, no regular file, or too long a text
    (`require_small_text`). ``patterns``: glob patterns of the files to check.
    """
    for path in sorted({path for pattern in patterns for path in folder.glob(pattern)}):
        if not path.exists():  # a broken link; an error comes if the file is needed
            continue
        require_inside(path, folder)
        if path.is_dir():
            continue
        require_regular(path)
        if path.suffix not in _WEIGHT_SUFFIXES:
            require_small_text(path)


def require_small_text(path: Path) -> None:
    """Raise ConfigError if reading a text file of a model would take minutes: it has too many bytes or, as JSON, too many values.

    The values are counted by their commas, because parsing is what takes the time.
    """
    is_settings = path.suffix == ".json" and path.name not in _MOST_VALUES_OF_TABLES
    largest = _LARGEST_SETTINGS_BYTES if is_settings else _LARGEST_TEXT_BYTES
    try:
        if (size := path.stat().st_size) > largest:
            raise ConfigError(
                f"{path} has {size:,} bytes, more than the {largest:,} that such a file may have; download it again"
            )
        values = path.read_bytes().count(b",") if path.suffix == ".json" else 0
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); download it again") from error
    if values > (most := _MOST_VALUES_OF_TABLES.get(path.name, _MOST_VALUES)):
        raise ConfigError(
            f"{path} has {values:,} values, more than the {most:,} that such a file may have; download it again"
        )


def require_inside(path: Path, folder: Path) -> None:
    """Raise ConfigError if a path lies outside a folder after following links.

    Files of a snapshot in the cache of the hub are links to ``blobs`` of the same repository, which counts as the folder.
    """
    root = _repository_in_cache(folder.resolve()) or folder.resolve()
    if not path.resolve().is_relative_to(root):
        raise ConfigError(
            f"{path} leads to {path.resolve()}, outside of {root}; copy the file into the folder if you trust it"
        )


def _repository_in_cache(folder: Path) -> Path | None:
    """Return the folder ``models--OWNER--NAME`` of the hub's cache that a snapshot belongs to, if it does."""
    for above in (folder, *folder.parents):
        if above.parent.name == "snapshots" and re.match(r"(models|datasets|spaces)--", above.parent.parent.name):
            return above.parent.parent
    return None


def require_regular(path: Path, error: type[Exception] = ConfigError) -> None:
    """Raise an error if a path exists and is no regular file, such as a pipe or a device, which may never end."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return
    if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
        raise error(f"{path} is a pipe, a device or a socket; save its content as an ordinary file")
