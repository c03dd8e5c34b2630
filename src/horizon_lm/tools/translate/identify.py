"""Find out which trainer a file belongs to, and for which objective it is."""

import shlex
from collections.abc import Collection, Mapping
from typing import Any

from horizon_lm.errors import ConfigError
from horizon_lm.runs.config.foreign.tables import in_a_script, is_set, table_key, tables
from horizon_lm.runs.config.run import SCHEMAS, RunConfig


def reject_own_file(theirs: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError for a file that is in our format already."""
    schema = SCHEMAS.get(str(theirs.get("objective", "sft")), RunConfig)
    if {"datasets", "model_name_or_path"} <= theirs.keys() and all(name in schema.model_fields for name in theirs):
        raise ConfigError(
            f"{path}: this is already a run file of Horizon-LM; use it without translation. If it was written for TRL, which trains on "
            "all tokens of conversations without assistant_only_loss, add train_on: all"
        )


def find_table(theirs: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return the translation table of the trainer that a file belongs to: among tables whose required settings the file has, if any, the
    one with most of the settings that only its trainer has. Raise ConfigError for a file without any such setting.
    """

    def rank(table: Mapping[str, Any]) -> tuple[bool, int]:
        """Return whether the file has all settings that the trainer requires, and how many are specific to it."""
        has_required = all(key in theirs for key in table["required"])
        return has_required, sum(key in theirs for key in table["recognized_by"])

    if {"datasets", "model_name_or_path"} <= theirs.keys():  # TRL's names, and ours
        trl, *_ = tables()
        return trl
    recognized = [table for table in tables() if any(key in theirs for key in table["recognized_by"])]
    if not recognized:
        raise ConfigError(f"{path}: not a file of TRL, LLaMA-Factory or Axolotl: it has none of their settings")
    return max(recognized, key=rank)


def flatten(theirs: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return their settings with the entries of the groups in ``names`` as settings of their own, such as ``peft_config.r``."""
    flat: dict[str, Any] = {}
    for key, value in theirs.items():
        if key in names and isinstance(value, Mapping):
            flat |= {f"{key}.{name}": each for name, each in value.items() if each is not None}
        else:
            flat[key] = value
    return flat


def reject_export(theirs: Mapping[str, Any], table: Mapping[str, Any], path: str) -> None:
    """Raise ConfigError for a file without rows that merges adapters into a model, or exports it."""
    names = table.get("export", {})
    if names.get("out") not in theirs or any(is_set(theirs, name) for name in table["datasets"]):
        return
    adapters, out = theirs.get(names["adapters"], "ADAPTER"), theirs[names["out"]]
    base = theirs.get(table["required"][0], "MODEL")
    command = shlex.join(["horizon-lm", "merge", str(adapters), str(out), "--base", str(base)])
    raise ConfigError(
        f"{path}: {names['out']}: this file exports a model and trains nothing; to merge adapters, use {command}"
    )


def find_objective(theirs: Mapping[str, Any], table: Mapping[str, Any], asked: str | None, path: str) -> str:
    """Return the objective of a file. ``asked``: the user's choice, for files that do not name an objective; None without one."""
    method, place = _find_method(theirs, table, path)
    if method is not None and method not in SCHEMAS:
        raise ConfigError(
            f"{path}: {place}: this is a file of {method}, which is not a supported objective of run files{in_a_script(method)}"
        )
    if method is not None and asked not in (None, method):
        raise ConfigError(f"{path}: {place}: this is a file for objective: {method}, not {asked}")
    chosen = method or asked or table.get("assumed_objective")
    if chosen is None:
        raise ConfigError(
            f"{path}: the file does not say which command it is for ({table.get('commands', table['name'])}); write horizon-lm init sft --from FILE, or dpo. "
            "For KTO, ORPO, GRPO or a reward model, use horizon_lm.trainer(KTOTrainer) or the like in a script (docs/trainer.md)"
        )
    return str(chosen)


def _find_method(theirs: Mapping[str, Any], table: Mapping[str, Any], path: str) -> tuple[str | None, str]:
    """Return the method of a file, or None if the file names none, and the setting that names it, for messages."""
    method, place = None, ""
    for key, choices in table.get("method_of", {}).items():
        if method is None and is_set(theirs, key):
            value = theirs[key][0] if isinstance(theirs[key], list) else theirs[key]
            method, place = choices.get(table_key(value)), f"{key}: {value!r}"
            if method is None and key in ("stage", "rl"):
                raise ConfigError(f"{path}: {place} is not a supported objective; must be one of {', '.join(SCHEMAS)}")
    # A setting that only files of one method have decides if no method is named, or if its owner is a method without support here.
    for owner, names in table.get("methods", {}).items():
        name = next((each for each in names if each in theirs and theirs[each] != []), None)
        if name is not None and (method is None or owner not in SCHEMAS):
            method, place = owner, name
    return method, place
