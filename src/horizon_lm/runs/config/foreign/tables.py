"""Read the translation tables: what each setting of another trainer becomes, or what leaving it out would change."""

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from horizon_lm.common.optimizers import OPTIMIZERS
from horizon_lm.common.paths import require_regular
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.runs.config.run import SCHEMAS

_MAX_JSON_CHARS = 2**24
EFFECTS = ("nothing", "numbers", "rejected")


@dataclass
class LeftOut:
    """Settings that were not translated, by name, with the reason, sorted by the effect of leaving them out.

    Attributes:
        nothing: the training is the same, up to the rounding of its arithmetic.
        numbers: the training is another one in a detail that the user may accept.
        rejected: objective, method, data, optimizer or the trained weights would change.
    """

    nothing: dict[str, str] = field(default_factory=dict)
    numbers: dict[str, str] = field(default_factory=dict)
    rejected: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, effect: str, reason: str) -> None:
        """Add a setting with one of `EFFECTS`, unless it has a reason already; other text in place of an effect raises AttributeError."""
        getattr(self, effect).setdefault(name, reason)

    def reject_unknown(self, where: str, theirs: Mapping[str, Any], known: Collection[str]) -> None:
        """Reject unknown settings of an entry of datasets that are on: they may change its rows. ``where``: the entry, for messages."""
        for key in theirs:
            if key not in known and theirs[key] not in (None, False, *_SAME_AS_OURS.get(key, ())):
                reason = _OF_ENTRIES.get(key, "unknown setting, which may matter; remove it")
                self.add(f"{where}.{key}", "rejected", reason)


# Values of settings of Axolotl by which it trains on the tokens that we train on: its defaults.
_SAME_AS_OURS = {
    "roles_to_train": (["assistant"], ["gpt", "assistant"]),
    "train_on_eos": ("turn",),
    "train_on_eot": ("turn",),
    "chat_template": ("tokenizer_default",),
}
_DRAWN = "these rows would be drawn at random; remove it, or set max_samples or fraction in our file"
_ALL_ANSWERS = "all answers of the assistant are trained on, each with its end; remove it, or set train_on in our file"
_OF_TURNS = ("message_field_training", "message_field_training_detail")
_OF_ENTRIES = {
    "chat_template": "the model's own chat template is used; chat_template_path sets another for all rows",
    "chat_template_jinja": "write the template into a Jinja file, and set chat_template_path to it in our file",
    "conversation": "the model's own chat template is used; chat_template_path sets another",
    "drop_system_message": "remove the system messages from the rows",
    "revision": "download this revision, and set path to its folder",
    **dict.fromkeys(("videos", "audios"), "only text and images are supported; leave these rows out"),
    **dict.fromkeys(("num_samples", "shards"), _DRAWN),
    **dict.fromkeys(("roles_to_train", "train_on_eos", "train_on_eot", *_OF_TURNS), _ALL_ANSWERS),
    "size": "rows would be drawn with replacement; remove it, or set max_samples in our file",
    "kto_tag": "use horizon_lm.trainer(KTOTrainer) in a script",
}


_TRAINERS = {  # of TRL, by method
    "KTO": "KTOTrainer", "ORPO": "ORPOTrainer", "GRPO": "GRPOTrainer", "RLOO": "RLOOTrainer", "reward": "RewardTrainer",
    "CPO": "CPOTrainer", "PRM": "PRMTrainer", "GKD": "GKDTrainer", "online DPO": "OnlineDPOTrainer",
}  # fmt: skip


def in_a_script(method: str) -> str:
    """Return the remedy for a method that run files do not have: its trainer in a script; empty if there is none."""
    trainer = _TRAINERS.get(method)
    return f"; use horizon_lm.trainer({trainer}) in a script (docs/trainer.md)" if trainer else ""


@cache
def _read_table(name: str) -> Mapping[str, Any]:
    """Return one of the tables beside this file."""
    text = (files("horizon_lm.runs.config.foreign") / f"{name}.yaml").read_text(encoding="utf-8")
    return YAML(typ="safe", pure=True).load(text)  # type: ignore[no-any-return]


def tables() -> list[Mapping[str, Any]]:
    """Return the translation table of each trainer, whose keys are:

    - ``name``, ``commands``: the trainer and its commands, for messages. ``required``, ``recognized_by``: settings by which its files
      are found. ``export``: settings of a file that only merges adapters.
    - ``flatten``: groups of settings. ``assumed``, ``assumed_objective``: what a file means that does not say it.
    - ``method_of``: the method by the value of a setting. ``methods``: settings that only files of one method have.
    - ``datasets``: settings of data. ``row_types``: formats of rows.
    - ``rename``: our name of a setting. ``values``: outcomes by value (`Translation._outcome`). ``same_values``: another setting whose
      outcomes apply. ``lists``: texts with commas that are lists. ``parts``: entries of lists without effect.
    - ``only_for``: the only objective that uses a setting. ``precedence``, ``zero_takes_precedence``: see `Translation._drop_ineffective`.
    - ``defaults``, ``defaults_with``, ``twice``: see `Translation._add_defaults`. ``differences``, ``needs_adapters``: see
      `Translation._note_differences` and `Translation._reject_without_adapters`.
    - ``nothing``, ``numbers``, ``rejected``: settings by the reason, under the effect of leaving them out (`LeftOut`).
    """
    return [_read_table(name) for name in ("trl", "llamafactory", "llamafactory_v1", "axolotl")]


@cache
def common() -> Mapping[str, Any]:
    """Return the table that all trainers share."""
    table = _read_table("common")
    optimizers = {
        **_optimizer_settings(),
        "any": f"rejected: this optimizer is not supported; remove it to train with AdamW, or use one of {', '.join(OPTIMIZERS)} in our file",
    }
    return {**table, "values": {**table["values"], "optim": optimizers}}


def _optimizer_settings() -> dict[str, Any]:
    """Return our settings for each name of an optimizer in transformers, as far as they differ from our defaults."""
    defaults = SCHEMAS["sft"].model_fields
    settings_of_name = {
        theirs: {"optim": ours, "moments": moments}
        for ours, optimizer in OPTIMIZERS.items()
        if optimizer.aliases  # one that transformers lacks stands in the tables of the trainers that have it
        for theirs, moments in {ours: "float32", **optimizer.aliases}.items()
    }
    return {
        theirs: {name: value for name, value in settings.items() if value != defaults[name].default}
        for theirs, settings in settings_of_name.items()
    }


def effect_of(name: str, table: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the effect of leaving out a setting, one of `EFFECTS`, and the reason; None for a setting that no table has."""
    for each in (table, common()):
        for effect in EFFECTS:
            for reason, names in each.get(effect, {}).items():
                if name in names:
                    return effect, reason
    return None


def our_name(theirs: str) -> str | None:
    """Return our name for another trainer's setting, or None if no table renames it."""
    return next((table["rename"][theirs] for table in tables() if theirs in table["rename"]), None)


@cache
def remedies() -> dict[str, str]:
    """Return the remedy for each setting of other trainers that is no setting here, not even by another name.

    Tables that are read later replace earlier remedies: the common table counts more than a trainer's, and its hints count most.
    """
    ours = {name for schema in SCHEMAS.values() for name in schema.model_fields}
    found = dict(_OF_ENTRIES)
    for table in (*tables()[::-1], common()):
        found |= {
            name: remedy for name, remedy in _remedies_of_table(table) if our_name(name) is None and name not in ours
        }
    return found | {name: hint for hint, names in common()["hints"].items() for name in names}


def _remedies_of_table(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each setting that a table names, with its remedy: to remove it for a reason, or settings to use instead."""
    for key, outcomes in table.get("values", {}).items():
        # One outcome makes the remedy: the one of true, else the first that is settings to use instead, else the last reason.
        settings = [each for each in outcomes.values() if isinstance(each, Mapping)]
        texts = [each for each in outcomes.values() if isinstance(each, str)]
        outcome: Any = next(filter(None, [outcomes.get(True), *settings, *reversed(texts)]), {})
        if isinstance(outcome, str):
            yield key, f"{outcome.partition(': ')[2]}; remove it"
        elif outcome:
            yield key, "use " + " and ".join(f"{name}: {_yaml_value(value)}" for name, value in outcome.items())
    for effect in EFFECTS:
        for reason, names in table.get(effect, {}).items():
            yield from ((name, f"{reason}; remove it") for name in names)
    for method, names in table.get("methods", {}).items():
        if method not in SCHEMAS:
            yield from ((name, f"it is for {method}{in_a_script(method)}") for name in names)


def _yaml_value(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def foreign_trainer(settings: Mapping[str, Any]) -> str | None:
    """Return the name of the trainer that a file belongs to beyond doubt; None for a run file of ours, also one with mistakes."""
    for table in tables():
        # A setting that our run files have, and files of this trainer lack.
        only_ours = "datasets" if "model_name_or_path" in table["required"] else "model_name_or_path"
        has_required = all(name in settings for name in table["required"])
        has_marks = any(name in settings for name in table["recognized_by"])
        if has_required and has_marks and only_ours not in settings and "objective" not in settings:
            return str(table["name"])
    return None


# Files and values of other trainers


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


def is_on(value: Any) -> bool:
    """Return whether a value, parsed leniently, is other than false, zero, or an empty text, list or mapping."""
    return parse_text(value) not in (False, "", [], {})


def is_set(theirs: Mapping[str, Any], key: str) -> bool:
    """Return whether a setting is in a file, and on."""
    return key in theirs and is_on(theirs[key])


def table_key(value: Any) -> Any:
    """Return a value in the form used as a key of a table."""
    return value if isinstance(value, bool | str) else str(value)


def parse_text(value: Any) -> Any:
    """Return the number or truth value that a text stands for in YAML 1.1 or for lenient parsers; anything else unchanged."""
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
