"""Translate the datasets in files of TRL, alignment-handbook and open-r1."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from horizon_lm.runs.config.foreign.tables import LeftOut


def from_trl(theirs: Mapping[str, Any], folder: Path, left_out: LeftOut, objective: str) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of our settings for the datasets in a file of TRL, and add what is not translated to ``left_out``."""
    text_field = theirs.get("dataset_text_field", "text")
    mixture = theirs.get("dataset_mixture") or {}
    entries: list[dict[str, Any]] = []
    if mixture:
        left_out.reject_unknown("dataset_mixture", mixture, ("datasets", "seed", "test_split_size"))
        entries = [_trl_entry(entry, text_field, left_out) for entry in mixture["datasets"]]
        for key, ours in (("test_split_size", "test_split_size"), ("seed", "data_seed")):
            if mixture.get(key) is not None:
                yield ours, mixture[key]
    elif theirs.get("dataset_mixer"):  # of alignment-handbook
        entries, held_out = _from_mixer(theirs, left_out)
        if held_out:
            yield "eval_datasets", held_out
    elif theirs.get("dataset_name"):
        names = {"path": "dataset_name", "name": "dataset_config", "split": "dataset_train_split"}
        entries = [_trl_entry({ours: theirs.get(key) for ours, key in names.items()}, text_field, left_out)]
        if theirs.get("eval_strategy", theirs.get("evaluation_strategy", "no")) not in ("no", False):
            yield "eval_datasets", [entries[0] | {"split": theirs.get("dataset_test_split", "test")}]
        if entries[0].get("split") == "train":
            del entries[0]["split"]
    elif theirs.get("datasets"):
        entries = [_trl_entry(entry, text_field, left_out) for entry in theirs["datasets"]]
    if entries:
        yield "datasets", entries
    formats = {"text" if "dataset_text_field" in theirs else entry.get("format") for entry in entries}
    if objective == "sft" and formats and formats <= {"messages", "sharegpt", "text"}:
        yield "train_on", "all"  # what TRL does unless assistant_only_loss is set
    if objective == "sft" and formats == {"prompt_completion"}:
        yield "train_on", "completion"


_TRL_LOCATION = {
    "path": "path", "id": "path", "name": "name", "config": "name", "data_dir": "data_dir", "data_files": "data_files", "split": "split",
}  # fmt: skip
_TRL_FORMATS = {  # by column; rows of preferences may have prompts, and others the messages they were made from
    "chosen": "preference", "prompt": "prompt_completion", "conversations": "sharegpt", "messages": "messages",
}  # fmt: skip


def _trl_entry(theirs: Mapping[str, Any], text_field: str, left_out: LeftOut) -> dict[str, Any]:
    """Return our entry of ``datasets`` for an entry of TRL's, whose texts are in ``text_field``; add what is left out to ``left_out``."""
    entry = {ours: theirs[key] for key, ours in _TRL_LOCATION.items() if theirs.get(key)}
    kept = theirs.get("columns") or []  # the columns that TRL keeps decide the format of the rows
    row_format = next((name for column, name in _TRL_FORMATS.items() if column in kept), None)
    if row_format is not None or text_field in kept:
        entry["format"] = row_format or "text"
    if text_field != "text" and row_format is None:
        entry["columns"] = {"text": text_field}
    weight = 1 if theirs.get("weight") is None else theirs["weight"]
    if not 0 < weight <= 1:
        left_out.add("dataset_mixture.weight", "rejected", f"{weight} is not a share of the rows between 0 and 1")
    elif weight < 1:
        entry["fraction"] = float(weight)
    left_out.reject_unknown("datasets", theirs, (*_TRL_LOCATION, "columns", "weight"))
    return entry


def _from_mixer(theirs: Mapping[str, Any], left_out: LeftOut) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return our entries of ``datasets`` and of ``eval_datasets`` for ``dataset_mixer``, which gives a share of the rows by dataset."""
    splits, names = theirs.get("dataset_splits") or ["train", "test"], theirs.get("dataset_configs") or []
    entries, held_out = [], []
    for number, (path, share) in enumerate(theirs["dataset_mixer"].items()):
        place = {"path": path} | ({"name": names[number]} if names else {})
        percent = round(100 * share)
        if not (0 < percent <= 100 and abs(100 * share - percent) < 1e-9):
            left_out.add("dataset_mixer", "rejected", f"{path}: {share} is not a whole number of percent")
        first_rows = "" if percent == 100 else f"[:{percent}%]"  # which alignment-handbook selects, too
        entries += [place | {"split": f"{split}{first_rows}"} for split in splits if "train" in split]
        held_out += [place | {"split": split} for split in splits if "test" in split]
    return entries, held_out
