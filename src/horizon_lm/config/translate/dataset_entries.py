"""Translate the datasets in files of TRL, LLaMA-Factory and Axolotl to entries of our ``datasets``."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from horizon_lm.errors import ConfigError
from horizon_lm.paths import exists

DATASET_SETTINGS = {
    "TRL": (
        "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "datasets", "dataset_text_field",
    ),
    "LLaMA-Factory": ("dataset", "eval_dataset"),
    "Axolotl": ("datasets", "test_datasets", "pretraining_dataset"),
}  # fmt: skip


def translate_datasets(
    trainer: str, theirs: Mapping[str, Any], folder: Path, left_out: dict[str, str]
) -> dict[str, Any]:
    """Return our ``datasets``, ``eval_datasets`` and the settings that follow from them.

    Args:
        trainer: name of the other trainer.
        theirs: its settings.
        folder: folder of its file.
        left_out: receives the settings that cannot be translated, with the reason.

    Raises:
        ConfigError: dataset_info.json cannot be read.
        TypeError, AttributeError, KeyError, ValueError: a setting is not in the format of the trainer.
    """
    translators = {"TRL": _from_trl, "LLaMA-Factory": _from_llamafactory, "Axolotl": _from_axolotl}
    found = dict(translators[trainer](theirs, folder, left_out))
    for entry in [*found.get("datasets", []), *found.get("eval_datasets", [])]:
        if (
            "split" in entry
            and exists(entry["path"])
            and Path(entry["path"]).expanduser().is_file()
            and entry.pop("split") != "train"
        ):
            left_out["datasets.split"] = "a file has no splits; all of its rows are read"
    return found


def _from_trl(theirs: Mapping[str, Any], folder: Path, left_out: dict[str, str]) -> Iterator[tuple[str, Any]]:
    field = theirs.get("dataset_text_field", "text")
    columns = {"columns": {"text": field}} if field != "text" else {}
    if theirs.get("dataset_name"):
        entry = {"path": theirs["dataset_name"], **columns}
        if theirs.get("dataset_config"):
            entry["name"] = theirs["dataset_config"]
        split = theirs.get("dataset_train_split")
        yield "datasets", [entry | ({"split": split} if split and split != "train" else {})]
        if theirs.get("eval_strategy", "no") != "no":
            yield "eval_datasets", [entry | {"split": theirs.get("dataset_test_split", "test")}]
    elif theirs.get("datasets"):
        yield "datasets", [_trl_entry(entry, field, left_out) for entry in theirs["datasets"]]


_TRL_LOCATION = ("path", "name", "data_dir", "data_files", "split")
_TRL_FORMATS = {
    "messages": "messages",
    "conversations": "sharegpt",
    "prompt": "prompt_completion",
    "chosen": "preference",
}


def _trl_entry(theirs: Mapping[str, Any], text_field: str, left_out: dict[str, str]) -> dict[str, Any]:
    entry = {key: theirs[key] for key in _TRL_LOCATION if theirs.get(key)}
    kept = theirs.get("columns") or []  # the columns that TRL keeps decide the format of the rows
    row_format = next((name for column, name in reversed(_TRL_FORMATS.items()) if column in kept), None)
    if row_format is not None or text_field in kept:
        entry["format"] = row_format or "text"
    if text_field != "text" and row_format is None:
        entry["columns"] = {"text": text_field}
    _leave_out("datasets", theirs, (*_TRL_LOCATION, "columns"), left_out)
    return entry


def _from_llamafactory(theirs: Mapping[str, Any], folder: Path, left_out: dict[str, str]) -> Iterator[tuple[str, Any]]:
    data_folder, info = _read_dataset_info(folder, theirs.get("dataset_dir", "data"))
    for key, ours in (("dataset", "datasets"), ("eval_dataset", "eval_datasets")):
        names = theirs.get(key) or []
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        is_text = theirs.get("stage") == "pt"
        entries = [
            _llamafactory_entry(name, data_folder, info[name], is_text, left_out) if name in info else {"path": name}
            for name in names
        ]
        if entries:
            yield ours, entries
        if unknown := [name for name in names if name not in info]:
            left_out[key] = f"{', '.join(unknown)}: not found in a dataset_info.json; write their paths into {ours}"


def _read_dataset_info(folder: Path, data_dir: Any) -> tuple[Path, Mapping[str, Any]]:
    """Return LLaMA-Factory's list of datasets and its folder; the list is empty if it is not found."""
    for place in (folder / str(data_dir), Path(str(data_dir)), folder):
        if exists(str(place / "dataset_info.json")):
            try:
                return place, json.loads((place / "dataset_info.json").read_text(encoding="utf-8"))
            except (OSError, ValueError, RecursionError) as error:
                raise ConfigError(f"{place / 'dataset_info.json'}: not valid JSON ({error})") from error
    return folder, {}


_LLAMAFACTORY_COLUMNS = {
    "prompt": "instruction", "query": "input", "response": "output", "messages": "conversations", "system": "system",
    "tools": "tools", "history": "history", "chosen": "chosen", "rejected": "rejected",
}  # fmt: skip
_LLAMAFACTORY_LOCATION = {"subset": "name", "split": "split", "folder": "data_dir"}
_LLAMAFACTORY_TAGS = {
    "role_tag": ("from", "role"), "content_tag": ("value", "content"), "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"), "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",), "system_tag": ("system",),
}  # fmt: skip


def _llamafactory_entry(
    name: str, folder: Path, theirs: Mapping[str, Any], is_text: bool, left_out: dict[str, str]
) -> dict[str, Any]:
    """Translate an entry of ``dataset_info.json``."""
    entry: dict[str, Any] = {"path": theirs.get("hf_hub_url") or str(folder / theirs.get("file_name", name))}
    entry |= {ours: theirs[key] for key, ours in _LLAMAFACTORY_LOCATION.items() if theirs.get(key)}
    their_columns = theirs.get("columns", {})
    our_names = {"prompt": "text"} if is_text else _LLAMAFACTORY_COLUMNS
    columns = {our_names[key]: column for key, column in their_columns.items() if key in our_names}
    columns = {ours: column for ours, column in columns.items() if ours != column}
    known = ("hf_hub_url", "file_name", *_LLAMAFACTORY_LOCATION, "columns", "formatting", "ranking", "tags")
    _leave_out(f"dataset_info.{name}", theirs, known, left_out)
    if any(value not in _LLAMAFACTORY_TAGS.get(tag, ()) for tag, value in theirs.get("tags", {}).items()):
        left_out[f"dataset_info.{name}.tags"] = "messages must be {role, content} or {from, value} with the usual roles"
    if "prompt" in their_columns and "query" not in their_columns and not is_text:
        left_out[f"dataset_info.{name}.columns"] = (
            "query is not mapped, but a field named input is read if rows have it"
        )
    return entry | ({"columns": columns} if columns else {})


_AXOLOTL_FORMATS = {
    "alpaca": {"format": "alpaca"},
    "chat_template": {"format": "messages"},
    "sharegpt": {"format": "sharegpt"},
    "completion": {"format": "text"},
}
_AXOLOTL_LOCATION = ("path", "name", "data_files", "split")
_AXOLOTL_COLUMNS = {
    "field_messages": "messages", "field": "text", "field_chosen": "chosen", "field_rejected": "rejected",
}  # fmt: skip


def _from_axolotl(theirs: Mapping[str, Any], folder: Path, left_out: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for key, ours in (
        ("datasets", "datasets"),
        ("test_datasets", "eval_datasets"),
        ("pretraining_dataset", "datasets"),
    ):
        entries = [theirs[key]] if isinstance(theirs.get(key), str | Mapping) else theirs.get(key)
        if not entries:
            continue
        entries = [{"path": entry} if isinstance(entry, str) else entry for entry in entries]
        if key == "pretraining_dataset":
            entries = [_from_pretraining_entry(entry) for entry in entries]
        yield ours, [_axolotl_entry(entry, "rl" in theirs, left_out) for entry in entries]
        if key != "datasets" or not any(map(_is_text, entries)):
            continue
        if theirs.get("sample_packing") and all(map(_is_text, entries)):
            yield "packing_strategy", "bfd_split"
        else:
            left_out["datasets.type"] = (
                "Axolotl continues texts longer than sequence_len in further rows; set packing: true and packing_strategy: "
                "bfd_split to do the same"
            )


def _from_pretraining_entry(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an entry of ``pretraining_dataset`` to Axolotl's form of an entry of ``datasets``."""
    entry = {name: value for name, value in theirs.items() if name != "text_column"}
    return {"type": "completion", **entry, "field": theirs.get("text_column", "text")}


def _is_text(theirs: Mapping[str, Any]) -> bool:
    return _axolotl_type(theirs) == "completion"


def _axolotl_type(theirs: Mapping[str, Any]) -> str:
    return str(theirs.get("type", "")).partition(".")[0]


def _axolotl_entry(theirs: Mapping[str, Any], is_preference: bool, left_out: dict[str, str]) -> dict[str, Any]:
    entry = {key: theirs[key] for key in _AXOLOTL_LOCATION if theirs.get(key)}
    if theirs.get("train_on_split"):
        entry.setdefault("split", theirs["train_on_split"])
    row_type = _axolotl_type(theirs)
    entry |= {} if is_preference else _AXOLOTL_FORMATS.get(row_type, {})
    for key, ours in _AXOLOTL_COLUMNS.items():
        if theirs.get(key, ours) != ours:
            entry.setdefault("columns", {})[ours] = theirs[key]
    if entry.get("format") == "messages" and theirs.get("field_messages", "conversations") == "conversations":
        entry.pop("format")  # Axolotl's default field holds either format; ours is recognized by its fields
        entry.pop("columns", None)
    known = (*_AXOLOTL_LOCATION, "train_on_split", "type", "ds_type", *_AXOLOTL_COLUMNS)
    _leave_out("datasets", theirs, known, left_out)
    if row_type == "alpaca":
        left_out["datasets.type"] = (
            "rows are read as alpaca, but rendered with the model's chat template instead of ### Instruction"
        )
    if row_type and row_type not in _AXOLOTL_FORMATS:
        left_out["datasets.type"] = f"{row_type} is not a known format; the format is recognized by the fields"
    return entry


_UNSUPPORTED_IN_ENTRIES = {
    "num_samples": "use fraction", "shards": "use fraction", "ms_hub_url": "use path", "script_url": "use path",
    "roles_to_train": "use train_on", "train_on_eos": "the end of each turn is always trained on",
}  # fmt: skip


def _leave_out(where: str, theirs: Mapping[str, Any], known: Collection[str], left_out: dict[str, str]) -> None:
    """Add the unknown settings of an entry to ``left_out``."""
    for key in theirs:
        if key not in known and theirs[key] not in (None, False):
            left_out[f"{where}.{key}"] = _UNSUPPORTED_IN_ENTRIES.get(key, "unknown setting; see columns and format")
