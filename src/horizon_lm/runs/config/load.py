"""Load a `RunConfig` from a run file and ``--key value`` overrides, and report all errors together."""

import re
import shlex
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import ValidationError

from horizon_lm.common.near_misses import closest_setting
from horizon_lm.errors import ConfigError, HorizonError
from horizon_lm.runs.config.datasets import DatasetConfig
from horizon_lm.runs.config.foreign.tables import foreign_trainer, our_name, remedies
from horizon_lm.runs.config.rules import WITHOUT_ROWS, Reading, UnusedError
from horizon_lm.runs.config.run import SCHEMAS, RunConfig
from horizon_lm.runs.config.setting_paths import path_problems
from horizon_lm.runs.config.yaml_file import SettingPlaces, parse_yaml, read_yaml

_OPTIONS = {"model": "model_name_or_path"}  # options of commands whose setting has another name
_RENAMED = {  # earlier names of settings
    "boundaries": "activation_checkpoints",
    "held_blocks": "resident_blocks",
    "held_graphs": "resident_graphs",
}


_NO_CHANGES: Mapping[str, Any] = {}
Checks = Callable[[RunConfig], Iterable[HorizonError]]  # the errors of what settings name


def _no_checks(config: RunConfig) -> Iterable[HorizonError]:
    """Return no errors."""
    return ()


def read_run_config(
    path: str | None, overrides: Sequence[str] = (), *, without_rows: bool = False, checks: Checks = _no_checks
) -> RunConfig:
    """Read a run file, apply the overrides, and validate the result once.

    Args:
        path: a YAML 1.2 file, or None to use only the overrides.
        overrides: command-line tokens, ``--key value`` or ``--key=value``, with values in YAML.
        without_rows: allow ``datasets`` to be missing.
        checks: yields the errors of what the settings name, such as files.

    Raises:
        ConfigError: all invalid settings, each with its place, value and remedy, and all errors of ``checks``.
        HorizonError: the only error, if that is one of ``checks``.
    """
    settings, places = _read_file(path) if path is not None else ({}, SettingPlaces("the command line"))
    changes = parse_overrides(overrides)
    places.overridden |= {key: option for option, key, _ in _read_overrides(overrides)}
    return _validate(_without_overruled(settings, changes), changes, places, without_rows, checks)


def as_config(run: RunConfig | Mapping[str, Any] | str | Path, changes: Mapping[str, Any] | None = None) -> RunConfig:
    """Return the settings of a run from a `RunConfig`, a mapping or a run file, with ``changes`` applied.

    Raises:
        ConfigError: all invalid settings, as `read_run_config` reports them.
    """
    if isinstance(run, RunConfig) and not changes:
        return run
    if isinstance(run, str | Path):
        settings, places = _read_file(str(run))
    else:
        settings = run.model_dump() if isinstance(run, RunConfig) else dict(run)
        places = SettingPlaces("train()")
    places.overridden |= {key: f"train(): {key}" for key in changes or ()}
    return _validate(_without_overruled(settings, changes or {}), changes or {}, places, without_rows=False)


def _read_file(path: str) -> tuple[dict[str, Any], SettingPlaces]:
    """Return the settings of a run file and their places. Raise ConfigError for a file of another trainer."""
    settings, places = read_yaml(path)
    if trainer := foreign_trainer(settings):
        raise ConfigError(
            f"{path}: this is a file of {trainer}; translate it with horizon-lm init --from {path} > run.yaml"
        )
    return settings, places


def split_arguments(tokens: Sequence[str]) -> tuple[str | None, list[str]]:
    """Split command-line tokens into the run file, if any, and the overrides.

    Raises:
        ConfigError: more than one file is given, or a setting without dashes.
    """
    files, overrides = [], []
    expects_value = False
    for index, token in enumerate(tokens):
        if expects_value or token.startswith("--"):
            expects_value = not expects_value and "=" not in token and not _is_bare_flag(token, tokens[index + 1 :])
            overrides.append(token)
        else:
            files.append(token)
    for file in files:
        if (pair := re.fullmatch(r"\+*([A-Za-z]\w*)=(.*)", file)) and not file.endswith((".yaml", ".yml")):
            raise ConfigError(f"{file} is no run file; write --{pair[1]} {shlex.quote(pair[2])}")
    if len(files) > 1:
        raise ConfigError(f"expected one run file, but got {len(files)}: {', '.join(files)}{_list_hint(tokens)}")
    return (files[0] if files else None), overrides


def _list_hint(tokens: Sequence[str]) -> str:
    """Return the hint at how to write a list, if an option whose setting takes a list is followed by several values; else empty."""
    for index, token in enumerate(tokens):
        option, *after_equals = token.split("=", 1)
        values = [*after_equals, *takewhile(lambda each: not each.startswith("--"), tokens[index + 1 :])]
        if token.startswith("--") and len(values) > 1 and _takes_list(option.removeprefix("--")):
            return f"; write a list in brackets: {option} '[{', '.join(values)}]'"
    return ""


def parse_overrides(tokens: Sequence[str]) -> dict[str, Any]:
    """Parse ``--key value`` and ``--key=value`` tokens, and ``--key`` or ``--no_key`` for boolean settings.

    Keys may be written with dashes.

    Raises:
        ConfigError: a token is not an override, has no value or cannot be read, or a key is repeated.
    """
    settings: dict[str, Any] = {}
    given: dict[str, str] = {}  # the option by which each setting was given
    for option, key, value in _read_overrides(tokens):
        if key in given:
            names = f"{option} is given twice" if option == given[key] else f"{given[key]} and {option} are both given"
            raise ConfigError(f"{names}; keep one")
        given[key], settings[key] = option, value
    return settings


def _read_overrides(tokens: Sequence[str]) -> Iterator[tuple[str, str, Any]]:
    """Yield for each override its option as it is written, its setting and its value; raise ConfigError as `parse_overrides` does."""
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
        option, name = token.partition("=")[0], key.replace("-", "_")
        name = _OPTIONS.get(name, name)
        yield option, name, _parse_value(name, option, text)


def _is_bare_flag(token: str, following: Sequence[str]) -> bool:
    """Return whether an option is a boolean setting without a value, that is, followed by an option, a run file or nothing."""
    key = token.removeprefix("--")
    if _is_boolean(key):
        return not following or following[0].startswith("--") or following[0].endswith((".yaml", ".yml"))
    return key.startswith(("no_", "no-")) and _is_boolean(key[len("no-") :])


def _takes_list(key: str) -> bool:
    """Return whether a setting can be a list."""
    fields = [schema.model_fields.get(key.replace("-", "_")) for schema in SCHEMAS.values()]
    return any(field is not None and list in _types_in(field.annotation) for field in fields)


def _types_in(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation is made of, at any depth, without their parameters."""
    yield get_origin(annotation) or annotation
    for each in get_args(annotation):
        yield from _types_in(each)


def _is_boolean(key: str) -> bool:
    """Return whether a setting can be true or false."""
    fields = [schema.model_fields.get(key.replace("-", "_")) for schema in SCHEMAS.values()]
    return any(field is not None and bool in (field.annotation, *get_args(field.annotation)) for field in fields)


def _parse_value(key: str, option: str, text: str) -> Any:
    """Parse the value of an option as YAML, except for settings of type text, so that paths need no quotes."""
    fields = [schema.model_fields[key] for schema in SCHEMAS.values() if key in schema.model_fields]
    if fields and fields[0].annotation in (str, str | None) and text != "null":
        return text
    try:
        return parse_yaml(text, option)
    except ConfigError as error:
        raise ConfigError(f"{option}: {text!r} cannot be read; quote it as in YAML") from error


# Overrides


def _without_overruled(settings: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a file without the ones that are used in the file, but not together with ``changes``, the overrides.

    Settings that the file itself does not use are its mistakes; they are kept, so that validation reports them.
    """
    kept = dict(settings)
    if not changes:
        return kept
    if "num_train_epochs" in changes:
        kept.pop("max_steps", None)  # it would take precedence over the number of epochs that is asked for
    unused_before = _unused_names(kept)
    # Repeated, because a setting may need another one that was just left out.
    while overruled := _unused_names(kept, changes).intersection(kept) - changes.keys() - unused_before:
        kept = {key: value for key, value in kept.items() if key not in overruled}
    return kept


def _unused_names(settings_of_file: Mapping[str, Any], changes: Mapping[str, Any] = _NO_CHANGES) -> set[str]:
    """Return the names of settings, with ``changes`` applied, that validation rejects because a run would not use them."""
    settings = {**settings_of_file, **changes}
    try:
        _schema_of(settings).model_validate(
            settings, context=Reading(without_rows=True, places=(settings_of_file, changes))
        )
    except ValidationError as error:
        unused = [each for each in error.errors() if isinstance(each.get("ctx", {}).get("error"), UnusedError)]
        return {str(each["loc"][0]) for each in unused}
    return set()


def _schema_of(settings: Mapping[str, Any]) -> type[RunConfig]:
    objective = settings.get("objective", "sft")
    return SCHEMAS.get(objective if isinstance(objective, str) else "", SCHEMAS["sft"])


# Validation and its messages


def _validate(
    settings_of_file: Mapping[str, Any], changes: Mapping[str, Any], places: SettingPlaces, without_rows: bool, checks: Checks = _no_checks
) -> RunConfig:  # fmt: skip
    """Return the settings, with ``changes`` applied, as a `RunConfig`. Raise one error with all mistakes: invalid settings in the order of
    the file, then paths that do not exist, then the errors of ``checks``.
    """
    settings, reading = {**settings_of_file, **changes}, Reading(without_rows, (settings_of_file, changes))
    schema, problems, errors = _schema_of(settings), list[str](), list[HorizonError]()
    try:
        config: RunConfig | None = schema.model_validate(settings, context=reading)
    except ValidationError as error:
        details = _merge_by_setting(error.errors(include_url=False))
        details.sort(key=lambda each: places.position(each["loc"]) or (0, 0))
        problems += [_describe_error(each, places, schema) for each in details]
        config = _valid_part(schema, settings, {str(each["loc"][0]) for each in details})
    if config is not None:
        problems += [f"{places.describe(loc)}: {value!r}: {problem}" for loc, value, problem in path_problems(config)]
        errors += checks(config)
    if problems or errors or config is None:
        raise _combined_error(problems, errors)
    return config


def _valid_part(schema: type[RunConfig], settings: dict[str, Any], invalid: Collection[str]) -> RunConfig | None:
    """Return the settings without the invalid ones, so that the files that the others name are checked, too. Return None if an invalid
    setting decides what others mean (``objective``, ``gguf_file``), or if the others are invalid without it.
    """
    if not {"objective", "gguf_file"}.isdisjoint(invalid):
        return None
    try:
        rest = {name: value for name, value in settings.items() if name not in invalid}
        return schema.model_validate(rest, context=WITHOUT_ROWS)
    except ValidationError:
        return None


def _combined_error(problems: Sequence[str], errors: Sequence[HorizonError]) -> HorizonError:
    """Return one error with all messages: ``problems``, which are about invalid settings, and ``errors``. It has the type that all of them
    share, and is a ConfigError if they share none; a problem counts as a ConfigError.
    """
    lines = [*problems, *map(str, errors)]
    kinds = {type(each) for each in errors} | ({ConfigError} if problems else set())
    kind = kinds.pop() if len(kinds) == 1 else ConfigError
    if len(lines) == 1:
        return kind(lines[0])
    heading = f"{len(lines)} {'mistakes' if errors else 'invalid settings'}:"
    return kind(
        "\n".join([heading, *(line.replace("\n", "\n  ") for line in lines)])
    )  # a message may have several lines itself


def _merge_by_setting(details: Sequence[Any]) -> list[Any]:
    """Return one error per setting, or per setting of an entry of datasets: pydantic reports one for each member of a union type."""
    merged: dict[tuple[int | str, ...], Any] = {}
    for each in details:
        loc = each["loc"] if each["loc"][0] in ("datasets", "eval_datasets") else each["loc"][:1]
        if loc in merged:
            alternative = each["msg"].removeprefix("Input should be ")
            merged[loc] = {**merged[loc], "msg": f"{merged[loc]['msg']}, or {alternative}"}
        else:
            merged[loc] = {**each, "loc": loc}
    return list(merged.values())


def _describe_error(details: Any, places: SettingPlaces, schema: type[RunConfig]) -> str:
    """Return one line for an error of pydantic: place, setting, value and remedy."""
    loc = details["loc"]
    fields = schema.model_fields if len(loc) == 1 else DatasetConfig.model_fields
    message = details["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    message = message.replace("a valid boolean", "true or false").removesuffix(", unable to interpret input")
    if details["type"] == "missing" or message == "is missing":
        return f"{places.describe(loc)} is missing. {fields[str(loc[-1])].description}"
    if details["type"] == "extra_forbidden":
        return f"{places.describe(loc)} is not a setting{_suggest(str(loc[-1]), list(fields), len(loc) == 1)}"
    message = message.removeprefix(f"{details['input']!r} ")  # which stands before it anyway
    return f"{places.describe(loc)}: {_shorten(details['input'])}: {message}"


def _suggest(key: str, known: list[str], of_run: bool) -> str:
    """Return a suggestion for the unknown setting ``key``, from the surest reason on; ``of_run`` is False in an entry of ``datasets``.

    In this order, the key is an earlier name of ours, a setting that only other trainers have, their name for a setting of ours, a setting
    of another objective, a setting of an entry of ``datasets``, or misspelt.
    """
    if key in _RENAMED:
        return f"; it is now called {_RENAMED[key]}"
    if key in remedies():
        return f"; {remedies()[key]}"
    if of_run and (ours := our_name(key)) in known:
        return f"; it is called {ours} here"
    others = [objective for objective, schema in SCHEMAS.items() if {key, our_name(key)} & schema.model_fields.keys()]
    if of_run and others:
        return f" of this objective, only of objective: {' or '.join(others)}; remove it, or change the objective"
    if of_run and key in DatasetConfig.model_fields:
        return f"; write it into an entry of datasets: {{path: ..., {key}: ...}}"
    close = closest_setting(key, known)
    return f"; did you mean {close}?" if close else "; run horizon-lm train --settings for a list of all settings"


def _shorten(value: Any) -> str:
    text = repr(value) if not isinstance(value, bool) else str(value).lower()
    return text if len(text) <= 80 else text[:77] + "..."
