"""The settings of a run file about saving, the best model and early stopping do what their descriptions say."""

import errno
import itertools
import json
import math
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import horizon_lm
from horizon_lm.cli.planned_run import _steps_and_saves
from horizon_lm.errors import ConfigError, InterruptedRunError, StreamingError
from horizon_lm.runs.admission.inputs import open_source
from horizon_lm.runs.checkpoints import manifest, saving
from horizon_lm.runs.checkpoints.part_reader import PartReader
from horizon_lm.runs.checkpoints.unit_file import UnitFile
from horizon_lm.runs.config.load import as_config
from horizon_lm.runs.training.best_model import eval_metrics
from horizon_lm.runs.training.intervals import Intervals
from horizon_lm.runs.training.keeping import Keeper
from horizon_lm.runs.training.rows import estimate_sampler
from tests.e2e import tiny
from tests.e2e.command import run
from tests.e2e.resuming import SAVING, Runs
from tests.support.thinned_cases import thinned


def interrupted(runs: Runs, settings: dict[str, Any], stop_after: int = 5) -> tuple[str, list[str]]:
    """Train until a signal arrives in a step, and return the error and the printed lines."""
    lines: list[str] = []
    runs._stop_after = stop_after
    with pytest.raises(InterruptedRunError) as error:
        horizon_lm.train(settings, print_fn=lines.append)
    runs._stop_after = None
    return str(error.value), lines


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("checkpoint-*"))


def evaluations(folder: Path) -> dict[int, dict[str, float]]:
    """Return the evaluations after a step by that step."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if "eval_loss" in line and line["step"]}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def exported(checkpoint: Path, out: Path, *options: str) -> dict[str, torch.Tensor]:
    result = run("export", checkpoint, out, *options)
    assert result.exit_code == 0, result.stderr
    return weights_of(out)


# Signals


@pytest.mark.parametrize("saves", [True, False])
def test_save_on_signal(runs: Runs, base: dict[str, Any], tmp_path: Path, saves: bool) -> None:
    message, _ = interrupted(runs, base | {"output_dir": str(tmp_path / "run"), "save_on_signal": saves})
    assert checkpoints(tmp_path / "run") == (["checkpoint-5"] if saves else [])
    assert ("checkpoint-5" in message) == saves


def test_a_model_that_is_exported_twice_after_a_step_is_kept(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    """The step is due for a save, and ends with a signal."""
    only_model = {"save_only_model": True, "save_steps": 5, "save_total_limit": 1, "output_dir": str(tmp_path / "run")}
    message, _ = interrupted(runs, base | only_model)
    assert "checkpoint-5" in message
    assert weights_of(tmp_path / "run" / "checkpoint-5")


@pytest.mark.parametrize(
    ("seconds", "kept"), [(1e-6, ["checkpoint-2", "checkpoint-4"]), (1e6, ["checkpoint-4", "checkpoint-5"])]
)
def test_save_on_signal_seconds(
    runs: Runs, base: dict[str, Any], tmp_path: Path, seconds: float, kept: list[str]
) -> None:
    """A checkpoint that would take too long is left out, and the run names the one before."""
    settings = {"save_strategy": "steps", "save_steps": 2, "save_on_signal_seconds": seconds}
    runs.before_step[5] = lambda: runs.loops[-1].keeper.wait()  # which is on its way to the disk
    message, lines = interrupted(runs, base | settings | {"output_dir": str(tmp_path / "run")})
    assert checkpoints(tmp_path / "run") == kept
    assert kept[-1] in message
    left_out = [line for line in lines if line.startswith("no checkpoint of step 5: it would take about ")]
    assert [line.endswith("save_on_signal_seconds is 1e-06") for line in left_out] == ([True] if seconds < 1 else [])


@pytest.mark.parametrize(
    ("limit", "last", "settings"),
    thinned(
        (*limit, settings)
        for limit, settings in itertools.product(
            [(510.0, "checkpoint-5"), (490.0, "checkpoint-4")], [{}, {"use_peft": True, "lora_r": 4}]
        )
    ),
    ids=str,
)
def test_a_checkpoint_takes_as_long_as_the_one_before(
    runs: Runs, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any],
    limit: float, last: str,
) -> None:  # fmt: skip
    """Memory that no checkpoint has, such as gradients and the base of adapters, takes no time."""
    report = Keeper.report_saved

    def report_500_seconds(own: Keeper) -> None:
        if own._running is not None:
            own._running[1].seconds = 500.0
        report(own)

    monkeypatch.setattr(Keeper, "report_saved", report_500_seconds)
    runs.before_step[5] = lambda: runs.loops[-1].keeper.wait()
    saves = {"save_strategy": "steps", "save_steps": 4, "save_on_signal_seconds": limit}
    message, _ = interrupted(runs, base | saves | settings | {"output_dir": str(tmp_path / "run")})
    assert last in message


def test_a_checkpoint_that_is_being_written_may_use_the_seconds(
    runs: Runs, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of step 5 would take too long, but that of step 4 is on its way, and can be in time."""
    monkeypatch.setattr(Keeper, "seconds", property(lambda self: 1e9, lambda self, seconds: None), raising=False)
    arrived, limited, waited = threading.Event(), saving.RateLimit.wait, Keeper.wait

    def write_after_the_signal(limit: saving.RateLimit, num_bytes: int) -> None:
        limited(limit, num_bytes)
        arrived.wait(60)

    def wait(own: Keeper, seconds: float | None = None) -> None:
        if seconds is not None:  # only after a signal
            arrived.set()
        waited(own, seconds)

    monkeypatch.setattr(saving.RateLimit, "wait", write_after_the_signal)
    monkeypatch.setattr(Keeper, "wait", wait)
    settings = {"save_strategy": "steps", "save_steps": 4, "save_on_signal_seconds": 100.0}
    message, _ = interrupted(runs, base | settings | {"output_dir": str(tmp_path / "run")})
    assert checkpoints(tmp_path / "run") == ["checkpoint-4"]
    assert "checkpoint-4" in message


# The best model and early stopping

FALLING, RISING = 3e-3, 10.0  # learning rates: the loss of an evaluation falls or rises from step to step
BEST: dict[str, tuple[float, dict[str, Any], Any]] = {
    "the smallest loss": (RISING, {}, min),
    "the metric without its prefix": (RISING, {"metric_for_best_model": "loss"}, min),
    "greater is better": (FALLING, {"metric_for_best_model": "eval_loss", "greater_is_better": True}, max),
    "another metric": (RISING, {"metric_for_best_model": "entropy"}, max),
}


@pytest.mark.parametrize("case", thinned(BEST))
def test_the_best_model_is_exported(base: dict[str, Any], tmp_path: Path, case: str) -> None:
    rate, settings, best_of = BEST[case]
    folder = tmp_path / "run"
    settings = base | SAVING | settings | {
        "output_dir": str(folder), "load_best_model_at_end": True, "eval_steps": 1, "max_steps": 4, "learning_rate": rate,
        "lr_scheduler_type": "constant", "warmup_steps": 0,
    }  # fmt: skip
    horizon_lm.train(settings, print_fn=lambda line: None)
    name = "eval_" + settings.get("metric_for_best_model", "loss").removeprefix("eval_")
    found = {step: line[name] for step, line in evaluations(folder).items()}
    best = best_of(found, key=found.__getitem__)
    assert best < 4, "the last model is the best one, so this shows nothing"
    got, expected = weights_of(folder / "model"), exported(folder / f"checkpoint-{best}", tmp_path / "best")
    other = exported(folder / f"checkpoint-{3 if best != 3 else 2}", tmp_path / "other")
    assert all(torch.equal(got[each], expected[each]) for each in expected)
    assert not all(torch.equal(got[each], other[each]) for each in other)


def failing_in_the_middle(patch: pytest.MonkeyPatch, folders: tuple[str, ...]) -> None:
    """Let the second unit of a checkpoint be unreadable, after its files were verified."""
    read = PartReader.read

    def failing(reader: PartReader, file: UnitFile) -> None:
        if reader._folder.name in folders and any(".layers.1." in name for name in file.entries):
            raise OSError(errno.EIO, "Input/output error", str(reader._folder))
        read(reader, file)

    patch.setattr(PartReader, "read", failing)


def test_nothing_is_lost_if_the_best_model_becomes_unreadable(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights in memory are half those of another step by then. The last model is exported, and the best one is left."""
    settings = base | {
        "load_best_model_at_end": True, "eval_steps": 1, "max_steps": 3, "learning_rate": RISING, "lr_scheduler_type": "constant",
        "warmup_steps": 0, "save_strategy": "no",
    }  # fmt: skip
    last = horizon_lm.train(
        settings | {"load_best_model_at_end": False, "output_dir": str(tmp_path / "last")}, print_fn=lambda line: None
    )
    expected, lines = weights_of(last.model_dir), []
    failing_in_the_middle(monkeypatch, ("checkpoint-1",))
    horizon_lm.train(settings | {"output_dir": str(tmp_path / "run")}, print_fn=lines.append)
    assert any("checkpoint-1 became unreadable" in line and "last model is exported" in line for line in lines)
    got = weights_of(tmp_path / "run" / "model")
    assert all(torch.equal(got[name], value) for name, value in expected.items())

    failing_in_the_middle(monkeypatch, ("checkpoint-1", "checkpoint-3"))
    with pytest.raises(StreamingError, match="of two models") as error:
        horizon_lm.train(settings | {"output_dir": str(tmp_path / "both")}, print_fn=lambda line: None)
    assert all(name in str(error.value) for name in ("checkpoint-1", "checkpoint-3"))
    monkeypatch.undo()
    got = exported(tmp_path / "both" / "checkpoint-3", tmp_path / "rescued")
    assert all(torch.equal(got[name], value) for name, value in expected.items())
    best = (tmp_path / folder / "checkpoint-1" for folder in ("run", "both"))
    one, other = (exported(folder, tmp_path / f"best {number}") for number, folder in enumerate(best))
    assert all(torch.equal(one[name], value) for name, value in other.items())
    assert not all(torch.equal(one[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("settings", "num", "at_once"), [
    ({}, 3, 3), ({"eval_strategy": "epoch"}, 2, 2), ({"eval_steps": 1}, 8, 4),
    ({"eval_steps": 1, "save_strategy": "steps", "save_steps": 4, "save_total_limit": None}, 8, 8),
    ({"save_strategy": "steps", "save_steps": 4}, 4, 4), ({"save_strategy": "steps", "save_steps": 2}, 5, 4),
    ({"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}, 8, 4),
])  # fmt: skip
def test_the_plan_has_room_for_the_best_and_the_last_checkpoint(
    base: dict[str, Any], settings: dict[str, Any], num: int, at_once: int
) -> None:
    """Evaluations are after steps 3 and 6 of 8 unless a case says otherwise, and any of them may find a better model."""
    values = base | {"load_best_model_at_end": True, "save_strategy": "no"} | settings
    if values["eval_strategy"] == "epoch":
        del values["eval_steps"]
    saves = Intervals(as_config(values), 8, 4).planned_saves()
    assert (saves.num, min(saves.num, saves.kept + 1)) == (num, at_once)


def test_a_plan_knows_the_epochs_of_evaluations(base: dict[str, Any]) -> None:
    """With a number of steps, the rows of an epoch matter to evaluations after each epoch, too, if each may be the best."""
    settings = base | {
        "load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "no", "max_steps": 20, "save_total_limit": None,
    }  # fmt: skip
    settings.pop("eval_steps", None)
    config = as_config(settings)
    sampler = estimate_sampler(config)
    assert sampler is not None
    expected = Intervals(config, 20, sampler.steps_per_epoch).planned_saves()
    assert _steps_and_saves(config, 1) == (20, expected)
    assert expected.num > Intervals(config, 20, 20).planned_saves().num


def test_the_plan_has_room_if_each_evaluation_finds_a_better_model(base: dict[str, Any], tmp_path: Path) -> None:
    settings = base | {
        "load_best_model_at_end": True, "eval_steps": 1, "max_steps": 5, "save_strategy": "steps", "save_steps": 5,
        "save_total_limit": None, "lr_scheduler_type": "constant", "warmup_steps": 0, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    horizon_lm.train(settings, print_fn=lambda line: None)
    left = checkpoints(tmp_path / "run")
    assert len(left) > 2, "few evaluations found a better model, so this shows nothing"
    saves = Intervals(as_config(settings), 5, 5).planned_saves()
    assert min(saves.num, saves.kept + 1) >= len(left)


def test_the_last_model_is_exported_if_it_cannot_be_kept(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = base | {
        "load_best_model_at_end": True, "eval_steps": 1, "max_steps": 3, "learning_rate": RISING, "lr_scheduler_type": "constant",
        "warmup_steps": 0, "save_strategy": "no", "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    lines: list[str] = []
    monkeypatch.setattr(Keeper, "save_somewhere", lambda *_: None)
    horizon_lm.train(settings, print_fn=lines.append)
    assert any("the last model cannot be kept beside the best one" in line for line in lines)
    assert [line["step"] for line in map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())][
        -1
    ] == 3
    best = exported(tmp_path / "run" / "checkpoint-1", tmp_path / "best")
    assert not all(torch.equal(best[name], value) for name, value in weights_of(tmp_path / "run" / "model").items())


def test_a_metric_that_evaluations_do_not_have_is_rejected(
    base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the model is opened, and the rows are read."""
    monkeypatch.setattr("horizon_lm.runs.training.train.Admission", None)
    settings = {"output_dir": str(tmp_path / "run"), "load_best_model_at_end": True, "metric_for_best_model": "bleu"}
    with pytest.raises(ConfigError, match=r"evaluations have no eval_bleu; choose one of eval_loss"):
        horizon_lm.train(base | settings, print_fn=lambda line: None)


@pytest.mark.parametrize("sets", [1, 2])
def test_the_metrics_of_evaluations_are_known_before(base: dict[str, Any], tmp_path: Path, sets: int) -> None:
    rows = [str(tiny.write_jsonl(tmp_path / f"{n}.jsonl", tiny.alpaca_rows(2))) for n in range(sets)]
    settings = base | {
        "eval_datasets": rows,
        "max_steps": 1,
        "output_dir": str(tmp_path / "run"),
        "eval_strategy": "no",
    }
    settings = {name: value for name, value in settings.items() if name not in ("eval_steps", "test_split_size")}
    horizon_lm.train(settings, print_fn=lambda line: None)
    first = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[0])
    names = [name for name in first if name.startswith("eval_")]
    assert sorted(names) == sorted(eval_metrics("sft", [str(n) for n in range(sets)]))


def test_adapters_without_values_are_rejected_before_loading(base: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "target_modules": ["q_proj"], "r": 4}'
    )
    settings = base | {"use_peft": True, "adapter_name_or_path": str(tmp_path / "adapter")}
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors"):
        open_source(as_config(settings))


@pytest.mark.parametrize(("settings", "steps"), [
    ({"early_stopping_patience": 2, "early_stopping_threshold": 100.0}, 3),  # only the first evaluation is an improvement
    ({"early_stopping_patience": 2, "learning_rate": RISING, "lr_scheduler_type": "constant", "warmup_steps": 0}, 3),
    ({"early_stopping_patience": 2}, 6),  # the loss falls
])  # fmt: skip
def test_early_stopping(base: dict[str, Any], tmp_path: Path, settings: dict[str, Any], steps: int) -> None:
    folder = tmp_path / "run"
    common = {"output_dir": str(folder), "eval_steps": 1, "max_steps": 6, "save_strategy": "no"}
    samples = {"sample_prompts": ["Why?"], "sample_steps": 100, "sample_max_new_tokens": 1}
    result = horizon_lm.train(base | common | samples | settings, print_fn=lambda line: None)
    assert result.num_steps == steps
    answers = (folder / "samples.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in answers] == [steps]  # the last step, although none of the interval
    assert max(evaluations(folder)) == steps
    assert (folder / "model" / "model.safetensors").is_file()


# The rate of the disk


def test_save_bandwidth_limits_the_bytes_per_second(
    runs: Runs, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time stands still, so the longest wait is that of the last bytes: for all bytes before them."""
    waits: list[float] = []
    clock = SimpleNamespace(monotonic=lambda: 0.0, sleep=waits.append, perf_counter=lambda: 0.0)
    monkeypatch.setattr(saving, "time", clock)
    rate = 1 << 20
    settings = {"output_dir": str(tmp_path / "run"), "save_bandwidth": rate, "save_on_signal": True}
    interrupted(runs, base | settings, stop_after=2)
    sizes = [path.stat().st_size for path in (tmp_path / "run" / "checkpoint-2" / "units").iterdir()]
    assert (sum(sizes) - max(sizes)) / rate < max(waits) < sum(sizes) / rate
    waits.clear()
    interrupted(runs, base | {"output_dir": str(tmp_path / "free")}, stop_after=2)
    assert not waits


# Formats


def test_a_checkpoint_of_another_format_version_is_rejected(
    runs: Runs, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a path, by the automatic choice, which does not begin anew, and by the commands."""
    settings = base | {"output_dir": str(tmp_path / "run")}
    with monkeypatch.context() as patched:
        patched.setattr(manifest, "VERSION", manifest.VERSION + 1)
        interrupted(runs, settings, stop_after=2)
    folder = tmp_path / "run" / "checkpoint-2"
    message = rf"version {manifest.VERSION + 1}\b.*release"
    for more in ({"resume_from_checkpoint": str(folder)}, {}):
        with pytest.raises(ConfigError, match=message):
            horizon_lm.train(settings | more, print_fn=lambda line: None)
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]
    result = run("export", folder, tmp_path / "out")
    assert result.exit_code == 2
    assert f"version {manifest.VERSION + 1}" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_the_command_exports_a_whole_model(runs: Runs, base: dict[str, Any], tmp_path: Path, dtype: str | None) -> None:
    """In the dtype of the model that was trained, or in another one; plain transformers loads it."""
    interrupted(runs, base | {"output_dir": str(tmp_path / "run"), "precision": "fp32_master"}, stop_after=2)
    options = ["--dtype", dtype] if dtype else []
    found = exported(tmp_path / "run" / "checkpoint-2", tmp_path / "out", *options)
    expected = getattr(torch, dtype or "float32")  # of the tiny model
    assert {tensor.dtype for tensor in found.values()} == {expected}
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    trained = dict(runs.loops[-1].model.state_dict())
    assert found.keys() <= trained.keys()
    for name, tensor in found.items():
        assert torch.equal(plain[name], tensor)
        difference = (tensor.float() - trained[name].float()).norm() / trained[name].float().norm()
        assert math.isfinite(difference)
        assert difference < 5e-3


# Memory


def test_a_resumed_run_holds_the_memory_of_the_run(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    """Counted: buffers of the device, slabs and activation checkpoints of the host, and what the plan says of them."""

    def held() -> dict[str, Any]:
        engine = runs.loops[-1].model._horizon.engine
        counters, plan = engine.device.counters, json.loads((runs.loops[-1].run_dir.path / "plan.json").read_text())
        return {
            "device": dict(counters.allocated), "device peak": counters.allocated_peak, "host": dict(engine.store.num_bytes),
            "boundaries": engine.boundaries.num_bytes,
            "planned": {item["name"]: item["bytes"] for item in plan["host"]["items"] if item["name"] != "process"},
        }  # fmt: skip

    settings = base | {"precision": "fp32_master", "moments": "8bit"}
    runs.train(settings | {"output_dir": str(tmp_path / "whole")})
    expected = held()
    cut = settings | {"output_dir": str(tmp_path / "cut")}
    runs.interrupt(cut, stop_after=5)
    _, lines = runs.train(cut)
    assert any(line.startswith("resume: from") for line in lines)
    assert held() == expected
