"""Files of TRL, LLaMA-Factory and Axolotl as files of ours, with a word about each setting that has no place here.

What is called how is data, in ``translations/``; what a table cannot say about rows is in `translate_rows`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from horizon_lm.config.run import SCHEMAS, RunConfig
from horizon_lm.config.text import start_file
from horizon_lm.config.translate_datasets import OF_ROWS, translate_rows
from horizon_lm.config.unsupported import ELSEWHERE, tables
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
    from horizon_lm.config.load import read_yaml

    theirs, _ = read_yaml(path)
    theirs = {key: value for key, value in theirs.items() if value is not None}
    _reject_own_file(theirs, path)
    table = _table_of(theirs, path)
    for key, what in table.get("refused", {}).items():
        if key in theirs:
            raise ConfigError(f"{path}: {key}: this is {what}, and there is no such objective here")
    result = Translation(table["name"], objective or _objective(theirs, table))
    if result.objective != "sft":
        result.settings["objective"] = result.objective
    try:
        result.settings |= translate_rows(table["name"], theirs, Path(path).expanduser().parent, result.left_out)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        names = ", ".join(name for name in OF_ROWS[table["name"]] if name in theirs)
        raise ConfigError(f"{path}: {names}: not as {table['name']} has them ({first_line(error)})") from error
    for key, value in _heeded(theirs, table, result).items():
        if key not in OF_ROWS[table["name"]]:
            try:
                _translate_setting(key, value, table, theirs, result)
            except (TypeError, ValueError):
                result.left_out[key] = f"{value!r} is not a value of it"
    defaults = _defaults(theirs, table)
    result.settings = {**defaults, **result.settings}
    if isinstance(steps := _as_meant(result.settings.get("max_steps")), int) and steps > 0:
        result.settings.pop("num_train_epochs", None)  # steps win, there as here
    _keep_what_is_valid(result, defaults, path)
    result.notes += _notes(theirs, table, defaults, result)
    return result


def _heeded(theirs: Mapping[str, Any], table: Mapping[str, Any], result: Translation) -> dict[str, Any]:
    """Their settings without those that give way to others, whatever their order."""
    heeded = dict(theirs)
    for key, objective in table.get("only_with", {}).items():
        if key in heeded and result.objective != objective:
            del heeded[key]
            result.left_out[key] = f"it is for objective: {objective}"
    for winner, loser in table.get("wins", {}).items():
        if winner in heeded and loser in heeded:
            if _as_meant(heeded[winner]) or table.get("wins_at_zero"):
                del heeded[loser]
                result.left_out[loser] = f"{winner} is set, too, and wins"
            else:
                del heeded[winner]
    return heeded


def _defaults(theirs: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, Any]:
    """What holds there where a file says nothing, and here would not."""
    defaults = dict(table.get("defaults", {}))
    for key, of_value in table.get("defaults_with", {}).items():
        if _is_set(theirs, key):
            defaults |= of_value.get(_key(theirs[key]), of_value.get("any", {}))
    return defaults


def _is_set(theirs: Mapping[str, Any], key: str) -> bool:
    """To something: not to false, and not to an empty list."""
    return key in theirs and theirs[key] not in (False, "", [], {})


def _notes(
    theirs: Mapping[str, Any], table: Mapping[str, Any], defaults: Mapping[str, Any], result: Translation
) -> Iterator[str]:
    """What a reader has to know of a translation, and no setting says."""
    by_default = "adapters_unless" in table and table["adapters_unless"] not in theirs
    if by_default or any(key.startswith("lora_") or value in _ADAPTERS.get(key, []) for key, value in theirs.items()):
        yield "It trained adapters, and here all weights are trained: the learning rate is usually a tenth of theirs, or less"
    said = {*theirs, *(result.settings.keys() - defaults.keys())}
    yield from (note["text"] for note in table.get("notes", []) if said.isdisjoint(note["unless"]))


def _translate_setting(
    key: str, value: Any, table: Mapping[str, Any], theirs: Mapping[str, Any], result: Translation
) -> None:
    rename, values = table.get("rename", {}), table.get("values", {})
    schema = SCHEMAS[result.objective].model_fields
    found = values.get(key, {}).get(_key(value), values.get(key, {}).get(_key(_as_meant(value))))
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
    elif key.startswith("lora_"):
        result.left_out[key] = "adapters are not supported yet"
    elif value is False:
        if key in table.get("gone_if_false", {}):
            result.left_out[key] = table["gone_if_false"][key]
    elif key not in table.get("objective", {}):
        result.left_out[key] = table.get("gone", {}).get(key) or ELSEWHERE.get(
            key, "it is not known here"
        ).removesuffix("; remove it")


_ADAPTERS: dict[str, list[Any]] = {"use_peft": [True], "adapter": ["lora", "qlora"], "finetuning_type": ["lora"]}
_PER_EPOCH = {"evals_per_epoch": ("eval_strategy", "eval_steps"), "saves_per_epoch": ("save_strategy", "save_steps")}


def _key(value: Any) -> Any:
    """A value as the keys of a table are."""
    return value if isinstance(value, bool | str) else str(value)


def _as_meant(value: Any) -> Any:
    """What YAML 1.1 or a lenient reader makes of a text: yes and on, and numbers between quotes."""
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


def _keep_what_is_valid(result: Translation, defaults: Mapping[str, Any], path: str) -> None:
    """Leave out what our own validation would refuse, with what it says, so that the file can be used as it is.

    Raises:
        ConfigError: a loss that is not there: without it, it would be another run.
    """
    from horizon_lm.config.datasets import WITHOUT_ROWS

    settings = result.settings
    for _ in range(3 * len(settings)):
        try:
            SCHEMAS[result.objective].model_validate(settings, context=WITHOUT_ROWS)
        except ValidationError as error:
            names = {str(each["loc"][0]): each["msg"].removeprefix("Value error, ") for each in error.errors()}
            kept = {"datasets", "eval_datasets", "model_name_or_path"}  # places that are not here
            wrong = [name for name in names if name in settings and name not in kept]
            if not wrong:
                return
            for name in wrong:
                value = settings.pop(name)
                if isinstance(value, str) and not isinstance(meant := _as_meant(value), str):
                    settings[name] = meant
                    continue
                if name == "loss_type":
                    raise ConfigError(
                        f"{path}: the loss {value!r} is not there with objective: {result.objective}: {names[name]}"
                    ) from None
                result.left_out[name] = f"{value!r} {names[name]}"
                if name in defaults and value != defaults[name]:
                    settings[name] = defaults[name]
        else:
            return


def _reject_own_file(theirs: Mapping[str, Any], path: str) -> None:
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
        if _is_set(theirs, key):
            value = theirs[key][0] if isinstance(theirs[key], list) else theirs[key]
            found = says if isinstance(says, str) else says.get(_key(value))
            if found:
                return str(found)
            if key in ("stage", "rl"):
                raise ConfigError(f"{key}: {value!r} is not an objective here; there are {', '.join(SCHEMAS)}")
    return "sft"
