"""Translate the datasets in files of LLaMA-Factory, in both of its layouts."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from horizon_lm.common.paths import exists, require_regular
from horizon_lm.runs.config.foreign.tables import LeftOut, read_json
from horizon_lm.runs.config.yaml_file import read_yaml


def from_llamafactory(
    theirs: Mapping[str, Any], folder: Path, left_out: LeftOut, objective: str
) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of our settings for the datasets in a file of LLaMA-Factory; add what is left out to ``left_out``."""
    data_dir = str(theirs.get("dataset_dir", "data"))
    data_folder, info = _read_dataset_info(folder, data_dir)
    if objective == "dpo" and theirs.get("adapter_name_or_path"):
        reason = "LLaMA-Factory's reference is the base without these adapters; here it is the model that the run starts from, with them"
        left_out.add("adapter_name_or_path", "numbers", reason)
    has_images = False
    limit = {"max_samples": theirs["max_samples"]} if theirs.get("max_samples") else {}
    for key, ours in (("dataset", "datasets"), ("eval_dataset", "eval_datasets")):
        names = theirs.get(key) or []
        names = [name.strip() for name in names.split(",")] if isinstance(names, str) else names
        if data_dir == "ONLINE":
            entries = [{"path": name} for name in names]
        elif unknown := [name for name in names if name not in info]:
            reason = f"{', '.join(unknown)}: not in {data_folder / 'dataset_info.json'}; set dataset_dir to the folder that has it"
            left_out.add(key, "rejected", reason)
            continue
        else:
            entries = [_llamafactory_entry(name, data_folder, info[name], objective, left_out) for name in names]
            has_images |= any("images" in info[name].get("columns", {}) for name in names)
        if entries:
            yield ours, [entry | limit for entry in entries]
    if has_images:
        yield from ((name, value) for name, value in _LLAMAFACTORY_PIXELS.items() if theirs.get(name) is None)


def _read_dataset_info(folder: Path, data_dir: str) -> tuple[Path, Mapping[str, Any]]:
    """Return the folder of LLaMA-Factory's ``dataset_info.json`` and its content; without such a file, the first place and no content."""
    places = (Path(data_dir), folder / data_dir, folder)  # the current folder first, as the trainer does
    for place in places:
        if exists(str(place / "dataset_info.json")):
            return place, read_json(place / "dataset_info.json")
    return places[0], {}


_LLAMAFACTORY_COLUMNS = {
    "prompt": "instruction", "query": "input", "response": "output", "messages": "conversations", "system": "system",
    "tools": "tools", "history": "history", "chosen": "chosen", "rejected": "rejected",
    "images": "images",
}  # fmt: skip
_LLAMAFACTORY_TEXT_COLUMNS = {"prompt": "text", "images": "images"}  # of rows to pretrain on
_LLAMAFACTORY_PIXELS = {"image_max_pixels": 768 * 768, "image_min_pixels": 32 * 32}  # its defaults
_LLAMAFACTORY_LOCATION = {"subset": "name", "split": "split", "folder": "data_dir"}
_LLAMAFACTORY_KNOWN = (
    *_LLAMAFACTORY_LOCATION, "hf_hub_url", "ms_hub_url", "om_hub_url", "file_name", "columns", "formatting", "ranking", "tags",
)  # fmt: skip
_LLAMAFACTORY_TAGS = {
    "role_tag": ("from", "role"), "content_tag": ("value", "content"), "user_tag": ("human", "user"),
    "assistant_tag": ("gpt", "assistant"), "observation_tag": ("observation", "tool"),
    "function_tag": ("function_call",), "system_tag": ("system",),
}  # fmt: skip


def _llamafactory_entry(
    name: str, folder: Path, theirs: Mapping[str, Any], objective: str, left_out: LeftOut
) -> dict[str, Any]:
    """Return our entry of ``datasets`` for an entry of ``dataset_info.json``, and add what is not translated to ``left_out``.

    ``name``: the name of their entry. ``folder``: the folder of ``dataset_info.json``, to which its files are relative.
    """
    where, is_text = f"dataset_info.{name}", objective == "pretrain"
    entry: dict[str, Any] = {"path": theirs.get("hf_hub_url") or str(folder / theirs.get("file_name", name))}
    entry |= {ours: theirs[key] for key, ours in _LLAMAFACTORY_LOCATION.items() if theirs.get(key)}
    their_columns = theirs.get("columns", {})
    our_names = _LLAMAFACTORY_TEXT_COLUMNS if is_text else _LLAMAFACTORY_COLUMNS
    columns = {our_names[key]: column for key, column in their_columns.items() if key in our_names}
    columns = {ours: column for ours, column in columns.items() if ours != column}
    left_out.reject_unknown(where, theirs, _LLAMAFACTORY_KNOWN)
    if "images" in their_columns and len(Path(str(theirs.get("file_name", ""))).parts) > 1:
        reason = (
            "paths of images are relative to the file here, and to dataset_dir in LLaMA-Factory; move the file there"
        )
        left_out.add(f"{where}.file_name", "rejected", reason)
    left_out.reject_unknown(f"{where}.columns", their_columns, _LLAMAFACTORY_COLUMNS)  # videos, audios, kto_tag
    if any(value not in _LLAMAFACTORY_TAGS.get(tag, ()) for tag, value in theirs.get("tags", {}).items()):
        left_out.add(
            f"{where}.tags", "rejected", "messages must be {role, content} or {from, value} with the usual roles"
        )
    if bool(theirs.get("ranking")) != (objective == "dpo"):
        left_out.add(where, "rejected", f"it has rows for another objective than {objective}")
    is_alpaca = theirs.get("formatting", "alpaca") == "alpaca" and not is_text
    if is_alpaca and their_columns and "query" not in their_columns:
        reason = "query is not mapped, but a field named input is read if rows have it"
        left_out.add(f"{where}.columns", "numbers", reason)
    return entry | ({"columns": columns} if columns else {})


_V1_FORMATS = {"alpaca": "alpaca", "pair": "preference"}


def from_v1(theirs: Mapping[str, Any], folder: Path, left_out: LeftOut, objective: str) -> Iterator[tuple[str, Any]]:
    """Yield our settings, as `from_llamafactory` does, for a file of LLaMA-Factory v1, which names YAML files of datasets."""
    for key, ours in (("train_dataset", "datasets"), ("eval_dataset", "eval_datasets")):
        if not theirs.get(key):
            continue
        place = next((each for each in (Path(theirs[key]), folder / theirs[key]) if exists(str(each))), None)
        if not str(theirs[key]).endswith((".yaml", ".yml")):
            left_out.add(key, "rejected", "name a YAML file that says the converter of each dataset")
        elif place is None:
            left_out.add(key, "rejected", f"{theirs[key]}: no such file")
        else:
            require_regular(place)
            entries, _ = read_yaml(str(place))
            yield ours, [_v1_entry(f"{key}.{name}", entry, left_out) for name, entry in entries.items()]


def _v1_entry(where: str, theirs: Mapping[str, Any], left_out: LeftOut) -> dict[str, Any]:
    """Return our entry of ``datasets`` for an entry of v1's YAML file of datasets. ``where``: its name in messages."""
    row_format = _V1_FORMATS.get(str(theirs.get("converter")))
    if row_format is None:
        reason = "only alpaca and pair are supported; others train on each turn as a row of its own"
        left_out.add(f"{where}.converter", "rejected", reason)
    # Not size and weight, with which v1 draws rows with replacement.
    left_out.reject_unknown(where, theirs, ("path", "source", "split", "converter"))
    split = {"split": theirs["split"]} if theirs.get("split", "train") != "train" else {}
    return {"path": theirs["path"], "format": row_format} | split
