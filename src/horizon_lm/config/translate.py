"""Files of TRL, LLaMA-Factory and Axolotl as files of ours, with a word about each setting that has no place here.

What is called how is data, in ``translations/``; what a table cannot say about rows is in `translate_rows`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from horizon_lm.config.elsewhere import ELSEWHERE
from horizon_lm.config.run import SCHEMAS, RunConfig
from horizon_lm.config.tables import tables
from horizon_lm.config.text import start_file
from horizon_lm.config.translate_rows import OF_ROWS, translate_rows
from horizon_lm.errors import ConfigError, first_line


@dataclass
class Translation:
    """A file of another trainer in our words.

    Attributes:
        trainer: whose it is.
        objective: of the run.
        settings: ours.
        left_out: theirs that have no place here, and why.
        notes: what else a reader has to know.
    """

    trainer: str
    objective: str
    settings: dict[str, Any] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def text(self) -> str:
        """A file of ours."""
        heading = [f"Translated from a file of {self.trainer}.", "horizon-lm inspect shows what it would train on."]
        heading += ["", *self.notes] if self.notes else []
        if self.left_out:
            heading += ["", "Left out:", *(f"  {name}: {reason}" for name, reason in self.left_out.items())]
        return start_file(SCHEMAS[self.objective], self.settings, "\n".join(heading))


def translate(path: str, objective: str | None = None) -> Translation:
    """Translate a file.

    Args:
        path: of a YAML file.
        objective: None for what the file says.

    Raises:
        ConfigError: the file cannot be read, or is of nobody that is known.
    """
    from horizon_lm.config.file import read_yaml

    theirs, _ = read_yaml(path)
    theirs = {key: value for key, value in theirs.items() if value is not None}
    _refuse_ours(theirs, path)
    table = _table_of(theirs, path)
    for key, what in table.get("refused", {}).items():
        if key in theirs:
            raise ConfigError(f"{path}: {key}: this is {what}, and there is no such objective here")
    result = Translation(table["name"], objective or _objective(theirs, table))
    if result.objective != "sft":
        result.settings["objective"] = result.objective
    try:
        result.settings |= dict(translate_rows(table["name"], theirs, Path(path).expanduser().parent, result.left_out))
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        names = ", ".join(name for name in OF_ROWS[table["name"]] if name in theirs)
        raise ConfigError(f"{path}: {names}: not as {table['name']} has them ({first_line(error)})") from error
    for key, value in theirs.items():
        if key not in OF_ROWS[table["name"]]:
            try:
                _translate_setting(key, value, table, theirs, result)
            except (TypeError, ValueError):
                result.left_out[key] = f"{value!r} is not a value of it"
    for name, value in {
        **table.get("defaults", {}),
        **table.get("defaults_of_stage", {}).get(theirs.get("stage"), {}),
    }.items():
        result.settings.setdefault(name, value)
    if isinstance(steps := result.settings.get("max_steps"), int) and steps > 0:
        result.settings.pop("num_train_epochs", None)  # steps win, there as here
    if any(key.startswith("lora_") or value in _ADAPTERS.get(key, []) for key, value in theirs.items()):
        result.notes.append(
            "It trained adapters, and here all weights are trained: the learning rate is usually a tenth of theirs, or less"
        )
    note = table.get("notes", {}).get(result.objective)
    if note and "train_on" not in result.settings:
        result.notes.append(note)
    _keep_what_is_valid(result)
    return result


def _translate_setting(
    key: str, value: Any, table: Mapping[str, Any], theirs: Mapping[str, Any], result: Translation
) -> None:
    rename, values = table.get("rename", {}), table.get("values", {})
    schema = SCHEMAS[result.objective].model_fields
    if key == "warmup_ratio" and theirs.get("warmup_steps"):
        result.left_out[key] = "warmup_steps is set, too, and wins"
    elif key in values and _key(value) in values[key]:
        result.settings |= values[key][_key(value)]
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
    elif key.startswith("lora_"):
        result.left_out[key] = "adapters are not supported yet"
    elif value is not False and key not in table.get("objective", {}):
        result.left_out[key] = table.get("gone", {}).get(key) or ELSEWHERE.get(
            key, "it is not known here"
        ).removesuffix("; remove it")


_ADAPTERS: dict[str, list[Any]] = {"use_peft": [True], "adapter": ["lora", "qlora"], "finetuning_type": ["lora"]}
_PER_EPOCH = {"evals_per_epoch": ("eval_strategy", "eval_steps"), "saves_per_epoch": ("save_strategy", "save_steps")}


def _key(value: Any) -> Any:
    """A value as the keys of a table are."""
    return value if isinstance(value, bool | str) else str(value)


def _keep_what_is_valid(result: Translation) -> None:
    """Leave out what our own validation would refuse, with what it says, so that the file can be used as it is."""
    from horizon_lm.config.data import WITHOUT_ROWS

    for _ in range(len(result.settings)):
        try:
            SCHEMAS[result.objective].model_validate(result.settings, context=WITHOUT_ROWS)
        except ValidationError as error:
            names = {str(each["loc"][0]): each["msg"].removeprefix("Value error, ") for each in error.errors()}
            kept = {"datasets", "eval_datasets", "model_name_or_path"}  # places that are not here
            wrong = [name for name in names if name in result.settings and name not in kept]
            if not wrong:
                return
            for name in wrong:
                result.left_out[name] = f"{result.settings.pop(name)!r} {names[name]}"
        else:
            return


def _refuse_ours(theirs: Mapping[str, Any], path: str) -> None:
    """ConfigError for a file that needs no translation."""
    schema = SCHEMAS.get(str(theirs.get("objective", "sft")), RunConfig)
    if "datasets" in theirs and all(name in schema.model_fields for name in theirs):
        raise ConfigError(f"{path}: all its settings are Horizon-LM's own; use it as it is")


def _table_of(theirs: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Whose file it is, by the settings that only they have."""
    scores = {name: sum(key in theirs for key in table["known_by"]) for name, table in tables().items()}
    best = max(scores, key=lambda name: scores[name])
    if not scores[best] and "model_name_or_path" not in theirs:
        raise ConfigError(f"{path}: not a file of TRL, LLaMA-Factory or Axolotl: none of their settings is in it")
    return tables()[best if scores[best] else "trl"]


def _objective(theirs: Mapping[str, Any], table: Mapping[str, Any]) -> str:
    for key, says in table.get("objective", {}).items():
        if key in theirs:
            value = theirs[key][0] if isinstance(theirs[key], list) else theirs[key]
            found = says if isinstance(says, str) else says.get(_key(value))
            if found:
                return str(found)
            if key in ("stage", "rl"):
                raise ConfigError(f"{key}: {value!r} is not an objective here; there are {', '.join(SCHEMAS)}")
    return "sft"
