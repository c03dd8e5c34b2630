"""Translate a run file of another trainer, using the translation table of that trainer.

A translation is faithful or rejected: whatever would change the training is an error, unless the user accepts it by name.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from horizon_lm.common.paths import exists
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.runs.config.adapters import OF_THE_BASE, AdapterSettings
from horizon_lm.runs.config.foreign.tables import (
    LeftOut,
    common,
    effect_of,
    is_on,
    is_set,
    parse_text,
    read_json,
    remedies,
    table_key,
)
from horizon_lm.runs.config.rules import Reading, UnusedError
from horizon_lm.runs.config.run import SCHEMAS
from horizon_lm.runs.config.text import start_file
from horizon_lm.runs.config.yaml_file import read_yaml
from horizon_lm.tools.translate.axolotl_datasets import from_axolotl
from horizon_lm.tools.translate.identify import find_objective, find_table, flatten, reject_export, reject_own_file
from horizon_lm.tools.translate.llamafactory_datasets import from_llamafactory, from_v1
from horizon_lm.tools.translate.trl_datasets import from_trl

_DATASETS = ("datasets", "eval_datasets")
_TRANSLATE_DATASETS = {
    "TRL": from_trl, "LLaMA-Factory": from_llamafactory, "LLaMA-Factory (v1 layout)": from_v1, "Axolotl": from_axolotl,
}  # fmt: skip
_PER_EPOCH = {"evals_per_epoch": ("eval_strategy", "eval_steps"), "saves_per_epoch": ("save_strategy", "save_steps")}
# Settings that have an effect for other trainers where they are not used here.
_USED_BY_OTHERS = {
    "label_smoothing", "load_in_4bit", "adapter_name_or_path", "lora_target_parameters", "lora_modules_to_save",
}  # fmt: skip


@dataclass
class Translation:
    """A run file of another trainer, translated to our settings.

    Attributes:
        path: their file.
        table: the translation table of the trainer; `tables.tables` describes its keys.
        theirs: their settings, with those that the trainer assumes.
        objective: objective of the run.
        settings: our settings.
        left_out: their settings that were not translated.
        not_needed: names that were accepted though their settings do not change the numbers, or are not in the file.
    """

    path: str
    table: Mapping[str, Any]
    theirs: Mapping[str, Any]
    objective: str
    settings: dict[str, Any] = field(default_factory=dict)
    left_out: LeftOut = field(default_factory=LeftOut)
    not_needed: Sequence[str] = ()

    def text(self, full: bool = False) -> str:
        """Return our run file, headed by the settings that were left out. ``full``: see `start_file`."""
        trainer = self.table["name"]
        heading = [
            f"Translated from a file of {trainer}. Check it with horizon-lm inspect, which shows what it trains on."
        ]
        for title, found in (
            ("Accepted, although it changes the numbers:", self.left_out.numbers),
            ("Left out, because it changes nothing here:", self.left_out.nothing),
        ):
            heading += ["", title, *(f"  {name}: {reason}" for name, reason in found.items())] if found else []
        return start_file(SCHEMAS[self.objective], self.settings, "\n".join(heading), full)

    def translate(self, accept: Collection[str]) -> None:
        """Fill ``settings``, ``left_out`` and ``not_needed``. Raise ConfigError if the result is not faithful, except for ``accept``.

        The order matters: the file's settings replace the settings that follow from its datasets, and the defaults replace neither.
        """
        self._translate_datasets()
        self._translate_settings()
        self._add_defaults_and_differences()
        self._reject_unfaithful(accept)

    @property
    def _folder(self) -> Path:
        return Path(self.path).expanduser().parent

    def _translate_datasets(self) -> None:
        """Add our ``datasets``, ``eval_datasets`` and the settings that follow from them.

        Raises:
            ConfigError: a file that lists datasets cannot be read, or a setting is not in the format of the trainer.
        """
        translate = _TRANSLATE_DATASETS[self.table["name"]]
        try:
            found = dict(translate(self.theirs, self._folder, self.left_out, self.objective))
            for entry in [*found.get("datasets", []), *found.get("eval_datasets", [])]:
                self._adapt_entry(entry)
        except (TypeError, AttributeError, LookupError, ValueError) as error:
            names = ", ".join(name for name in self.table["datasets"] if name in self.theirs)
            raise ConfigError(
                f"{self.path}: {names}: not in the format of {self.table['name']} ({first_line(error)})"
            ) from error
        self.settings |= found

    def _adapt_entry(self, entry: dict[str, Any]) -> None:
        """Reject a dataset whose rows are for another objective, and replace the split of a local file, which has none, in ``entry``:
        ``train[:N]`` becomes ``max_samples``.
        """
        if (entry.get("format") == "preference") != (self.objective == "dpo") and "format" in entry:
            reason = f"{entry['path']} has rows for another objective than {self.objective}"
            self.left_out.add("datasets", "rejected", reason)
        if "split" in entry and exists(entry["path"]) and Path(entry["path"]).expanduser().is_file():
            split = entry.pop("split")
            if first := re.fullmatch(r"train\[:(\d+)\]", split):
                entry["max_samples"] = int(first[1])
            elif split != "train":
                reason = f"{split}: a file has no splits; all of its rows are read"
                self.left_out.add("datasets.split", "rejected", reason)

    def _translate_settings(self) -> None:
        """Add our settings for theirs, except settings of data sets, and add what has no translation to ``left_out``."""
        for key, value in self._drop_ineffective().items():
            if key not in self.table["datasets"] or key in self.table["rename"]:
                try:
                    self._translate_setting(key, value)
                except (TypeError, ValueError):
                    self.left_out.add(key, "rejected", f"{value!r} is not a valid value")
        self._reject_deepspeed_optimizer()

    def _drop_ineffective(self) -> dict[str, Any]:
        """Return their settings without the ones that the objective or another setting makes ineffective, and add those to ``left_out``.

        In ``precedence`` of the table, each key overrides its value if both are set. If the key is off (false or, unless
        ``zero_takes_precedence``, 0), it is the key that is dropped, and ``left_out`` does not mention it.
        """
        effective, table = dict(self.theirs), self.table
        for key, objective in table.get("only_for", {}).items():
            if key in effective and self.objective != objective:
                del effective[key]
                self.left_out.add(key, "nothing", f"it is for objective: {objective}")
        for winner, loser in table.get("precedence", {}).items():
            if winner in effective and loser in effective:
                value = parse_text(effective[winner])
                if value or (table.get("zero_takes_precedence") and value is not False):
                    del effective[loser]
                    self.left_out.add(loser, "nothing", f"{winner} is also set and takes precedence")
                else:
                    del effective[winner]
        return effective

    def _translate_setting(self, key: str, value: Any) -> None:
        """Add what a setting of theirs becomes: settings of ours, or an entry of ``left_out``.

        The outcomes of its value in the tables come before renaming it, and before the reasons that the tables give for its name.
        """
        table, rename = self.table, self.table["rename"]
        our_fields = SCHEMAS[self.objective].model_fields
        if key in table.get("lists", ()) and isinstance(value, str) and "," in value:
            value = [part.strip() for part in value.split(",")]
        outcome = self._outcome(key, value)
        # Entries of a list without effect here: the last parts of their dotted names, under ``names``, and the reason, under ``why``.
        ineffective = table.get("parts", {}).get(key)
        if isinstance(outcome, str):
            effect, _, reason = outcome.partition(": ")
            self.left_out.add(key, effect, reason)
        elif outcome is not None:
            self.settings |= {name: each for name, each in outcome.items() if name in our_fields}
        elif rename.get(key) in our_fields:
            self.settings[rename[key]] = value
        elif key in our_fields and effect_of(key, table) is None:
            self.settings[key] = value
        elif key in _PER_EPOCH:
            self._translate_interval(key, value)
        elif ineffective is not None and {str(each).rpartition(".")[2] for each in value} <= {*ineffective["names"]}:
            self.left_out.add(key, "nothing", ineffective["why"])
        else:
            self._leave_out_untranslated(key, value)

    def _outcome(self, key: str, value: Any) -> Any:
        """Return the tables' outcome for a value: "EFFECT: reason", a mapping of settings of ours, or None if they have none.

        An outcome under ``any`` is for all values that the tables do not list, except values that turn the setting off (`is_on`).
        """
        shared_key = self.table.get("same_values", {}).get(key, key)
        outcomes = {**common()["values"].get(shared_key, {}), **self.table.get("values", {}).get(key, {})}
        outcome = outcomes.get(table_key(value), outcomes.get(table_key(parse_text(value))))
        return outcomes.get("any") if outcome is None and is_on(value) else outcome

    def _translate_interval(self, key: str, value: Any) -> None:
        """Translate a number of times per epoch (`evals_per_epoch`) to a strategy and an interval: a share of the run, below 1."""
        strategy, interval = _PER_EPOCH[key]
        times = float(value) * float(self.theirs.get("num_epochs", 1))
        if times > 1:
            self.settings |= {strategy: "steps", interval: round(1 / times, 6)}
        else:
            self.settings[strategy] = "epoch" if times else "no"

    def _leave_out_untranslated(self, key: str, value: Any) -> None:
        """Add a setting that has no translation to ``left_out``, by the first of these cases that applies.

        It names the method, and is not added. The tables give the effect of leaving it out. It is a setting of other objectives, which is
        rejected. It or its value is unknown, which is rejected, since it may matter. A setting that is off is added only if it is unknown.
        """
        table = self.table
        if key in table.get("method_of", {}):
            return
        objectives = [name for name, schema in SCHEMAS.items() if table["rename"].get(key, key) in schema.model_fields]
        if effect_and_reason := effect_of(key, table):
            if is_on(value):
                self.left_out.add(key, *effect_and_reason)
        elif objectives:
            if is_on(value):
                self.left_out.add(key, "rejected", f"it is for objective: {' or '.join(objectives)}")
        else:
            has_outcomes = key in common()["values"] or key in table.get("values", {})
            if not has_outcomes or is_on(value):
                why = f"{value!r} is not known here" if has_outcomes else "unknown setting, which may matter; remove it"
                self.left_out.add(key, "rejected", remedies().get(key, why))

    def _reject_deepspeed_optimizer(self) -> None:
        """Reject a DeepSpeed configuration that has an optimizer or a schedule: the run file's would be used instead."""
        config = self.theirs.get("deepspeed")
        if isinstance(config, str):
            places = (Path(config), self._folder / config)
            place = next((each for each in places if exists(str(each))), None)
            config = read_json(place) if place is not None else {}
        for part in ("optimizer", "scheduler"):
            if isinstance(config, Mapping) and part in config:
                self.left_out.rejected["deepspeed"] = f"it has its own {part}; set it in the run file"

    # Completion and validation

    def _add_defaults_and_differences(self) -> None:
        """Add the trainer's defaults, and add every remaining difference from the trainer's training to ``left_out``."""
        explicit = {*self.theirs, *self.settings}  # names in their file, and ours that follow from it, without defaults
        self._add_defaults()
        self._drop_overruled()
        self._reject_without_adapters()
        self._note_differences(explicit)
        renamed_by_ours = {ours: name for name, ours in self.table["rename"].items() if name in self.theirs}
        self._remove_invalid({name: name for name in explicit} | renamed_by_ours)
        self._require_model_and_data()

    def _reject_without_adapters(self) -> None:
        """Reject the settings under ``needs_adapters`` of the table, for their reasons, if neither adapters nor decoded weights are trained."""
        theirs, settings, left_out = self.theirs, self.settings, self.left_out
        for key, why in self.table.get("needs_adapters", {}).items():
            if key in theirs and not (settings.get("use_peft") or settings.get("dequantize")):
                left_out.nothing.pop(key, None)
                left_out.add(key, "rejected", why)

    def _note_differences(self, explicit: set[str]) -> None:
        """Add the ``differences`` of the table that apply, defaults of the trainer that are not followed here, to ``left_out.numbers``.

        A difference applies if its settings under ``when`` are on (with one of the values listed there, if any), if the objective is among
        its ``objectives``, and if no name under ``unless`` is ``explicit``.
        """
        theirs = self.theirs
        for name, difference in self.table.get("differences", {}).items():
            conditions_hold = all(
                is_set(theirs, key) and (not values or table_key(theirs[key]) in values)
                for key, values in difference.get("when", {}).items()
            )
            concerns_objective = self.objective in difference.get("objectives", SCHEMAS)
            if conditions_hold and concerns_objective and explicit.isdisjoint(difference["unless"]):
                self.left_out.add(name, "numbers", difference["why"])

    def _require_model_and_data(self) -> None:
        """Reject a file without a model or data, by the trainer's names for these settings, unless its data was rejected already."""
        table, left_out = self.table, self.left_out
        for ours, their_name in (("model_name_or_path", table["required"][0]), ("datasets", table["datasets"][0])):
            if ours not in self.settings and not left_out.rejected.keys() & {*table["datasets"]}:
                left_out.add(their_name, "rejected", "is missing")

    def _add_defaults(self) -> None:
        """Add the trainer's defaults for settings that the file does not set: the table's ``defaults``, then ``defaults_with``, which
        another setting brings along if it is on, then ``twice``, whose values are twice another setting's.
        """
        table, theirs = self.table, self.theirs
        defaults = dict(table.get("defaults", {}))
        for key, by_value in table.get("defaults_with", {}).items():
            if is_set(theirs, key):
                defaults |= by_value.get(table_key(theirs[key]), by_value.get("any", {}))
        fields = SCHEMAS[self.objective].model_fields
        self.settings = {name: value for name, value in defaults.items() if name in fields} | self.settings
        for name, other in table.get("twice", {}).items():
            if name not in theirs and isinstance(value := parse_text(self.settings.get(other)), int | float):
                self.settings[name] = 2 * value

    def _drop_overruled(self) -> None:
        """Remove settings that others overrule in all these trainers, without adding them to ``left_out``."""
        settings = self.settings
        if settings.get("adapter_name_or_path"):  # its own ranks and targets are used
            for name in AdapterSettings.model_fields.keys() - OF_THE_BASE:
                settings.pop(name, None)
        if settings.get("use_peft"):  # adapters are trained on the quantized weights, which have the same values
            settings.pop("dequantize", None)
        if isinstance(steps := parse_text(settings.get("max_steps")), int) and steps > 0:
            settings.pop("num_train_epochs", None)

    def _remove_invalid(self, their_names: Mapping[str, str]) -> None:
        """Remove the settings that our validation rejects, and add them to ``left_out``: as ``nothing`` if a run would not use them,
        else as ``rejected``. A text that stands for a number or a truth value is replaced by that value instead.

        ``their_names``: the trainer's names of the settings that are in the file, by our names; all other settings are defaults.
        """
        settings, left_out = self.settings, self.left_out
        # Repeated, because removing a setting may make others invalid. A round replaces or removes one, each once at most: so many suffice.
        for _ in range(3 * len(settings)):
            try:
                SCHEMAS[self.objective].model_validate(settings, context=Reading(without_rows=True, places=(settings,)))
                return
            except ValidationError as error:
                details = error.errors()
            invalid = {}  # the error of each setting; the last one, if there are several
            for each in details:
                first, *_ = loc = each["loc"]
                if first not in _DATASETS and first in settings:
                    invalid[str(first)] = each
                elif first in _DATASETS and "path" not in loc[2:3]:  # a path may be one of another machine
                    left_out.add(".".join(map(str, loc)), "rejected", _message(each))
            if not invalid:
                return
            for name, each in invalid.items():
                value = settings.pop(name)
                if isinstance(value, str) and not isinstance(parsed := parse_text(value), str):
                    settings[name] = parsed
                    continue
                is_unused = isinstance(each.get("ctx", {}).get("error"), UnusedError) and name not in _USED_BY_OTHERS
                if name in their_names or not is_unused:  # unused defaults are removed without a word
                    effect = "nothing" if is_unused else "rejected"
                    left_out.add(their_names.get(name, name), effect, f"{value!r} {_message(each)}")

    def _reject_unfaithful(self, accept: Collection[str]) -> None:
        """Raise ConfigError unless the training is the same, up to the names in ``accept``; set ``not_needed``."""
        left_out = self.left_out
        self.not_needed = [name for name in accept if name not in left_out.numbers]
        left_out.numbers = {name: why for name, why in left_out.numbers.items() if name not in left_out.rejected}
        lines = [f"  {name}: {why}" for name, why in left_out.rejected.items()]
        not_accepted = {name: why for name, why in left_out.numbers.items() if name not in accept}
        if not_accepted:
            options = " ".join(f"--accept {name}" for name in left_out.numbers)
            lines += [
                f"these change the numbers; accept them with {options}:",
                *(f"  {name}: {why}" for name, why in not_accepted.items()),
                *(f"--accept {name} is not needed" for name in self.not_needed),
            ]
        if lines:
            raise ConfigError("\n".join([f"{self.path}: a run file with the same training cannot be written:", *lines]))


def _message(error: Any) -> str:
    """Return the text of an error of pydantic."""
    return str(error["msg"]).removeprefix("Value error, ")


def translate_file(path: str, objective: str | None = None, accept: Collection[str] = ()) -> Translation:
    """Translate a YAML file of another trainer.

    Args:
        path: the file.
        objective: objective of the run, or None to take it from the file.
        accept: names of settings that may change the numbers.

    Raises:
        ConfigError: the file cannot be read, belongs to no known trainer, is for a method that is not supported, or cannot be
            translated faithfully.
    """
    theirs = {key: value for key, value in read_yaml(path)[0].items() if value is not None}
    reject_own_file(theirs, path)
    table = find_table(theirs, path)
    # What the trainer assumes where the file is silent, then what it says.
    with_assumed = {**table.get("assumed", {}), **flatten(theirs, table.get("flatten", ()))}
    reject_export(with_assumed, table, path)
    result = Translation(path, table, with_assumed, find_objective(with_assumed, table, objective, path))
    if result.objective != "sft":
        result.settings["objective"] = result.objective
    result.translate(accept)
    return result
