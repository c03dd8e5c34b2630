"""From a run's YAML file and ``--key value`` overrides to a `RunConfig`, with every error in one report."""

import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedMap, CommentedSeq
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from horizon_lm.config import SCHEMAS, WITHOUT_ROWS, DatasetConfig, RunConfig
from horizon_lm.config.text import describe
from horizon_lm.config.types import UnusedError
from horizon_lm.config.unsupported import ELSEWHERE, RENAMED, our_name
from horizon_lm.errors import ConfigError

_LENGTHS = {"num_train_epochs", "max_steps"}  # of which a run has one


def read_run_config(path: str | None, overrides: Sequence[str] = (), *, without_rows: bool = False) -> RunConfig:
    """Read a run's file, lay the overrides over it, and validate once.

    Args:
        path: a YAML 1.2 file; None for overrides only.
        overrides: command-line tokens, ``--key value`` or ``--key=value``; values are read as YAML.
        without_rows: ``datasets`` may be missing.

    Raises:
        ConfigError: all that is wrong, each with its place, value and remedy.
    """
    settings, places = read_yaml(path) if path is not None else ({}, _Places("the command line", None, set()))
    changed = parse_overrides(overrides)
    places.overridden |= set(changed)
    return _validated(_laid_over(settings, changed), places, without_rows)


def _laid_over(settings: Mapping[str, Any], changed: Mapping[str, Any]) -> dict[str, Any]:
    """Settings with changes, before which those give way that they make useless."""
    if not changed:
        return dict(settings)
    lengths = [key for key in _LENGTHS if changed.get(key) not in (None, -1)]
    kept = {key: value for key, value in settings.items() if len(lengths) != 1 or key not in _LENGTHS}
    useless_before = _useless(kept)  # in any case, and so an error
    for _ in range(len(kept)):
        useless = _useless({**kept, **changed}) - changed.keys() - useless_before
        if not useless:
            break
        kept = {key: value for key, value in kept.items() if key not in useless}
    return {**kept, **changed}


def _useless(settings: Mapping[str, Any]) -> set[str]:
    """Settings that a run would not use, as their validators say."""
    try:
        _schema(settings).model_validate(settings, context=WITHOUT_ROWS)
    except ValidationError as error:
        found = [each for each in error.errors() if isinstance(each.get("ctx", {}).get("error"), UnusedError)]
        return {str(each["loc"][0]) for each in found}
    return set()


def _schema(settings: Mapping[str, Any]) -> type[RunConfig]:
    objective = settings.get("objective", "sft")
    return SCHEMAS.get(objective if isinstance(objective, str) else "", SCHEMAS["sft"])


def _validated(merged: dict[str, Any], places: "_Places", without_rows: bool) -> RunConfig:
    """The one validation of a run."""
    schema = _schema(merged)
    try:
        return schema.model_validate(merged, context=WITHOUT_ROWS if without_rows else None)
    except ValidationError as error:
        details = _one_each(error.errors(include_url=False))
        details.sort(key=lambda each: places.position(each["loc"]) or (0, 0))
        problems = [_describe(each, places, schema) for each in details]
        heading = "" if len(problems) == 1 else f"{len(problems)} settings cannot be used:\n"
        raise ConfigError(heading + "\n".join(problems)) from error


def as_config(run: RunConfig | Mapping[str, Any] | str | Path, changed: Mapping[str, Any] | None = None) -> RunConfig:
    """A run's settings from themselves, from a mapping, or from the file that has them, with changes. ConfigError as above."""
    if isinstance(run, RunConfig) and not changed:
        return run
    if isinstance(run, str | Path):
        settings, places = read_yaml(str(run))
    else:
        settings = run.model_dump() if isinstance(run, RunConfig) else dict(run)
        places = _Places("train()", None, set())
    places.overridden |= set(changed or ())
    places.of_overridden = "train(): "
    return _validated(_laid_over(settings, changed or {}), places, without_rows=False)


def describe_settings() -> str:
    """All settings with their defaults: those of the first objective, then what the others have besides or otherwise."""
    lines: list[str] = []
    for objective, schema in SCHEMAS.items():
        new = [line for line in describe(schema) if line not in lines]
        lines += [f"# {'all settings of' if not lines else 'with'} objective: {objective}", *new]
    return "\n".join(lines)


def split_arguments(tokens: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split arguments into the run file and the overrides around it. Raise ConfigError if there are two files."""
    files, overrides = [], []
    expects_value = False
    for index, token in enumerate(tokens):
        if expects_value or token.startswith("--"):
            expects_value = not expects_value and "=" not in token and not _is_bare_flag(token, tokens[index + 1 :])
            overrides.append(token)
        else:
            files.append(token)
    if len(files) > 1:
        raise ConfigError(f"one run file is expected, but there are {len(files)}: {', '.join(files)}")
    return (files[0] if files else None), overrides


def parse_overrides(tokens: Sequence[str]) -> dict[str, Any]:
    """Parse ``--key value``, ``--key=value``, and ``--key`` or ``--no_key`` for a boolean setting.

    Dashes in a key may stand for underscores.
    """
    settings: dict[str, Any] = {}
    rest = list(tokens)
    while rest:
        token = rest.pop(0)
        key, equals, text = token.removeprefix("--").partition("=")
        if not token.startswith("--") or not key:
            raise ConfigError(f"{token!r} is not an override; write --key value")
        if not equals and _is_bare_flag(token, rest):
            key, text = (key, "true") if _is_boolean(key) else (key[len("no-") :], "false")
        elif not equals:
            if not rest:
                raise ConfigError(f"{token} has no value; write {token} VALUE")
            text = rest.pop(0)
        key = key.replace("-", "_")
        if key in settings:
            raise ConfigError(f"--{key} is given twice; keep one")
        settings[key] = _parse_value(key, text)
    return settings


def _is_bare_flag(token: str, following: Sequence[str]) -> bool:
    """Return whether an option is a boolean setting without a value: an option, a run file or nothing follows."""
    key = token.removeprefix("--")
    if _is_boolean(key):
        return not following or following[0].startswith("--") or following[0].endswith((".yaml", ".yml"))
    return key.startswith(("no_", "no-")) and _is_boolean(key[len("no-") :])


def _is_boolean(key: str) -> bool:
    """Return whether a setting can be true or false."""
    fields = [schema.model_fields.get(key.replace("-", "_")) for schema in SCHEMAS.values()]
    return any(field is not None and bool in (field.annotation, *get_args(field.annotation)) for field in fields)


def _parse_value(key: str, text: str) -> Any:
    """A value as YAML would read it; as it is where text is asked for, so that paths need no quotes."""
    fields = [schema.model_fields[key] for schema in SCHEMAS.values() if key in schema.model_fields]
    if fields and fields[0].annotation in (str, str | None) and text != "null":
        return text
    try:
        return YAML(typ="safe", pure=True).load(text)
    except YAMLError as error:
        raise ConfigError(f"--{key}: {text!r} cannot be read; quote it as in YAML") from error


class _Places:
    """Where each setting was made."""

    def __init__(self, file: str, marks: Any, overridden: set[str]) -> None:
        self.file, self._marks, self.overridden, self.of_overridden = file, marks, overridden, "--"

    def position(self, loc: tuple[int | str, ...]) -> tuple[int, int] | None:
        """Line and column, from 1, of the deepest part of ``loc`` that the file has."""
        node, found = self._marks, None
        for key in loc:
            if loc[0] in self.overridden or not isinstance(node, CommentedMap | CommentedSeq) or not _has(node, key):
                break
            found = node.lc.key(key) if isinstance(node, CommentedMap) else node.lc.item(key)
            node = node[key]
        return None if found is None else (found[0] + 1, found[1] + 1)

    def of(self, loc: tuple[int | str, ...]) -> str:
        """A setting with its place, for a message."""
        name = str(loc[0]) + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc[1:])
        if loc[0] in self.overridden:
            return f"{self.of_overridden}{name}"
        position = self.position(loc)
        return f"{self.file}: {name}" if position is None else f"{self.file}:{position[0]}:{position[1]}: {name}"


def _has(node: CommentedMap | CommentedSeq, key: int | str) -> bool:
    return key in node if isinstance(node, CommentedMap) else isinstance(key, int) and key < len(node)


def read_yaml(path: str) -> tuple[dict[str, Any], _Places]:
    """The settings in a YAML 1.2 file, and where each is. ConfigError for what is none."""
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
        marks = YAML(typ="rt", pure=True).load(text)  # the same once more, for lines and columns
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else path
        raise ConfigError(f"{place}: not valid YAML: {error.problem or error.context}") from error
    except YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from error
    if settings is None:
        settings = {}
    if not isinstance(settings, dict):
        raise ConfigError(f"{path}: a run file has one setting a line, such as learning_rate: 1e-5")
    not_text = [key for key in settings if not isinstance(key, str)]
    if not_text:
        raise ConfigError(f"{path}: {not_text[0]!r} is not the name of a setting")
    return settings, _Places(path, marks, set())


def _one_each(details: Sequence[Any]) -> list[Any]:
    """One error for each place: pydantic has one for each kind of value that a setting may have, with the kind as a place."""
    found: dict[tuple[int | str, ...], Any] = {}
    for each in details:
        loc = each["loc"] if each["loc"][0] in ("datasets", "eval_datasets") else each["loc"][:1]
        if loc in found:
            more = each["msg"].removeprefix("Input should be ")
            found[loc] = {**found[loc], "msg": f"{found[loc]['msg']}, or {more}"}
        else:
            found[loc] = {**each, "loc": loc}
    return list(found.values())


def _describe(details: Any, places: _Places, schema: type[RunConfig]) -> str:
    """One error of pydantic as a line: place, setting, value, what to do."""
    loc = details["loc"]
    known = schema.model_fields if len(loc) == 1 else DatasetConfig.model_fields
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    message = message.replace("a valid boolean", "true or false").removesuffix(", unable to interpret input")
    if details["type"] == "missing" or message == "is missing":
        return f"{places.of(loc)} is missing. {known[str(loc[-1])].description}"
    if details["type"] == "extra_forbidden":
        return f"{places.of(loc)} is not a setting{_suggest(str(loc[-1]), list(known), len(loc) == 1)}"
    return f"{places.of(loc)}: {_shorten(details['input'])}: {message}"


def _suggest(key: str, known: list[str], of_run: bool) -> str:
    others = [objective for objective, schema in SCHEMAS.items() if of_run and key in schema.model_fields]
    if others:
        return f" of this objective, but of objective: {' or '.join(others)}; remove it, or change the objective"
    if key in RENAMED:
        return f"; it is called {RENAMED[key]} now"
    if key in ELSEWHERE:
        return f"; {ELSEWHERE[key]}"
    if of_run and (ours := our_name(key)) in known:
        return f"; it is called {ours} here"
    close = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else "; horizon-lm train --settings lists those there are"


def _shorten(value: Any) -> str:
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 80 else text[:77] + "..."
