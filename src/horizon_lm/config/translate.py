"""Files of TRL, LLaMA-Factory and Axolotl as files of ours, with a word about each setting that has no place here.

What is called how is data, in ``translations/``; here is what a table cannot say: where rows are.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from horizon_lm.config.elsewhere import ELSEWHERE
from horizon_lm.config.run import SCHEMAS, RunConfig
from horizon_lm.config.text import start_file
from horizon_lm.errors import ConfigError, first_line

_AXOLOTL_TYPES = {
    "alpaca": {"format": "alpaca"},
    "chat_template": {"format": "messages"},
    "sharegpt": {"format": "sharegpt"},
    "completion": {"format": "text"},
}


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
        result.settings |= _rows(table["name"], theirs, Path(path).expanduser().parent, result.left_out)
    except (TypeError, AttributeError, KeyError, ValueError) as error:
        names = ", ".join(name for name in _OF_ROWS[table["name"]] if name in theirs)
        raise ConfigError(f"{path}: {names}: not as {table['name']} has them ({first_line(error)})") from error
    for key, value in theirs.items():
        if key not in _OF_ROWS[table["name"]]:
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
    scores = {name: sum(key in theirs for key in table["known_by"]) for name, table in _tables().items()}
    best = max(scores, key=lambda name: scores[name])
    if not scores[best] and "model_name_or_path" not in theirs:
        raise ConfigError(f"{path}: not a file of TRL, LLaMA-Factory or Axolotl: none of their settings is in it")
    return _tables()[best if scores[best] else "trl"]


@cache
def _tables() -> dict[str, Mapping[str, Any]]:
    from ruamel.yaml import YAML

    folder = files("horizon_lm.config") / "translations"
    yaml = YAML(typ="safe", pure=True)
    return {
        name: yaml.load((folder / f"{name}.yaml").read_text(encoding="utf-8"))
        for name in ("trl", "llamafactory", "axolotl")
    }


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


# Rows

_OF_ROWS = {
    "TRL": (
        "dataset_name",
        "dataset_config",
        "dataset_train_split",
        "dataset_test_split",
        "datasets",
        "dataset_text_field",
    ),
    "LLaMA-Factory": ("dataset", "eval_dataset"),
    "Axolotl": ("datasets", "test_datasets"),
}


def _rows(
    trainer: str, theirs: Mapping[str, Any], folder: Path, left_out: dict[str, str]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Our ``datasets`` and ``eval_datasets``."""
    if trainer == "LLaMA-Factory":
        info = _dataset_info(folder, theirs.get("dataset_dir", "data"))
        for key, ours in (("dataset", "datasets"), ("eval_dataset", "eval_datasets")):
            names = theirs.get(key) or []
            names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
            if names:
                yield ours, [_of_llamafactory(name, *info) for name in names]
            if unknown := [name for name in names if name not in info[1]]:
                left_out[key] = f"{', '.join(unknown)}: not found in a dataset_info.json; write their paths in {ours}"
    elif trainer == "Axolotl":
        for key, ours in (("datasets", "datasets"), ("test_datasets", "eval_datasets")):
            entries = [theirs[key]] if isinstance(theirs.get(key), str | Mapping) else theirs.get(key)
            if entries:
                said = [{"path": entry} if isinstance(entry, str) else entry for entry in entries]
                yield ours, [_of_axolotl(entry, left_out) for entry in said]
    else:
        yield from _of_trl(theirs)


def _of_trl(theirs: Mapping[str, Any]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    columns = {"text": theirs["dataset_text_field"]} if theirs.get("dataset_text_field", "text") != "text" else None
    if theirs.get("dataset_name"):
        entry = {"path": theirs["dataset_name"], "name": theirs.get("dataset_config"), "columns": columns}
        entry = {key: value for key, value in entry.items() if value is not None}
        split = theirs.get("dataset_train_split")
        yield "datasets", [entry | ({"split": split} if split and split != "train" else {})]
        if theirs.get("eval_strategy", "no") != "no":
            yield "eval_datasets", [entry | {"split": theirs.get("dataset_test_split", "test")}]
    elif theirs.get("datasets"):
        yield (
            "datasets",
            [
                {key: entry[key] for key in ("path", "name", "data_dir", "data_files", "split") if entry.get(key)}
                for entry in theirs["datasets"]
            ],
        )


def _dataset_info(folder: Path, data_dir: Any) -> tuple[Path, Mapping[str, Any]]:
    """LLaMA-Factory's list of data sets, where it can be found."""
    for place in (folder / str(data_dir), Path(str(data_dir)), folder):
        if (place / "dataset_info.json").is_file():
            try:
                return place, json.loads((place / "dataset_info.json").read_text(encoding="utf-8"))
            except ValueError as error:
                raise ConfigError(f"{place / 'dataset_info.json'}: not valid JSON ({error})") from error
    return folder, {}


_LLAMAFACTORY_COLUMNS = {
    "prompt": "instruction", "query": "input", "response": "output", "messages": "conversations", "system": "system",
    "tools": "tools", "history": "history", "chosen": "chosen", "rejected": "rejected",
}  # fmt: skip


def _of_llamafactory(name: str, folder: Path, info: Mapping[str, Any]) -> dict[str, Any]:
    said = info.get(name)
    if said is None:
        return {"path": name}
    entry: dict[str, Any] = {"path": said.get("hf_hub_url") or str(folder / said.get("file_name", name))}
    entry |= {key: said[theirs] for key, theirs in (("name", "subset"), ("split", "split")) if said.get(theirs)}
    columns = {
        _LLAMAFACTORY_COLUMNS[theirs]: column
        for theirs, column in said.get("columns", {}).items()
        if theirs in _LLAMAFACTORY_COLUMNS and _LLAMAFACTORY_COLUMNS[theirs] != column
    }
    return entry | ({"columns": columns} if columns else {})


def _of_axolotl(said: Mapping[str, Any], left_out: dict[str, str]) -> dict[str, Any]:
    entry = {key: said[key] for key in ("path", "name", "data_files", "split") if said.get(key)}
    kind = str(said.get("type", "")).partition(".")[0]
    entry |= _AXOLOTL_TYPES.get(kind, {})
    for theirs, ours in (
        ("field_messages", "messages"),
        ("field", "text"),
        ("field_chosen", "chosen"),
        ("field_rejected", "rejected"),
    ):
        if said.get(theirs, ours) != ours:
            entry.setdefault("columns", {})[ours] = said[theirs]
    if entry.get("format") == "messages" and said.get("field_messages", "conversations") == "conversations":
        entry.pop("format")  # told by its fields
        entry.pop("columns", None)
    for key in said:
        if key not in (
            "path",
            "name",
            "data_files",
            "split",
            "type",
            "ds_type",
            "field_messages",
            "field",
            "field_chosen",
            "field_rejected",
        ):
            left_out[f"datasets.{key}"] = "rows are read as their fields say; see columns and format"
    if kind == "alpaca":
        left_out["datasets.type"] = (
            "rows are read as alpaca, but the model's chat template writes them, not ### Instruction"
        )
    if kind and kind not in _AXOLOTL_TYPES:
        left_out["datasets.type"] = f"{kind} is not a form here; the fields of the rows decide"
    return entry
