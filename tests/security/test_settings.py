"""Numbers and paths that make no sense, in every setting and every option: each is one clear error with exit code 2."""

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import pytest
import typer

from horizon_lm.cli import _COMMANDS
from horizon_lm.errors import ConfigError
from horizon_lm.runs.config.datasets import DatasetConfig
from horizon_lm.runs.config.load import as_config, read_run_config
from horizon_lm.runs.config.run import SCHEMAS
from horizon_lm.runs.config.training import TrainingSettings
from horizon_lm.runs.config.types import Settings
from horizon_lm.runs.training.optimizer import require_sane_schedule
from tests.e2e import tiny
from tests.e2e.command import run

NONSENSE = (
    float("nan"),
    float("inf"),
    float("-inf"),
    1e308,
    -1e308,
    5e-324,
    1e-320,
    2**63,
    -(2**63),
    10**400,
    1e300,
    -1,
)
# Settings that are used only with others.
NEEDS: dict[str, dict[str, Any]] = {
    "lora": {"use_peft": True}, "eval_steps": {"eval_strategy": "steps", "test_split_size": 0.1},
    "per_device_eval_batch_size": {"test_split_size": 0.1}, "sample": {"sample_prompts": ["a"]},
    "max_consecutive_skips": {"non_finite": "skip"}, "label_smoothing": {"loss_type": "robust"},
    "early": {"early_stopping_patience": 3, "eval_strategy": "steps", "test_split_size": 0.1},
}  # fmt: skip
DISABLED = {"max_steps": [-1]}  # values that stand for none


def numeric(schema: type[Settings]) -> Iterator[str]:
    """Yield the names of the settings that can be numbers."""
    for name, field in schema.model_fields.items():
        if {int, float} & set(plain_types(field.annotation)):
            yield name


def plain_types(annotation: Any) -> Iterator[Any]:
    if get_origin(annotation) in (Annotated, Union, UnionType, list):
        for each in get_args(annotation):
            yield from plain_types(each)
    else:
        yield annotation


SETTINGS = sorted({(name, objective) for objective in SCHEMAS for name in numeric(SCHEMAS[objective])}, key=str)
OF_ONE = dict(reversed(SETTINGS))  # each setting once


def settings_with(name: str, objective: str, value: Any) -> dict[str, Any]:
    more = next((needed for start, needed in NEEDS.items() if name.startswith(start)), {})
    if objective != "dpo":
        more = {key: each for key, each in more.items() if key != "loss_type"}
    is_list = name == "loss_weights"
    return {
        "model_name_or_path": "m",
        "datasets": "owner/rows",
        "objective": objective,
        **more,
        name: [value] if is_list else value,
    }


@pytest.mark.parametrize("name", OF_ONE)
def test_numbers_that_make_no_sense(name: str) -> None:
    for value in NONSENSE:
        if value in DISABLED.get(name, ()):
            continue
        with pytest.raises(ConfigError) as caught:
            as_config(settings_with(name, OF_ONE[name], value))
        assert f"{name}: " in str(caught.value)
        assert "is not used" not in str(caught.value)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", list(numeric(DatasetConfig)))
def test_numbers_of_a_dataset(name: str) -> None:
    for value in NONSENSE:
        with pytest.raises(ConfigError, match=rf"datasets\[0\].{name}: "):
            as_config({"model_name_or_path": "m", "datasets": [{"path": "owner/rows", name: value}]})


@pytest.mark.parametrize(
    ("schedule", "kwargs", "warmup", "message"),
    [
        (
            "linear",
            None,
            2**31,
            r"warmup_steps: 2,147,483,648: the learning rate would not reach 0.1% of its peak in the 2 steps",
        ),
        ("cosine", {"num_cycles": 1e9}, 0, "num_cycles: 1e.09: is more than the 2 steps"),
        ("cosine_with_min_lr", {"min_lr_rate": 1e9}, 0, "the learning rate of step 2 would be 5e.08 times"),
        ("polynomial", {"lr_end": 1e9}, 0, "rejected by polynomial"),
        ("polynomial", {"power": -1e9, "lr_end": 1e-9}, 0, "lr_scheduler_kwargs: "),
        ("warmup_stable_decay", {"num_decay_steps": 10**9}, 0, "num_decay_steps: 1e.09: is more than"),
        ("warmup_stable_decay", {"num_decay_steps": "all"}, 0, "rejected by warmup_stable_decay"),
        ("inverse_sqrt", {"timescale": -5}, 0, "lr_scheduler_kwargs: "),
    ],
)
def test_schedules_that_make_no_sense(schedule: str, kwargs: Any, warmup: int, message: str) -> None:
    given = {"lr_scheduler_type": schedule, "lr_scheduler_kwargs": kwargs, "warmup_steps": warmup}
    config = as_config({"model_name_or_path": "m", "datasets": "owner/rows", **given})
    with pytest.raises(ConfigError, match=message):
        require_sane_schedule(config, 2)


def test_no_limit_is_lost_beside_another() -> None:
    """Pydantic applies the last of two upper limits, which may be the larger one."""
    limits = {
        name: [each.le for each in field.metadata if hasattr(each, "le")]
        for name, field in TrainingSettings.model_fields.items()
    }
    assert {name: found for name, found in limits.items() if len(found) > 1} == {}
    assert limits["per_device_train_batch_size"] == [65_536]


def test_a_few_steps_of_a_long_warm_up_are_no_mistake() -> None:
    config = as_config({"model_name_or_path": "m", "datasets": "owner/rows", "warmup_steps": 100})
    require_sane_schedule(config, 2)


@pytest.mark.parametrize("value", [".nan", "1e400", "1e-320", "9223372036854775808000"])
def test_arguments_of_a_schedule(value: str) -> None:
    with pytest.raises(ConfigError, match=r"lr_scheduler_kwargs: .*(must be|null)"):
        read_run_config(
            None,
            [
                "--model_name_or_path",
                "m",
                "--datasets",
                "owner/rows",
                "--lr_scheduler_kwargs",
                f"{{num_cycles: {value}}}",
            ],
        )


def test_a_run_rejects_its_schedule(model: Path, tmp_path: Path) -> None:
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows())
    result = run("train", "--model_name_or_path", model, "--datasets", rows, "--device", "cpu", "--max_steps", 2, "--warmup_steps", 2001,
                 "--output_dir", tmp_path / "run")  # fmt: skip
    assert result.exit_code == 2
    assert (
        "warmup_steps: 2,001: the learning rate would not reach 0.1% of its peak in the 2 steps of the run"
        in result.stderr
    )


PATHS = {"null": "a\0b", "long name": "a" * 5000, "long path": "a/" * 3000 + "b"}


def texts(command: str) -> dict[str, bool]:
    """Return the parameters of a command that take a text or a path, and whether each is an option."""
    hints = get_type_hints(getattr(import_module(f"horizon_lm.cli.{command}"), command), include_extras=True)
    described = {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Annotated}
    return {
        name: isinstance(info, typer.models.OptionInfo)
        for name, (hint, info) in described.items()
        if {str, Path} & set(plain_types(hint))
    }


def arguments_with(command: str, parameter: str, value: str) -> list[str]:
    """Return arguments of a command in which a parameter has a value, and the others one that is plausible."""
    found = []
    for name, is_option in texts(command).items():
        given = value if name == parameter else "somewhere/else"
        if name == parameter or not is_option:
            found += [f"--{name.replace('_', '-')}", given] if is_option else [given]
    return found


COMMANDS = [name for name in _COMMANDS if name not in ("version", "doctor", "eval")]


@pytest.mark.parametrize("command", [*COMMANDS, pytest.param("eval", marks=pytest.mark.slow)])
def test_paths_in_every_option(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("horizon_lm.model.hub._not_found", lambda *_: ConfigError("not asked"))
    assert texts(command)
    for parameter in texts(command):
        for value in PATHS.values():
            result = run(command, *arguments_with(command, parameter, value))
            assert result.exit_code == 2, (command, parameter, value[:10], result.output)
            assert len(result.stderr) < 13_000


SETTINGS_OF_PATHS = ("model_name_or_path", "chat_template_path", "output_dir", "datasets", "eval_datasets", "resume_from_checkpoint",
                     "gguf_file", "adapter_name_or_path")  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS_OF_PATHS)
def test_paths_in_every_setting(name: str, model: Path, tmp_path: Path) -> None:
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows(4))
    settings = {
        "model_name_or_path": model,
        "datasets": rows,
        "output_dir": tmp_path / "run",
        "device": "cpu",
        "max_steps": 1,
    }
    settings |= {"use_peft": "true"} if name == "adapter_name_or_path" else {}
    for value in (*PATHS.values(), str(tmp_path / ("a" * 5000))):
        file = tmp_path / "run.yaml"
        shown = '"' + value.replace("\0", "\\0") + '"'
        file.write_text(
            "".join(f"{key}: {shown if key == name else each}\n" for key, each in (settings | {name: value}).items())
        )
        result = run("train", file)
        assert result.exit_code == 2, (name, value[:10], result.output)
        assert not (tmp_path / "run" / "model").exists()
