"""Read the settings of a YAML file, together with their line and column numbers."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError

from horizon_lm.common.paths import exists, near_path
from horizon_lm.errors import ConfigError, first_line


class SettingPlaces:
    """The places in which settings were given, for error messages.

    Args:
        file: name of the file, or of another source of settings.
        marks: contents of the file with positions, as ruamel.yaml's round-trip loader returns them; None without a file.

    Attributes:
        overridden: settings whose value does not come from the file, each as it was given, such as ``--host-memory``.
    """

    def __init__(self, file: str, marks: Any = None) -> None:
        self.overridden: dict[str, str] = {}
        self._file, self._marks = file, marks

    def position(self, loc: tuple[int | str, ...]) -> tuple[int, int] | None:
        """Return line and column, counted from 1, of the deepest part of ``loc`` that is in the file; None if overridden or not in it."""
        node, mark = self._marks, None
        for key in loc:
            if loc[0] in self.overridden or not isinstance(node, CommentedMap | CommentedSeq) or not _has(node, key):
                break
            mark = node.lc.key(key) if isinstance(node, CommentedMap) else node.lc.item(key)
            node = node[key]
        return None if mark is None else (mark[0] + 1, mark[1] + 1)

    def describe(self, loc: tuple[int | str, ...]) -> str:
        """Return the name of a setting after its place, such as ``run.yaml:3:1: max_length``."""
        inside = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc[1:])
        name = f"{loc[0]}{inside}"
        if loc[0] in self.overridden:
            return f"{self.overridden[str(loc[0])]}{inside}"
        position = self.position(loc)
        return f"{self._file}: {name}" if position is None else f"{self._file}:{position[0]}:{position[1]}: {name}"


def _has(node: CommentedMap | CommentedSeq, key: int | str) -> bool:
    return key in node if isinstance(node, CommentedMap) else isinstance(key, int) and key < len(node)


MAX_CHARS = 2**18  # of a run file; reading that many takes seconds
_MAX_VALUES = 2**14  # in a run file, counting what an alias stands for each time
_MAX_DEPTH = 500  # of lists and mappings
_MAX_BITS = 1024  # of a whole number


def parse_yaml(text: str, place: str) -> Any:
    """Return the content of YAML 1.2 text: plain values only, since tags of other types are rejected.

    Raises:
        ConfigError: the text is not YAML, too long, or its aliases stand for themselves or for too many values.
    """
    return _parse(text, place, "safe")


def _parse(text: str, place: str, loader: str) -> Any:
    """Return the content of YAML text as one of ruamel.yaml's loaders makes it; raise ConfigError as `parse_yaml` does."""
    if len(text) > MAX_CHARS:
        raise ConfigError(f"{place}: more than {MAX_CHARS:,} characters; name the YAML file of a run")
    try:
        require_few_values(YAML(typ="safe", pure=True).parse(text), _MAX_VALUES)
        content = YAML(typ=loader, pure=True).load(text)
        _require_small_numbers(content)
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{place}:{mark.line + 1}:{mark.column + 1}" if mark else place
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from error
    except RecursionError as error:
        raise ConfigError(f"{place}: nested too deeply") from error
    except Exception as error:  # ruamel's own checks are incomplete
        raise ConfigError(f"{place}: not valid YAML: {first_line(error)}") from error
    return content


def require_few_values(events: Iterable[Any], most: int) -> None:
    """Raise ValueError if YAML has more than ``most`` values once aliases are expanded, or an alias inside of the collection it stands for.

    Events of ruamel.yaml or PyYAML are counted, because a loader expands merge keys (``<<: *name``) before it returns anything.
    """
    sizes: dict[str, int | None] = {}  # the values of each anchor; None while its collection is open
    # For each open collection, from the outermost on: its anchor and its values so far. The first entry is the document.
    open_anchors, open_counts = list[str | None]([None]), [0]
    for event in events:
        kind = type(event).__name__  # the same in both packages
        if kind in ("MappingStartEvent", "SequenceStartEvent"):
            open_anchors.append(event.anchor)
            open_counts.append(1)
            if len(open_counts) > _MAX_DEPTH:  # deeper nesting takes parsers quadratic time
                raise RecursionError("nested too deeply")
            if event.anchor:
                sizes.setdefault(event.anchor, None)
            continue
        if kind in ("MappingEndEvent", "SequenceEndEvent"):
            anchor, size = open_anchors.pop(), open_counts.pop()
        elif kind == "ScalarEvent":
            anchor, size = event.anchor, 1
        elif kind == "AliasEvent":
            if (known := sizes.get(event.anchor, 1)) is None:
                raise ValueError("an alias stands for what it is part of")
            anchor, size = None, known
        else:
            continue
        if anchor:
            if sizes.get(anchor) is not None:
                raise ValueError(f"the anchor {anchor} is there twice")
            sizes[anchor] = size
        open_counts[-1] += size
        if open_counts[-1] > most:
            raise ValueError(f"more than {most:,} values, aliases expanded")


def _require_small_numbers(value: Any) -> None:
    """Raise ValueError if a whole number in a value, at any depth, has more than `_MAX_BITS` bits."""
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError(f"a number of {value.bit_length():,} bits")
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list | set | tuple):
        for each in value:
            _require_small_numbers(each)


def read_yaml(path: str) -> tuple[dict[str, Any], SettingPlaces]:
    """Return the settings of a YAML 1.2 file and their places.

    Args:
        path: the file.

    Raises:
        ConfigError: the file cannot be read, or is not a mapping of settings.
    """
    if path.endswith(_SUFFIXES_OF_ROWS) and exists(path):
        raise _file_of_rows(path)
    try:
        with Path(path).expanduser().open(encoding="utf-8") as file:
            text = file.read(MAX_CHARS + 1)
    except OSError as error:
        hint = "" if exists(path) else near_path(path)
        raise ConfigError(f"{path}: {error.strerror or error}{hint or '; name the YAML file of a run'}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not a text file in UTF-8 (byte {error.start}); name the YAML file of a run"
        ) from error
    if Path(path).suffix == ".py":
        raise ConfigError(
            f"{path} is a Python script, not a file of settings; two changed lines stream the model of a script "
            "of transformers or TRL (docs/trainer.md)"
        )
    if _has_rows(path, text):
        raise _file_of_rows(path)
    settings = parse_yaml(text, path)
    marks = _parse(text, path, "rt")  # read again for positions, which the safe loader does not keep
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: a run file has one setting per line, such as learning_rate: 1e-5")
    for key in settings:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: {key!r} is not the name of a setting")
    return settings, SettingPlaces(path, marks)


_SUFFIXES_OF_ROWS = (".jsonl", ".jsonl.gz", ".json.gz", ".csv", ".tsv", ".parquet", ".arrow")


def _has_rows(path: str, text: str) -> bool:
    """Return whether a .json or .txt file, which may also hold settings, has rows: a list, an object per line, or prose."""
    lines = [line for each in text.splitlines() if (line := each.strip())]  # that are not blank
    if path.endswith(".json"):
        return [line[0] for line in lines[:2]] == ["{", "{"] or text.lstrip().startswith("[")
    return path.endswith(".txt") and lines != [] and not any(re.match(r"[\w-]+\s*:", line) for line in lines)


def _file_of_rows(path: str) -> ConfigError:
    """Return the error for a file of rows in the place of a run file, with the remedy."""
    return ConfigError(
        f"{path}: this is a file of rows; name a run file with datasets: {path} (horizon-lm init writes one)"
    )
