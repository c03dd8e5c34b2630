"""Settings as text for people: a run's file, a file to start from, and the documentation page."""

import inspect
import re
from collections.abc import Iterator, Mapping
from io import StringIO
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

from horizon_lm.config.run import RunConfig

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

_STEPS = """
  horizon-lm plan FILE       will it fit, and how long will it take?
  horizon-lm inspect FILE    what will be trained on, token by token
  horizon-lm train FILE      any setting: --learning_rate 2e-5

Settings that are commented out have the value that is written there."""

START_HEADING = {
    "sft": f"""Supervised fine-tuning: the model learns to answer as the rows do.

Rows: {{"messages": [{{"role": "user", "content": ...}}, {{"role": "assistant", "content": ...}}]}}, or alpaca (instruction,
input, output), sharegpt (conversations), prompt and completion, text. JSON, JSONL, Parquet, CSV, a folder, or a data set of
the hub.
{_STEPS}""",
    "pretrain": f"""Continued pre-training: the model learns text, every token of it.

Rows: {{"text": ...}} in JSON, JSONL, Parquet or CSV, text files, a folder of them, or a data set of the hub.
{_STEPS}""",
    "dpo": f"""Direct preference optimisation: of two answers the model learns to prefer one.

Rows: {{"prompt": ..., "chosen": ..., "rejected": ...}}, as text or as lists of messages; or conversations that begin alike.
{_STEPS}""",
}


OF_A_RUN = "# The settings of this run, defaults included."  # the first line of a run's own file


def to_yaml(config: RunConfig) -> str:
    """A configuration as a file that reads back as the same, each setting under its sentence."""
    lines = [OF_A_RUN]
    for name, value in config.model_dump().items():
        lines += ["", f"# {_sentence(type(config).model_fields[name])}", _entry(name, value)]
    return "\n".join(lines) + "\n"


def groups(schema: type[RunConfig]) -> Iterator[tuple[str, list[str]]]:
    """The settings of a schema by the class that brought them: its heading, and their names."""
    left = list(schema.model_fields)
    for cls in reversed(schema.__mro__):
        names = [name for name in left if name in inspect.get_annotations(cls)]
        if names:
            yield str(cls.__doc__).rstrip("."), names
            left = [name for name in left if name not in names]


def start_file(schema: type[RunConfig], values: Mapping[str, Any], heading: str) -> str:
    """A file to begin with: ``values`` are set, all other settings are there as comments with their defaults."""
    lines = [f"# {line}".rstrip() for line in heading.splitlines()]
    for title, names in groups(schema):
        lines += ["", "", f"# --- {title} ---"]
        for name in names:
            entry = _entry(name, values[name] if name in values else schema.model_fields[name].default)
            if name not in values:
                entry = "\n".join(f"# {line}" for line in entry.splitlines())
            lines += ["", f"## {_sentence(schema.model_fields[name])}", entry]
    return "\n".join(lines) + "\n"


def describe(schema: type[RunConfig]) -> list[str]:
    """All settings with their defaults, a line each."""
    lines = []
    for name, field in schema.model_fields.items():
        default = "required" if field.is_required() or name == "datasets" else _inline(field.default)
        lines.append(f"{name} ({default}): {_sentence(field)}")
    return lines


def _sentence(field: FieldInfo) -> str:
    """What a setting is, and the names that it takes where the sentence does not say them."""
    said = str(field.description)
    names = [each for each in _names(field.annotation) if not re.search(rf"\b{each}\b", said)]
    return said if not names else f"{said} One of {', '.join(_names(field.annotation))}."


def _names(annotation: Any) -> list[str]:
    """The names that a value may be."""
    if get_origin(annotation) is Literal:
        return list(get_args(annotation))
    return [name for each in get_args(annotation) for name in _names(each)]


def _inline(value: Any) -> str:
    """A default on one line, as YAML has it."""
    return _entry("_", value).removeprefix("_:").strip().replace("\n", ", ").replace("- ", "")


def _entry(name: str, value: Any) -> str:
    from ruamel.yaml import YAML

    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style, yaml.width = False, 1000
    yaml.indent(mapping=2, sequence=4, offset=2)
    stream = StringIO()
    yaml.dump({name: _short(value)}, stream)
    return stream.getvalue().removesuffix("...\n").rstrip()


def _short(value: Any) -> Any:
    """A dataset is written without what is left at its default, and as a path where nothing else is said."""
    if isinstance(value, list) and value and all(isinstance(entry, dict) and "path" in entry for entry in value):
        return [_said(entry) for entry in value]
    return value


def _said(entry: dict[str, Any]) -> Any:
    said = {key: each for key, each in entry.items() if each is not None and (key, each) != ("weight", 1.0)}
    return said["path"] if list(said) == ["path"] else said


def page() -> str:
    """docs/settings.md: every setting of every objective."""
    from horizon_lm.config.datasets import DatasetConfig
    from horizon_lm.config.run import SCHEMAS

    lines = [
        "# Settings", "",
        "Of a run file, and of the command line as `--name value`. A name that TRL or transformers has keeps their meaning and",
        "default; what is not used by a run is refused. `horizon-lm init sft` prints a file with all of them.", "",
        "Made by `python -m horizon_lm.config.text`.",
    ]  # fmt: skip
    for title, names in groups(RunConfig):
        lines += _table(title, RunConfig, names)
    for objective, schema in SCHEMAS.items():
        own = [name for name in schema.model_fields if name not in RunConfig.model_fields]
        other = [name for name in RunConfig.model_fields if _row(schema, name) != _row(RunConfig, name)]
        lines += _table(f"Besides, or otherwise, with `objective: {objective}`", schema, [*own, *other])
    lines += _table("An entry of `datasets` and `eval_datasets`", DatasetConfig, list(DatasetConfig.model_fields))
    return "\n".join(lines) + "\n"


def _table(title: str, schema: Any, names: list[str]) -> list[str]:
    return ["", f"## {title}", "", "| setting | default | |", "|---|---|---|", *(_row(schema, name) for name in names)]


def _row(schema: Any, name: str) -> str:
    field = schema.model_fields[name]
    default = "required" if field.is_required() or name == "datasets" else f"`{_inline(field.default)}`"
    return f"| `{name}` | {default} | {_sentence(field)} |".replace('"layers.20.*|lm_head"', '"layers.20.*\\|lm_head"')


if __name__ == "__main__":
    print(page(), end="")
