"""The plan of a Trainer counts the bytes that its steps take."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments
from trl import DPOConfig, GRPOConfig, SFTConfig

import horizon_lm
from horizon_lm.common.quantities import format_bytes, format_seconds
from horizon_lm.errors import ConfigError, DoesNotFitError, StreamingError
from horizon_lm.integrations import trainer_plan
from horizon_lm.integrations.trainer_plan import TrainerPlan
from horizon_lm.memory.layout.slabs import padded
from horizon_lm.planning.arithmetic.catalog import find_profile
from horizon_lm.planning.arithmetic.request import Limit
from horizon_lm.runs.admission.this_machine import other_machine, this_machine
from tests.e2e import tiny
from tests.e2e.command import run
from tests.seams.compare import difference
from tests.seams.use import copied_weights
from tests.support import tiny_models
from tests.support.gradients import losses_together
from tests.support.handmade_outlines import machine
from tests.support.thinned_cases import thinned
from tests.support.trainer_runs import rows

LENGTH = 16


def arguments(tmp_path: Path, cls: Any = TrainingArguments, **settings: Any) -> Any:
    given = {"output_dir": str(tmp_path), "use_cpu": True, "max_steps": 10, "report_to": "none", "save_strategy": "no"}
    batch = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}
    return cls(**(given | batch | settings))


@pytest.mark.parametrize("precision", ["float32", "fp32_master"])
@pytest.mark.parametrize("optim", ["adamw_torch_fused", "adamw_8bit"])
def test_host_bytes_are_those_of_a_step(tmp_path: Path, precision: str, optim: str) -> None:
    model = horizon_lm.stream(
        tiny_models.build("llama"), precision=precision, activation_checkpoints="host", device_micro_batch_size=3
    )
    planned = horizon_lm.plan(model, arguments(tmp_path, optim=optim), length=LENGTH)
    assert planned.fits
    moments = "8bit" if "8bit" in optim else "float32"
    optimizer = horizon_lm.AdamW(model, moments=moments)
    losses_together(model, [tiny_models.batch(rows=3, length=LENGTH)] * 4)
    optimizer.step()
    measured = horizon_lm.stats(model)["host_bytes_by_kind"]
    names = {item.name: item.bytes for item in planned.host.items}
    assert sum(measured.values()) == sum(
        num_bytes for name, num_bytes in names.items() if not name.startswith(("process", "activations", "device"))
    ), (measured, names)


def test_too_little_memory_is_rejected_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    weights = copied_weights(model)
    trainer = horizon_lm.trainer(Trainer)(model, arguments(tmp_path), train_dataset=rows())
    trainer.train()
    assert "plan: host memory: " in capsys.readouterr().out
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    trainer = horizon_lm.trainer(Trainer)(model, arguments(tmp_path), train_dataset=rows())
    limits = [Limit("a small machine", 2**20)]
    monkeypatch.setattr(trainer_plan, "this_machine", lambda run: replace(this_machine(run), host_limits=limits))
    with pytest.raises(DoesNotFitError, match=r"host: .* needed") as error:
        trainer.train()
    assert "a small machine" in str(error.value)
    assert difference(copied_weights(model), weights, 0.0) is None


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL's own defaults
def test_lengths_come_from_the_arguments(tmp_path: Path) -> None:
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    with pytest.raises(ConfigError, match="length="):
        horizon_lm.plan(model, arguments(tmp_path))
    sft = horizon_lm.plan(model, arguments(tmp_path, SFTConfig, max_length=32))
    dpo = horizon_lm.plan(model, arguments(tmp_path, DPOConfig, max_length=32))
    assert (sft.request.rows, dpo.request.rows) == (12, 24)
    assert sft.step.outline.length == 32
    with pytest.raises(StreamingError, match="streamed"):
        horizon_lm.plan(tiny_models.build("llama"), arguments(tmp_path), length=8)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # of TRL's own defaults
@pytest.mark.parametrize(
    ("settings", "beginning", "passes"),
    [
        ({}, "generation: ", 40),
        ({"steps_per_generation": 2}, "generation: ", 80),  # generates twice a step
        ({"steps_per_generation": 8}, "generation, every 2 steps: ", 40),
    ],
    ids=str,
)
def test_the_plan_says_what_generating_costs(
    tmp_path: Path, settings: dict[str, Any], beginning: str, passes: int
) -> None:
    """One forward pass for each token, and each loads all weights over the link."""
    model = horizon_lm.stream(tiny_models.build("llama"), precision="float32")
    weights = 4 * sum(padded(param.numel()) for param in model.parameters())
    args = arguments(tmp_path, GRPOConfig, max_completion_length=40, num_generations=3, **settings)
    plan = horizon_lm.plan(model, args, length=LENGTH)
    slow = replace(plan.machine, hardware=machine(link_in=weights / 2))  # a pass takes two seconds
    (line,) = TrainerPlan(model, args, LENGTH).generation_lines(replace(plan, machine=slow))
    assert line.startswith(f"{beginning}up to {passes} forward passes, one for each token, which load ")
    assert f": {format_seconds(2 * passes)} at " in line
    unknown = replace(plan, machine=replace(plan.machine, hardware=None))
    (line,) = TrainerPlan(model, args, LENGTH).generation_lines(unknown)
    assert line.endswith(" each")
    assert not list(TrainerPlan(model, arguments(tmp_path, SFTConfig), LENGTH).generation_lines(plan))


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_generating_few_rows_loads_few_experts(tmp_path: Path) -> None:
    """At most two of 16 experts for each row, and all of them for rows that may read more than half."""
    model = horizon_lm.stream(tiny_models.build("qwen3_moe", num_experts=16), precision="float32")
    weights = 4 * sum(padded(param.numel()) for param in model.parameters())
    experts = 4 * sum(param.numel() for name, param in model.named_parameters() if ".experts." in name)
    args = {"max_completion_length": 40, "num_generations": 3}
    for rows_at_once, words in ((3, " each with the experts of 3 tokens"), (6, " each")):
        config = arguments(tmp_path, GRPOConfig, steps_per_generation=rows_at_once // 3, **args)
        plan = horizon_lm.plan(model, config, length=LENGTH)
        unknown = replace(plan, machine=replace(plan.machine, hardware=None))
        (line,) = TrainerPlan(model, config, LENGTH).generation_lines(unknown)
        unread = experts * 10 // 16 if rows_at_once == 3 else 0
        assert line.endswith(f"which load {format_bytes(weights - unread)}{words}")


BEST = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_loss"}


@pytest.mark.parametrize(
    "settings",
    [
        {"save_only_model": True},
        *thinned([{}, {"save_steps": 3}, {"save_steps": 0.3}]),
        BEST,
        BEST | {"eval_steps": 0.5},
    ],
    ids=str,
)
def test_disk_of_checkpoints(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = horizon_lm.stream(tiny_models.build("llama"), precision="fp32_master")
    given = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
    args = arguments(tmp_path, **given | settings)
    trainer = horizon_lm.trainer(Trainer)(model, args, train_dataset=rows(), eval_dataset=rows())
    planned = horizon_lm.plan(model, args, length=16)
    trainer.train()
    trainer.save_model()
    weights = sum(path.stat().st_size for path in tmp_path.rglob("*.safetensors"))
    of_weights = sum(item.bytes for item in planned.disk.items if item.name != "records")
    assert weights == pytest.approx(of_weights, rel=0.25)  # headers and padding of a tiny model


def test_disk_has_room_for_the_best_checkpoint_and_the_newest(tmp_path: Path) -> None:
    model = horizon_lm.stream(tiny_models.build("llama"), precision="fp32_master")

    def planned(limit: int, **settings: Any) -> int:
        args = arguments(tmp_path, max_steps=9, save_total_limit=limit, **BEST | settings)
        return horizon_lm.plan(model, args, length=16).disk.bytes

    assert planned(1) < planned(1, load_best_model_at_end=True) == planned(2)
    assert planned(3) == planned(3, load_best_model_at_end=True)


def test_a_plan_for_another_machine_is_that_of_the_command(tmp_path: Path) -> None:
    """The engine that was opened here chooses nothing for it: this device has no limit, and that one has."""
    folder = tiny.save_model(tmp_path / "model")
    model = horizon_lm.from_pretrained(folder, "cpu", "bf16")
    args = arguments(tmp_path, gradient_accumulation_steps=1)
    planned = TrainerPlan(model, args, 64, machine=other_machine(find_profile("rtx-4090"), 2**37)).make()
    result = run(
        "plan", "--model", folder, "--device", "rtx-4090", "--host-memory", "128GiB", "--precision", "bf16", "--max_length", 64,
        "--per_device_train_batch_size", 3, "--gradient_accumulation_steps", 1, "--max_steps", 10, "--json",
    )  # fmt: skip
    expected = json.loads(result.stdout)["device"]
    assert {item.name: item.bytes for item in planned.device.items} == {
        item["name"]: item["bytes"] for item in expected["items"]
    }
    assert TrainerPlan(model, args, 64).make().device.items != planned.device.items
