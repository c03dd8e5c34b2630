"""Where the rows of TRL's, LLaMA-Factory's and Axolotl's files are, as entries of our ``datasets``."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from horizon_lm.errors import ConfigError

OF_ROWS = {
    "TRL": (
        "dataset_name", "dataset_config", "dataset_train_split", "dataset_test_split", "datasets", "dataset_text_field",
    ),
    "LLaMA-Factory": ("dataset", "eval_dataset"),
    "Axolotl": ("datasets", "test_datasets"),
}  # fmt: skip


def translate_rows(
    trainer: str, theirs: Mapping[str, Any], folder: Path, left_out: dict[str, str]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Our ``datasets`` and ``eval_datasets``; ``left_out`` gains what has no place in them.

    Raises:
        ConfigError: a list of data sets cannot be read.
        TypeError, AttributeError, KeyError, ValueError: a setting is not as the trainer has it.
    """
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


_AXOLOTL_TYPES = {
    "alpaca": {"format": "alpaca"},
    "chat_template": {"format": "messages"},
    "sharegpt": {"format": "sharegpt"},
    "completion": {"format": "text"},
}
_AXOLOTL_PLACE = ("path", "name", "data_files", "split")
_AXOLOTL_COLUMNS = {
    "field_messages": "messages", "field": "text", "field_chosen": "chosen", "field_rejected": "rejected",
}  # fmt: skip


def _of_axolotl(said: Mapping[str, Any], left_out: dict[str, str]) -> dict[str, Any]:
    entry = {key: said[key] for key in _AXOLOTL_PLACE if said.get(key)}
    kind = str(said.get("type", "")).partition(".")[0]
    entry |= _AXOLOTL_TYPES.get(kind, {})
    for theirs, ours in _AXOLOTL_COLUMNS.items():
        if said.get(theirs, ours) != ours:
            entry.setdefault("columns", {})[ours] = said[theirs]
    if entry.get("format") == "messages" and said.get("field_messages", "conversations") == "conversations":
        entry.pop("format")  # told by its fields
        entry.pop("columns", None)
    for key in said:
        if key not in (*_AXOLOTL_PLACE, "type", "ds_type", *_AXOLOTL_COLUMNS):
            left_out[f"datasets.{key}"] = "rows are read as their fields say; see columns and format"
    if kind == "alpaca":
        left_out["datasets.type"] = (
            "rows are read as alpaca, but the model's chat template writes them, not ### Instruction"
        )
    if kind and kind not in _AXOLOTL_TYPES:
        left_out["datasets.type"] = f"{kind} is not a form here; the fields of the rows decide"
    return entry
