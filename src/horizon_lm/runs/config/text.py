"""Render settings as text: the settings of a run, a starter file, and the documentation page.

``python -m horizon_lm.runs.config.text`` prints docs/generated/settings.md.
"""

import inspect
import json
import re
from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo
from ruamel.yaml import YAML

from horizon_lm.runs.config.datasets import DatasetConfig
from horizon_lm.runs.config.rules import OnResume
from horizon_lm.runs.config.run import SCHEMAS, RunConfig, settings_with
from horizon_lm.runs.config.types import Settings

_USUAL: dict[str, Any] = {
    "max_length": 1024, "per_device_train_batch_size": 8, "num_train_epochs": 3.0,
    "lr_scheduler_type": "cosine", "warmup_steps": 0.03, "logging_steps": 10,
}  # fmt: skip

START_VALUES: dict[str, dict[str, Any]] = {
    "sft": {
        "objective": "sft", "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct", "datasets": ["data/train.jsonl"],
        "test_split_size": 0.05, "output_dir": "runs/sft", "learning_rate": 1e-5, **_USUAL,
    },
    "pretrain": {
        "objective": "pretrain", "model_name_or_path": "Qwen/Qwen2.5-7B", "datasets": ["data/texts"],
        "test_split_size": 0.01, "output_dir": "runs/pretrain", "learning_rate": 1e-5, **_USUAL, "num_train_epochs": 1.0, "packing": True,
        "packing_strategy": "bfd_split", "max_length": 4096,
    },
    "dpo": {
        "objective": "dpo", "model_name_or_path": "Qwen/Qwen2.5-7B-Instruct", "datasets": ["data/preferences.jsonl"],
        "test_split_size": 0.05, "output_dir": "runs/dpo", "learning_rate": 1e-6, "beta": 0.1, **_USUAL, "num_train_epochs": 1.0,
    },
}  # fmt: skip

_NEXT_STEPS = """
  horizon-lm plan FILE       check that the run fits, and estimate its duration
  horizon-lm inspect FILE    show the tokens that would be trained on
  horizon-lm train FILE      train; override any setting with --learning_rate 2e-5"""

START_HEADING = {
    "sft": f"""Supervised fine-tuning: the model learns to answer as in the rows.

Rows: {{"messages": [{{"role": "user", "content": ...}}, {{"role": "assistant", "content": ...}}]}}, or alpaca (instruction,
input, output), sharegpt (conversations), prompt and completion, text. JSON, JSONL, Parquet, CSV, a folder, or a dataset on
the hub.
{_NEXT_STEPS}""",
    "pretrain": f"""Continued pre-training: the model learns every token of a text.

Rows: {{"text": ...}} in JSON, JSONL, Parquet or CSV, text files, a folder of them, or a dataset on the hub.
{_NEXT_STEPS}""",
    "dpo": f"""Direct preference optimization: the model learns to prefer one of two answers.

Rows: {{"prompt": ..., "chosen": ..., "rejected": ...}}, as text or as lists of messages; or two conversations that start with
the same messages.
{_NEXT_STEPS}""",
}


# The first line of config.yaml. Run folders are recognized by this line, so it must not change.
RUN_CONFIG_HEADER = "# The settings of this run, defaults included."


def to_yaml(config: RunConfig) -> str:
    """Render a configuration as YAML that reads back as the same configuration, with each setting under its description."""
    lines = [RUN_CONFIG_HEADER]
    for name, value in config.model_dump().items():
        lines += ["", f"# {_describe(type(config).model_fields[name])}", _setting_as_yaml(name, value)]
    return "\n".join(lines) + "\n"


def groups(schema: type[RunConfig]) -> Iterator[tuple[str, list[str]]]:
    """Yield the heading and the names of each group of settings. A setting is in the first class, from the base on, that declares it."""
    remaining = list(schema.model_fields)
    for cls in reversed(schema.__mro__):
        names = [name for name in remaining if name in inspect.get_annotations(cls)]
        if names and issubclass(cls, Settings):
            yield cls.heading, names
            remaining = [name for name in remaining if name not in names]


def start_file(schema: type[RunConfig], values: Mapping[str, Any], heading: str, full: bool = False) -> str:
    """Return a starter run file in which ``values`` are set.

    Args:
        schema: settings of the objective.
        values: settings that the file sets.
        heading: comment at the top of the file.
        full: add all other settings as comments with their defaults.
    """
    others = (
        "Settings that are commented out show their default."
        if full
        else "All settings: add --full, or docs/generated/settings.md."
    )
    lines = [f"# {line}".rstrip() for line in [*heading.splitlines(), "", others]]
    for title, names in groups(schema):
        shown = [name for name in names if full or name in values]
        if shown:
            lines += ["", "", f"# --- {title} ---"]
        for name in shown:
            entry = _setting_as_yaml(name, values[name] if name in values else schema.model_fields[name].default)
            if name not in values:
                entry = "\n".join(f"# {line}" for line in entry.splitlines())
            lines += ["", f"## {_describe(schema.model_fields[name])}", entry]
    return "\n".join(lines) + "\n"


def describe_settings() -> str:
    """Return a line per setting with its default: all of the first objective, then the settings that the other objectives add or change."""
    lines: list[str] = []
    for objective, schema in SCHEMAS.items():
        all_lines = [
            f"{name} ({_default(field, name)}): {_describe(field)}" for name, field in schema.model_fields.items()
        ]
        heading = f"# {'with' if lines else 'all settings of'} objective: {objective}"
        lines += [heading, *(line for line in all_lines if line not in lines)]
    return "\n".join(lines)


def _describe(field: FieldInfo) -> str:
    """Return the description of a setting, followed by its choices if the description does not mention them."""
    text = str(field.description)
    choices = _choices(field.annotation)
    if all(re.search(rf"\b{choice}\b", text) for choice in choices):
        return text
    return f"{text} One of {', '.join(choices)}."


def _choices(annotation: Any) -> list[str]:
    """Return the literal values that a type allows."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [choice for each in get_args(annotation) for choice in _choices(each)]


def _default(field: FieldInfo, name: str) -> str:
    """Return the default of a setting on one line of YAML."""
    if field.is_required() or name == "datasets":
        return "required"
    return _setting_as_yaml("_", field.default).removeprefix("_:").strip().replace("\n", ", ").replace("- ", "")


def _setting_as_yaml(name: str, value: Any) -> str:
    """Return a setting as YAML. Entries of datasets are written without settings that have their defaults."""
    if value is None or isinstance(value, bool | int):
        return f"{name}: {json.dumps(value)}"  # the same text, without the millisecond that ruamel.yaml needs
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.width = False, 1000
    yaml.indent(mapping=2, sequence=4, offset=2)
    stream = StringIO()
    if isinstance(value, list) and value and all(isinstance(each, dict) and "path" in each for each in value):
        value = [_without_defaults(each) for each in value]
    yaml.dump({name: value}, stream)
    return stream.getvalue().removesuffix("...\n").rstrip()


def _without_defaults(dataset: dict[str, Any]) -> Any:
    """Return an entry of ``datasets`` without its defaults, or its path if nothing else is set."""
    kept = {key: value for key, value in dataset.items() if value != DatasetConfig.model_fields[key].default}
    return kept["path"] if list(kept) == ["path"] else kept


def page() -> str:
    """Return docs/generated/settings.md, with every setting of every objective."""
    lines = [
        "# Settings", "",
        "Write these settings into a run file, or pass them on the command line as `--name value`. Settings that TRL or transformers",
        "also have keep their meaning and default. Settings that a run would not use are rejected. `horizon-lm init sft --full`",
        "prints a file with all of them. Where the default is `null`, the description says what it means.", "",
        "Generated by `python -m horizon_lm.runs.config.text`.",
    ]  # fmt: skip
    for title, names in groups(RunConfig):
        lines += _table(title, RunConfig, names)
    for objective, schema in SCHEMAS.items():
        new = [name for name in schema.model_fields if name not in RunConfig.model_fields]
        different = [name for name in RunConfig.model_fields if _table_row(schema, name) != _table_row(RunConfig, name)]
        lines += _table(f"Additional and different with `objective: {objective}`", schema, [*new, *different])
    lines += _table("An entry of `datasets` and `eval_datasets`", DatasetConfig, list(DatasetConfig.model_fields))
    lines += [
        "", "## Settings that may change on resume", "",
        "Rows and the model are compared by content, and a step keeps its number of rows; see [checkpoints](../checkpoints.md).", "",
    ]  # fmt: skip
    for rule in OnResume:
        listed = ", ".join(f"`{name}`" for name in sorted(settings_with(rule)))
        lines.append(f"- Another value {rule.value}: {listed}.")
    return "\n".join(lines) + "\n"


def _table(title: str, schema: Any, names: list[str]) -> list[str]:
    heading = ["", f"## {title}", "", "| setting | default | description |", "|---|---|---|"]
    return [*heading, *(_table_row(schema, name) for name in names)]


def _table_row(schema: Any, name: str) -> str:
    field = schema.model_fields[name]
    default = _default(field, name)
    default = default if default == "required" else f"`{default}`"
    return f"| `{name}` | {default} | {_describe(field).replace('|', chr(92) + '|')} |"


if __name__ == "__main__":
    print(page(), end="")
