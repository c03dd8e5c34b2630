"""Translate a run file of another trainer, using the translation table of that trainer."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from horizon_lm.config.datasets import WITHOUT_ROWS
from horizon_lm.config.run import SCHEMAS, RunConfig
from horizon_lm.config.text import start_file
from horizon_lm.config.translate.dataset_entries import DATASET_SETTINGS, translate_datasets
from horizon_lm.config.translate.unsupported import UNSUPPORTED, tables
from horizon_lm.config.yaml_file import read_yaml
from horizon_lm.errors import ConfigError, first_line

_PER_EPOCH = {"evals_per_epoch": ("eval_strategy", "eval_steps"), "saves_per_epoch": ("save_strategy", "save_steps")}


@dataclass
class Translation:
    """A run file of another trainer, translated to our settings.

    Attributes:
        trainer: name of the other trainer.
        objective: objective of the run.
        settings: our settings.
        left_out: their settings that were not translated, with the reason.
        notes: differences that are not visible in any setting.
    """

    trainer: str
    objective: str
    settings: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def text(self, full: bool = False) -> str:
        """Return our run file, headed by the notes and the settings that were left out. ``full``: see `start_file`."""
        heading = [
            f"Translated from a file of {self.trainer}. Check it with horizon-lm inspect, which shows what it trains on."
        ]
        heading += ["", *self.notes] if self.notes else []
        if self.left_out:
            heading += ["", "Left out:", *(f"  {name}: {reason}" for name, reason in self.left_out.items())]
        return start_file(SCHEMAS[self.objective], self.settings, "\n".join(heading), full)


def translate_file(path: str, objective: str | None = None) -> Translation:
    """Translate a YAML file of another trainer.

    Args:
        path: the file.
        objective: objective of the run, or None to take it from the file.

    Raises:
        ConfigError: the file cannot be read, belongs to no known trainer, or has an unsupported objective or loss.
    """
    theirs, _ = read_yaml(path)
    theirs = {key: value for key, value in theirs.items() if value is not None}
    _reject_own_file(theirs, path)
    table = _find_table(theirs, path)
    for key, method in table.get("rejected", {}).items():
        if key in theirs:
            raise ConfigError(f"{path}: {key}: this is a file of {method}, which is not a supported objective")
    theirs = {**table.get("assumed", {}), **theirs}
    result = Translation(table["name"], objective or _objective(theirs, table))
    if result.objective != "sft":
        result.settings["objective"] = result.objective
    dataset_settings = DATASET_SETTINGS[table["name"]]
    try:
        result.settings |= translate_datasets(table["name"], theirs, Path(path).expanduser().parent, result.left_out)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        names = ", ".join(name for name in dataset_settings if name in theirs)
        raise ConfigError(f"{path}: {names}: not in the format of {table['name']} ({first_line(error)})") from error
    for key, value in _effective(theirs, table, result).items():
        if key not in dataset_settings:
            try:
                _translate_setting(key, value, table, theirs, result)
            except (TypeError, ValueError):
                result.left_out[key] = f"{value!r} is not a valid value"
    defaults = _defaults(theirs, table)
    result.settings = {**defaults, **result.settings}
    for name, other in table.get("twice", {}).items():
        if name not in theirs and other in result.settings:
            result.settings[name] = 2 * _parse_text(result.settings[other])
    if isinstance(steps := _parse_text(result.settings.get("max_steps")), int) and steps > 0:
        result.settings.pop("num_train_epochs", None)  # in all three trainers, max_steps takes precedence
    _leave_out_invalid(result, defaults, path)
    result.notes += _notes(theirs, table, defaults, result)
    return result


# Which file it is


def _reject_own_file(theirs: Mapping[str, Any], path: str) -> None:
    schema = SCHEMAS.get(str(theirs.get("objective", "sft")), RunConfig)
    if "datasets" in theirs and all(name in schema.model_fields for name in theirs):
        raise ConfigError(f"{path}: this is already a run file of Horizon-LM; use it without translation")


def _find_table(theirs: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the translation table of the trainer that most settings in the file are specific to."""
    scores = {name: sum(key in theirs for key in table["recognized_by"]) for name, table in tables().items()}
    best = max(scores, key=lambda name: scores[name])
    if not scores[best] and "model_name_or_path" not in theirs:
        raise ConfigError(f"{path}: not a file of TRL, LLaMA-Factory or Axolotl: it has none of their settings")
    return tables()[best if scores[best] else "trl"]


def _objective(theirs: Mapping[str, Any], table: Mapping[str, Any]) -> str:
    for key, choices in table.get("objective", {}).items():
        if _is_set(theirs, key):
            value = theirs[key][0] if isinstance(theirs[key], list) else theirs[key]
            found = choices if isinstance(choices, str) else choices.get(_table_key(value))
            if found:
                return str(found)
            if key in ("stage", "rl"):
                raise ConfigError(f"{key}: {value!r} is not a supported objective; must be one of {', '.join(SCHEMAS)}")
    return "sft"


# Settings


def _effective(theirs: Mapping[str, Any], table: Mapping[str, Any], result: Translation) -> dict[str, Any]:
    """Return their settings, excluding those that another setting or the objective makes ineffective."""
    effective = dict(theirs)
    for key, objective in table.get("only_for_objective", {}).items():
        if key in effective and result.objective != objective:
            del effective[key]
            result.left_out[key] = f"it is for objective: {objective}"
    for winner, loser in table.get("precedence", {}).items():
        if winner in effective and loser in effective:
            if _parse_text(effective[winner]) or table.get("zero_takes_precedence"):
                del effective[loser]
                result.left_out[loser] = f"{winner} is also set and takes precedence"
            else:
                del effective[winner]
    return effective


def _translate_setting(
    key: str, value: Any, table: Mapping[str, Any], theirs: Mapping[str, Any], result: Translation
) -> None:
    rename, values = table.get("rename", {}), table.get("values", {})
    schema = SCHEMAS[result.objective].model_fields
    if key in table.get("lists", ()) and isinstance(value, str) and "," in value:
        value = [part.strip() for part in value.split(",")]
    found = values.get(key, {}).get(_table_key(value), values.get(key, {}).get(_table_key(_parse_text(value))))
    if found is not None:
        result.settings |= found
    elif rename.get(key) in schema:
        result.settings[rename[key]] = value
    elif key in schema and key not in values:
        result.settings[key] = value
    elif key in _PER_EPOCH:
        strategy, interval = _PER_EPOCH[key]
        times = float(value) * float(theirs.get("num_epochs", 1))
        if not times:
            result.settings[strategy] = "no"
        else:
            result.settings |= {strategy: "steps", interval: round(1 / times, 6)} if times > 1 else {strategy: "epoch"}
    elif value is False:
        # A setting that is switched off needs no mention, unless it is in the table.
        if key in table.get("unsupported_if_false", {}):
            result.left_out[key] = table["unsupported_if_false"][key]
    elif key not in table.get("objective", {}):
        reason = table.get("unsupported", {}).get(key) or UNSUPPORTED.get(key, "unknown setting")
        result.left_out[key] = reason.removesuffix("; remove it")


def _defaults(theirs: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults of the other trainer that differ from ours."""
    defaults = dict(table.get("defaults", {}))
    for key, by_value in table.get("defaults_with", {}).items():
        if _is_set(theirs, key):
            defaults |= by_value.get(_table_key(theirs[key]), by_value.get("any", {}))
    return defaults


def _notes(
    theirs: Mapping[str, Any], table: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation
) -> Iterator[str]:
    explicit = {*theirs, *(result.settings.keys() - defaults.keys())}
    yield from (note["text"] for note in table.get("notes", []) if explicit.isdisjoint(note["unless"]))


def _leave_out_invalid(result: Translation, defaults: Mapping[str, Any], path: str) -> None:
    """Leave out settings that our validation rejects, with its message, so that the file can be used without edits.

    Raises:
        ConfigError: the loss is not supported; leaving it out would silently train with another loss.
    """
    settings = result.settings
    kept = {"datasets", "eval_datasets", "model_name_or_path"}  # they may name files of another machine
    for _ in range(3 * len(settings)):
        try:
            SCHEMAS[result.objective].model_validate(settings, context=WITHOUT_ROWS)
            return
        except ValidationError as error:
            messages = {str(each["loc"][0]): each["msg"].removeprefix("Value error, ") for each in error.errors()}
        invalid = [name for name in messages if name in settings and name not in kept]
        if not invalid:
            return
        for name in invalid:
            value = settings.pop(name)
            if isinstance(value, str) and not isinstance(parsed := _parse_text(value), str):
                settings[name] = parsed
                continue
            if name == "loss_type":
                raise ConfigError(
                    f"{path}: the loss {value!r} is not supported with objective: {result.objective}: {messages[name]}"
                )
            result.left_out[name] = f"{value!r} {messages[name]}"
            if name in defaults and value != defaults[name]:
                settings[name] = defaults[name]


# Values


def _is_set(theirs: Mapping[str, Any], key: str) -> bool:
    """Return whether a setting has a value other than false, an empty text or an empty list."""
    return key in theirs and theirs[key] not in (False, "", [], {})


def _table_key(value: Any) -> Any:
    """Return a value in the form used as a key of a table."""
    return value if isinstance(value, bool | str) else str(value)


def _parse_text(value: Any) -> Any:
    """Parse a text as YAML 1.1 and lenient parsers do, including yes, on, and quoted numbers."""
    if not isinstance(value, str):
        return value
    if value.lower() in ("yes", "on", "true", "no", "off", "false"):
        return value.lower() in ("yes", "on", "true")
    for number in (int, float):
        try:
            return number(value)
        except ValueError:
            continue
    return value
