"""Where the rows of TRL's, LLaMA-Factory's and Axolotl's files are, as entries of our ``datasets``."""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from horizon_lm.errors import ConfigError

OF_ROWS = {
    "TRL": (
        "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "datasets", "dataset_text_field",
    ),
    "LLaMA-Factory": ("dataset", "eval_dataset"),
    "Axolotl": ("datasets", "test_datasets", "pretraining_dataset"),
}  # fmt: skip


def translate_rows(trainer: str, theirs: Mapping[str, Any], folder: Path, left_out: dict[str, str]) -> dict[str, Any]:
    """Our ``datasets``, ``eval_datasets`` and what follows from them; ``left_out`` gains what has no place in them.

    Raises:
        ConfigError: a list of data sets cannot be read.
        TypeError, AttributeError, KeyError, ValueError: a setting is not as the trainer has it.
    """
    translated = {"TRL": _from_trl, "LLaMA-Factory": _from_llamafactory, "Axolotl": _from_axolotl}
    found = dict(translated[trainer](theirs, folder, left_out))
    for entry in [*found.get("datasets", []), *found.get("eval_datasets", [])]:
        if "split" in entry and Path(entry["path"]).expanduser().is_file() and entry.pop("split") != "train":
            left_out["datasets.split"] = "a file has no splits: all of its rows are read"
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
        yield "datasets", [_of_trl(entry, field, left_out) for entry in theirs["datasets"]]


_TRL_PLACE = ("path", "name", "data_dir", "data_files", "split")
_TRL_FORMS = {
    "messages": "messages",
    "conversations": "sharegpt",
    "prompt": "prompt_completion",
    "chosen": "preference",
}


def _of_trl(said: Mapping[str, Any], field: str, left_out: dict[str, str]) -> dict[str, Any]:
    """An entry of a mixture: its ``columns`` are those that are kept, and so decide the form of its rows."""
    entry = {key: said[key] for key in _TRL_PLACE if said.get(key)}
    kept = said.get("columns") or []
    form = next((form for column, form in reversed(_TRL_FORMS.items()) if column in kept), None)
    if form is not None or field in kept:
        entry["format"] = form or "text"
    if field != "text" and form is None:
        entry["columns"] = {"text": field}
    _leave_out("datasets", said, (*_TRL_PLACE, "columns"), left_out)
    return entry


def _from_llamafactory(theirs: Mapping[str, Any], folder: Path, left_out: dict[str, str]) -> Iterator[tuple[str, Any]]:
    place, info = _dataset_info(folder, theirs.get("dataset_dir", "data"))
    for key, ours in (("dataset", "datasets"), ("eval_dataset", "eval_datasets")):
        names = theirs.get(key) or []
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        of_texts = theirs.get("stage") == "pt"
        entries = [
            _of_llamafactory(name, place, info[name], of_texts, left_out) if name in info else {"path": name}
            for name in names
        ]
        if entries:
            yield ours, entries
        if unknown := [name for name in names if name not in info]:
            left_out[key] = f"{', '.join(unknown)}: not found in a dataset_info.json; write their paths in {ours}"


def _from_axolotl(theirs: Mapping[str, Any], folder: Path, left_out: dict[str, str]) -> Iterator[tuple[str, Any]]:
    for key, ours in (
        ("datasets", "datasets"),
        ("test_datasets", "eval_datasets"),
        ("pretraining_dataset", "datasets"),
    ):
        entries = [theirs[key]] if isinstance(theirs.get(key), str | Mapping) else theirs.get(key)
        if entries:
            said = [{"path": entry} if isinstance(entry, str) else entry for entry in entries]
            if key == "pretraining_dataset":
                said = [_of_texts(entry) for entry in said]
            yield ours, [_of_axolotl(entry, "rl" in theirs, left_out) for entry in said]
            if key != "datasets" or not any(map(_is_text, said)):
                continue
            if theirs.get("sample_packing") and all(map(_is_text, said)):
                yield "packing_strategy", "bfd_split"
            else:
                left_out["datasets.type"] = (
                    "texts that are longer than sequence_len go on in further rows there; here they do with packing: true and "
                    "packing_strategy: bfd_split"
                )


def _of_texts(said: Mapping[str, Any]) -> dict[str, Any]:
    """An entry of ``pretraining_dataset`` in the words of ``datasets``."""
    entry = {name: value for name, value in said.items() if name != "text_column"}
    return {"type": "completion", **entry, "field": said.get("text_column", "text")}


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


_LLAMAFACTORY_PLACE = {"subset": "name", "split": "split", "folder": "data_dir"}
_LLAMAFACTORY_TAGS = {
    "role_tag": ("from", "role"), "content_tag": ("value", "content"), "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"), "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",), "system_tag": ("system",),
}  # fmt: skip


def _of_llamafactory(
    name: str, folder: Path, said: Mapping[str, Any], of_texts: bool, left_out: dict[str, str]
) -> dict[str, Any]:
    """An entry of ``dataset_info.json``."""
    entry: dict[str, Any] = {"path": said.get("hf_hub_url") or str(folder / said.get("file_name", name))}
    entry |= {ours: said[theirs] for theirs, ours in _LLAMAFACTORY_PLACE.items() if said.get(theirs)}
    named = said.get("columns", {})
    ours_of = {"prompt": "text"} if of_texts else _LLAMAFACTORY_COLUMNS
    columns = {ours_of[theirs]: column for theirs, column in named.items() if theirs in ours_of}
    columns = {ours: column for ours, column in columns.items() if ours != column}
    known = ("hf_hub_url", "file_name", *_LLAMAFACTORY_PLACE, "columns", "formatting", "ranking", "tags")
    _leave_out(f"dataset_info.{name}", said, known, left_out)
    if any(value not in _LLAMAFACTORY_TAGS.get(tag, ()) for tag, value in said.get("tags", {}).items()):
        left_out[f"dataset_info.{name}.tags"] = "messages are {role, content} or {from, value}, with the usual roles"
    if "prompt" in named and "query" not in named and not of_texts:
        left_out[f"dataset_info.{name}.columns"] = "query is not in it; here a field input is read where rows have it"
    return entry | ({"columns": columns} if columns else {})


def _leave_out(where: str, said: Mapping[str, Any], read: Collection[str], left_out: dict[str, str]) -> None:
    for key in said:
        if key not in read and said[key] not in (None, False):
            left_out[f"{where}.{key}"] = _GONE_OF_ROWS.get(key, "it is not known here; see columns and format")


_GONE_OF_ROWS = {
    "num_samples": "use fraction", "shards": "use fraction", "ms_hub_url": "use path", "script_url": "use path",
    "roles_to_train": "use train_on", "train_on_eos": "the end of each turn is always trained on",
}  # fmt: skip


_AXOLOTL_TYPES = {
    "alpaca": {"format": "alpaca"},
    "chat_template": {"format": "messages"},
    "sharegpt": {"format": "sharegpt"},
    "completion": {"format": "text"},
}
_AXOLOTL_PLACE = ("path", "name", "data_files", "split")


def _is_text(said: Mapping[str, Any]) -> bool:
    return str(said.get("type", "")).partition(".")[0] == "completion"


_AXOLOTL_COLUMNS = {
    "field_messages": "messages", "field": "text", "field_chosen": "chosen", "field_rejected": "rejected",
}  # fmt: skip


def _of_axolotl(said: Mapping[str, Any], of_preferences: bool, left_out: dict[str, str]) -> dict[str, Any]:
    entry = {key: said[key] for key in _AXOLOTL_PLACE if said.get(key)}
    if said.get("train_on_split"):
        entry.setdefault("split", said["train_on_split"])
    kind = str(said.get("type", "")).partition(".")[0]
    entry |= {} if of_preferences else _AXOLOTL_TYPES.get(kind, {})
    for theirs, ours in _AXOLOTL_COLUMNS.items():
        if said.get(theirs, ours) != ours:
            entry.setdefault("columns", {})[ours] = said[theirs]
    if entry.get("format") == "messages" and said.get("field_messages", "conversations") == "conversations":
        entry.pop("format")  # told by its fields
        entry.pop("columns", None)
    _leave_out("datasets", said, (*_AXOLOTL_PLACE, "train_on_split", "type", "ds_type", *_AXOLOTL_COLUMNS), left_out)
    if kind == "alpaca":
        left_out["datasets.type"] = (
            "rows are read as alpaca, but the model's chat template writes them, not ### Instruction"
        )
    if kind and kind not in _AXOLOTL_TYPES:
        left_out["datasets.type"] = f"{kind} is not a form here; the fields of the rows decide"
    return entry
