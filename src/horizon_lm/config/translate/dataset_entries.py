"""Translate the datasets in files of TRL, LLaMA-Factory and Axolotl to entries of our ``datasets``."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from horizon_lm.config.translate.tables import LeftOut
from horizon_lm.config.yaml_file import read_yaml
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.paths import exists, require_regular

_MAX_JSON_CHARS = 2**24


def translate_datasets(
    trainer: str, theirs: Mapping[str, Any], folder: Path, left_out: LeftOut, objective: str
) -> dict[str, Any]:
    """Return our ``datasets``, ``eval_datasets`` and the settings that follow from them.

    Args:
        trainer: name of the other trainer.
        theirs: its settings.
        folder: folder of its file.
        left_out: receives what cannot be translated.
        objective: objective of the run.

    Raises:
        ConfigError: a file that lists datasets cannot be read.
        TypeError, AttributeError, LookupError, ValueError: a setting is not in the format of the trainer.
    """
    translate = {
        "TRL": _from_trl, "LLaMA-Factory": _from_llamafactory, "LLaMA-Factory (v1 layout)": _from_llamafactory_v1, "Axolotl": _from_axolotl,
    }[trainer]  # fmt: skip
    found = dict(translate(theirs, folder, left_out, objective))
    for entry in [*found.get("datasets", []), *found.get("eval_datasets", [])]:
        if (entry.get("format") == "preference") != (objective == "dpo") and "format" in entry:
            left_out.add("datasets", "rejected", f"{entry['path']} has rows for another objective than {objective}")
        if "split" in entry and exists(entry["path"]) and Path(entry["path"]).expanduser().is_file():
            split = entry.pop("split")
            if first := re.fullmatch(r"train\[:(\d+)\]", split):
                entry["max_samples"] = int(first[1])
            elif split != "train":
                left_out.add("datasets.split", "rejected", f"{split}: a file has no splits; all of its rows are read")
    return found


def read_json(path: Path) -> Any:
    """Return the content of a JSON file that a file of another trainer names.

    Raises:
        ConfigError: it cannot be read, is no JSON, or is larger than any such file.
    """
    require_regular(path)
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MAX_JSON_CHARS + 1)
        if len(text) > _MAX_JSON_CHARS:
            raise ConfigError(f"{path}: more than {_MAX_JSON_CHARS:,} characters")
        return json.loads(text)
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not valid JSON ({first_line(error)})") from error


def _reject_unknown(where: str, theirs: Mapping[str, Any], known: Collection[str], left_out: LeftOut) -> None:
    """Reject the unknown settings of an entry, since they may change its rows."""
    for key in theirs:
        if key not in known and theirs[key] not in (None, False):
            reason = next(
                (reason for names, reason in _REASONS.items() if key in names),
                "unknown setting, which may matter; remove it",
            )
            left_out.add(f"{where}.{key}", "rejected", reason)


_REASONS = {
    ("images", "videos", "audios"): "models with pictures, videos or sound are not supported",
    ("size",): "rows would be drawn with replacement; remove it, or set max_samples in our file",
    (
        "num_samples",
        "shards",
    ): "these rows would be drawn at random; remove it, or set max_samples or fraction in our file",
    ("roles_to_train", "train_on_eos", "train_on_eot"): "use train_on; the end of each answer is always trained on",
    ("kto_tag",): "use horizon_lm.trainer(KTOTrainer) in a script",
}


# TRL, alignment-handbook and open-r1


def _from_trl(theirs: Mapping[str, Any], folder: Path, left_out: LeftOut, objective: str) -> Iterator[tuple[str, Any]]:
    field = theirs.get("dataset_text_field", "text")
    mixture = theirs.get("dataset_mixture") or {}
    entries: list[dict[str, Any]] = []
    if mixture:
        _reject_unknown("dataset_mixture", mixture, ("datasets", "seed", "test_split_size"), left_out)
        entries = [_trl_entry(entry, field, left_out) for entry in mixture["datasets"]]
        yield from (
            (ours, mixture[key])
            for key, ours in (("test_split_size", "test_split_size"), ("seed", "data_seed"))
            if mixture.get(key) is not None
        )
    elif theirs.get("dataset_mixer"):
        entries, held_out = _from_mixer(theirs, left_out)
        if held_out:
            yield "eval_datasets", held_out
    elif theirs.get("dataset_name"):
        entry = {
            "path": theirs["dataset_name"],
            "name": theirs.get("dataset_config"),
            "split": theirs.get("dataset_train_split"),
        }
        entries = [_trl_entry({key: value for key, value in entry.items() if value}, field, left_out)]
        if theirs.get("eval_strategy", theirs.get("evaluation_strategy", "no")) not in ("no", False):
            yield "eval_datasets", [entries[0] | {"split": theirs.get("dataset_test_split", "test")}]
        if entries[0].get("split") == "train":
            del entries[0]["split"]
    elif theirs.get("datasets"):
        entries = [_trl_entry(entry, field, left_out) for entry in theirs["datasets"]]
    if entries:
        yield "datasets", entries
    formats = {"text" if "dataset_text_field" in theirs else entry.get("format") for entry in entries}
    if objective == "sft" and formats and formats <= {"messages", "sharegpt", "text"}:
        yield "train_on", "all"  # what TRL does unless assistant_only_loss is set
    if objective == "sft" and formats == {"prompt_completion"}:
        yield "train_on", "completion"


_TRL_LOCATION = {
    "path": "path",
    "id": "path",
    "name": "name",
    "config": "name",
    "data_dir": "data_dir",
    "data_files": "data_files",
    "split": "split",
}
_TRL_FORMATS = {
    "messages": "messages",
    "conversations": "sharegpt",
    "prompt": "prompt_completion",
    "chosen": "preference",
}


def _trl_entry(theirs: Mapping[str, Any], text_field: str, left_out: LeftOut) -> dict[str, Any]:
    entry = {ours: theirs[key] for key, ours in _TRL_LOCATION.items() if theirs.get(key)}
    kept = theirs.get("columns") or []  # the columns that TRL keeps decide the format of the rows
    row_format = next((name for column, name in reversed(_TRL_FORMATS.items()) if column in kept), None)
    if row_format is not None or text_field in kept:
        entry["format"] = row_format or "text"
    if text_field != "text" and row_format is None:
        entry["columns"] = {"text": text_field}
    weight = 1 if theirs.get("weight") is None else theirs["weight"]
    if not 0 < weight <= 1:
        left_out.add("dataset_mixture.weight", "rejected", f"{weight} is not a share of the rows between 0 and 1")
    elif weight < 1:
        entry["fraction"] = float(weight)
    _reject_unknown("datasets", theirs, (*_TRL_LOCATION, "columns", "weight"), left_out)
    return entry


def _from_mixer(theirs: Mapping[str, Any], left_out: LeftOut) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the training rows and eval sets of ``dataset_mixer``: shares of datasets, by path, in each of ``dataset_splits``."""
    splits, names = theirs.get("dataset_splits") or ["train", "test"], theirs.get("dataset_configs") or []
    entries, held_out = [], []
    for number, (path, share) in enumerate(theirs["dataset_mixer"].items()):
        place = {"path": path} | ({"name": names[number]} if names else {})
        percent = round(100 * share)
        if not (0 < percent <= 100 and abs(100 * share - percent) < 1e-9):
            left_out.add("dataset_mixer", "rejected", f"{path}: {share} is not a whole number of percent")
        first = "" if percent == 100 else f"[:{percent}%]"  # the first rows, which are also those that it selects
        entries += [place | {"split": f"{split}{first}"} for split in splits if "train" in split]
        held_out += [place | {"split": split} for split in splits if "test" in split]
    return entries, held_out


# LLaMA-Factory


def _from_llamafactory(
    theirs: Mapping[str, Any], folder: Path, left_out: LeftOut, objective: str
) -> Iterator[tuple[str, Any]]:
    data_dir = str(theirs.get("dataset_dir", "data"))
    data_folder, info = _read_dataset_info(folder, data_dir)
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
        if entries:
            yield ours, [entry | limit for entry in entries]


def _read_dataset_info(folder: Path, data_dir: str) -> tuple[Path, Mapping[str, Any]]:
    """Return LLaMA-Factory's list of datasets and its folder; the list is empty if it is not found."""
    places = (Path(data_dir), folder / data_dir, folder)  # the trainer itself looks from the current folder
    for place in places:
        if exists(str(place / "dataset_info.json")):
            return place, read_json(place / "dataset_info.json")
    return places[0], {}


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
    name: str, folder: Path, theirs: Mapping[str, Any], objective: str, left_out: LeftOut
) -> dict[str, Any]:
    """Translate an entry of ``dataset_info.json``."""
    where, is_text = f"dataset_info.{name}", objective == "pretrain"
    entry: dict[str, Any] = {"path": theirs.get("hf_hub_url") or str(folder / theirs.get("file_name", name))}
    entry |= {ours: theirs[key] for key, ours in _LLAMAFACTORY_LOCATION.items() if theirs.get(key)}
    their_columns = theirs.get("columns", {})
    our_names = {"prompt": "text"} if is_text else _LLAMAFACTORY_COLUMNS
    columns = {our_names[key]: column for key, column in their_columns.items() if key in our_names}
    columns = {ours: column for ours, column in columns.items() if ours != column}
    _reject_unknown(
        where,
        theirs,
        (
            "hf_hub_url",
            "ms_hub_url",
            "om_hub_url",
            "file_name",
            *_LLAMAFACTORY_LOCATION,
            "columns",
            "formatting",
            "ranking",
            "tags",
        ),
        left_out,
    )
    _reject_unknown(
        f"{where}.columns", their_columns, _LLAMAFACTORY_COLUMNS, left_out
    )  # images, videos, audios, kto_tag
    if any(value not in _LLAMAFACTORY_TAGS.get(tag, ()) for tag, value in theirs.get("tags", {}).items()):
        left_out.add(
            f"{where}.tags", "rejected", "messages must be {role, content} or {from, value} with the usual roles"
        )
    if bool(theirs.get("ranking")) != (objective == "dpo"):
        left_out.add(where, "rejected", f"it has rows for another objective than {objective}")
    if (
        their_columns
        and "query" not in their_columns
        and theirs.get("formatting", "alpaca") == "alpaca"
        and not is_text
    ):
        left_out.add(
            f"{where}.columns", "numbers", "query is not mapped, but a field named input is read if rows have it"
        )
    return entry | ({"columns": columns} if columns else {})


_V1_FORMATS = {"alpaca": "alpaca", "pair": "preference"}


def _from_llamafactory_v1(
    theirs: Mapping[str, Any], folder: Path, left_out: LeftOut, objective: str
) -> Iterator[tuple[str, Any]]:
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
            yield (
                ours,
                [_v1_entry(f"{key}.{name}", entry, left_out) for name, entry in read_yaml(str(place))[0].items()],
            )


def _v1_entry(where: str, theirs: Mapping[str, Any], left_out: LeftOut) -> dict[str, Any]:
    row_format = _V1_FORMATS.get(str(theirs.get("converter")))
    if row_format is None:
        left_out.add(
            f"{where}.converter",
            "rejected",
            "only alpaca and pair are supported; others train on each turn as a row of its own",
        )
    _reject_unknown(
        where, theirs, ("path", "source", "split", "converter"), left_out
    )  # size and weight draw with replacement
    return {"path": theirs["path"], "format": row_format} | (
        {"split": theirs["split"]} if theirs.get("split", "train") != "train" else {}
    )


# Axolotl


_AXOLOTL_FORMATS = {"alpaca": "alpaca", "chat_template": "messages", "sharegpt": "sharegpt", "completion": "text"}
_AXOLOTL_LOCATION = ("path", "name", "data_files", "split")
_AXOLOTL_KNOWN = (
    *_AXOLOTL_LOCATION, "train_on_split", "type", "ds_type", "field_messages", "field", "field_chosen", "field_rejected", "roles",
    "message_property_mappings", "message_field_role", "message_field_content",
)  # fmt: skip
_AXOLOTL_ROLES = {"system": {"system"}, "user": {"user", "human"}, "assistant": {"assistant", "gpt"}, "tool": {"tool"}}


def _from_axolotl(
    theirs: Mapping[str, Any], folder: Path, left_out: LeftOut, objective: str
) -> Iterator[tuple[str, Any]]:
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
        yield ours, [_axolotl_entry(entry, objective, left_out) for entry in entries]
        if theirs.get("sample_packing") and all(map(_is_text, entries)):
            yield "packing_strategy", "bfd_split"
        elif key == "datasets" and any(map(_is_text, entries)):
            reason = "Axolotl continues texts longer than sequence_len in further rows, as with sample_packing: true"
            left_out.add("datasets.type", "numbers", reason)


def _from_pretraining_entry(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Convert an entry of ``pretraining_dataset`` to Axolotl's form of an entry of ``datasets``."""
    entry = {name: value for name, value in theirs.items() if name not in ("text_column", "type")}
    return {**entry, "type": "completion", "field": theirs.get("text_column", "text")}


def _is_text(theirs: Mapping[str, Any]) -> bool:
    return theirs.get("type") == "completion"


def _axolotl_entry(theirs: Mapping[str, Any], objective: str, left_out: LeftOut) -> dict[str, Any]:
    entry = {key: theirs[key] for key in _AXOLOTL_LOCATION if theirs.get(key)}
    if theirs.get("train_on_split"):
        entry.setdefault("split", theirs["train_on_split"])
    row_type = theirs.get("type")
    columns = {"field": "text", "field_chosen": "chosen", "field_rejected": "rejected"}
    columns = {ours: theirs[key] for key, ours in columns.items() if theirs.get(key, ours) != ours}
    if objective == "dpo":
        columns["prompt"] = theirs.get("field_messages", "messages")
        if row_type not in ("chat_template", "chat_template.default"):
            left_out.add(
                "datasets.type", "rejected", f"{row_type!r}: only chat_template.default is supported for preferences"
            )
    elif row_type in ("chat_template", "sharegpt"):
        entry["format"] = _find_conversations(theirs, columns, left_out)
    elif str(row_type) in _AXOLOTL_FORMATS:
        entry["format"] = _AXOLOTL_FORMATS[str(row_type)]
    else:
        left_out.add(
            "datasets.type", "rejected", f"{row_type!r} is not supported; supported are {', '.join(_AXOLOTL_FORMATS)}"
        )
    if row_type == "alpaca":
        reason = (
            "rows are rendered with the model's chat template instead of ### Instruction; horizon-lm inspect shows them"
        )
        left_out.add("datasets.type", "numbers", reason)
    roles = theirs.get("roles") or {}
    if any(not {*names} <= _AXOLOTL_ROLES.get(role, {role}) for role, names in roles.items()):
        left_out.add("datasets.roles", "rejected", "messages must have the usual roles")
    keeps_thinking = (
        theirs.get("field_thinking") == theirs.get("template_thinking_key") in ("thinking", "reasoning_content")
    )
    thinking = ("field_thinking", "template_thinking_key") if keeps_thinking else ()  # our messages keep these fields
    _reject_unknown("datasets", theirs, (*_AXOLOTL_KNOWN, *thinking), left_out)
    entry = {key: value for key, value in entry.items() if value is not None}
    return entry | ({"columns": columns} if columns else {})


def _find_conversations(theirs: Mapping[str, Any], columns: dict[str, str], left_out: LeftOut) -> str | None:
    """Return the format of an entry with conversations, and add its column; None if the rows decide."""
    names = theirs.get("message_property_mappings") or {}
    found = (
        names.get("role", theirs.get("message_field_role")),
        names.get("content", theirs.get("message_field_content")),
    )
    column = theirs.get("field_messages", "conversations" if theirs.get("type") == "sharegpt" else "messages")
    if found == (None, None) and column == "conversations":
        return None  # ours is recognized by its fields
    formats = {("from", "value"): "sharegpt", ("role", "content"): "messages", (None, None): "messages"}
    if found not in formats or names.keys() - {"role", "content"}:
        left_out.add(
            "datasets.message_property_mappings", "rejected", "messages must be {role, content} or {from, value}"
        )
        return None
    expected = "conversations" if formats[found] == "sharegpt" else "messages"
    if column != expected:
        columns[expected] = column
    return formats[found]
