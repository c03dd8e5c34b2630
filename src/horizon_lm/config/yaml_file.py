"""Read the settings of a YAML file, together with their line and column numbers."""

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from horizon_lm.errors import ConfigError


class SettingPlaces:
    """The places in which settings were given, for error messages.

    Args:
        file: name of the file, or of another source of settings.
        marks: contents of the file with positions, as ruamel.yaml's round-trip loader returns them; None without a file.
        override_prefix: prefix of overridden settings in messages.

    Attributes:
        overridden: names of settings whose value does not come from the file.
    """

    def __init__(self, file: str, marks: Any = None, override_prefix: str = "--") -> None:
        self.overridden: set[str] = set()
        self._file, self._marks, self._override_prefix = file, marks, override_prefix

    def position(self, loc: tuple[int | str, ...]) -> tuple[int, int] | None:
        """Return the line and column, counted from 1, of the deepest part of ``loc`` that is in the file."""
        node, found = self._marks, None
        for key in loc:
            if loc[0] in self.overridden or not isinstance(node, CommentedMap | CommentedSeq) or not _has(node, key):
                break
            found = node.lc.key(key) if isinstance(node, CommentedMap) else node.lc.item(key)
            node = node[key]
        return None if found is None else (found[0] + 1, found[1] + 1)

    def describe(self, loc: tuple[int | str, ...]) -> str:
        """Return the name of a setting after its place, such as ``run.yaml:3:1: max_length``."""
        name = str(loc[0]) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc[1:])
        if loc[0] in self.overridden:
            return f"{self._override_prefix}{name}"
        position = self.position(loc)
        return f"{self._file}: {name}" if position is None else f"{self._file}:{position[0]}:{position[1]}: {name}"


def _has(node: CommentedMap | CommentedSeq, key: int | str) -> bool:
    return key in node if isinstance(node, CommentedMap) else isinstance(key, int) and key < len(node)


def read_yaml(path: str, override_prefix: str = "--") -> tuple[dict[str, Any], SettingPlaces]:
    """Return the settings of a YAML 1.2 file and their places.

    Args:
        path: the file.
        override_prefix: prefix of overridden settings in messages.

    Raises:
        ConfigError: the file cannot be read, or is not a mapping of settings.
    """
    try:
        text = Path(path).expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}; name the YAML file of a run") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not a text file in UTF-8 (byte {error.start}); name the YAML file of a run"
        ) from error
    try:
        settings = YAML(typ="safe", pure=True).load(text)
        marks = YAML(typ="rt", pure=True).load(text)  # read again for positions, which the safe loader does not keep
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from error
    except YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: a run file has one setting per line, such as learning_rate: 1e-5")
    for key in settings:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: {key!r} is not the name of a setting")
    return settings, SettingPlaces(path, marks, override_prefix)
