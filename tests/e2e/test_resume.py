"""A run that is interrupted after any step and resumed ends in the same bits, the same metrics and the same output."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.checkpoints.random_state import random_state
from horizon_lm.device.cpu import CpuDevice
from horizon_lm.errors import ConfigError, DeviceFaultError, InterruptedRunError
from horizon_lm.training import loop as training_loop
from tests.dying import Death, dying
from tests.e2e import tiny

TIMED = {
    "seconds", "eta_seconds", "tokens_per_second", "trained_tokens_per_second", "model_tflops", "of_planned_speed",
    "device_bytes_peak", "of_planned_device", "host_bytes", "of_planned_host",
}  # fmt: skip


@pytest.fixture(scope="module")
def base(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    rows = tiny.write_jsonl(tmp_path_factory.mktemp("rows") / "rows.jsonl", tiny.alpaca_rows(14))
    return {
        "objective": "sft", "model_name_or_path": str(model), "datasets": [{"path": str(rows)}], "max_length": 64,
        "per_device_train_batch_size": 3, "learning_rate": 3e-3, "logging_steps": 2, "test_split_size": 3,
        "eval_strategy": "steps", "eval_steps": 3, "device": "cpu", "max_steps": 8, "lr_scheduler_type": "cosine",
        "warmup_steps": 2, "sample_prompts": ["What does the keeper do?"], "sample_steps": 4, "sample_max_new_tokens": 4,
    }  # fmt: skip


def digest(run: Any) -> dict[str, str]:
    """Return hashes of everything that a run leaves in memory."""
    horizon_lm.synchronize(run.model)
    store, parts = run.model._horizon.engine.store, {}
    for unit, slabs in store.units.items():
        moments = run.optimizer.moments.units[unit]
        for name, slab in {
            "weights": slabs.weights, "low": slabs.low, "first": moments.first, "second": moments.second,
            "scale1": moments.scale1, "scale2": moments.scale2,
        }.items():  # fmt: skip
            if slab is not None:
                parts[f"{unit} {name}"] = hashlib.sha256(slab.contiguous().view(torch.uint8).numpy().data).hexdigest()
    parts["optimizer"] = json.dumps(run.optimizer.scalars(), sort_keys=True)
    parts["scheduler"] = json.dumps(run.scheduler.state_dict(), sort_keys=True)
    parts["random"] = json.dumps(random_state())
    return parts


def untimed(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file without what differs between two equal runs."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMED} for line in lines]


class Runs:
    """Trains with an interruption after a step, and keeps the loop of each run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loops: list[Any] = []
        self.stop_after: int | None = None
        self.before_step: dict[int, Callable[[], None]] = {}
        runs, original = self, training_loop._Loop.train_step

        def train_step(loop: Any, batch: Any, step: int) -> None:
            if loop not in runs.loops:
                runs.loops.append(loop)
            runs.before_step.get(step, lambda: None)()
            original(loop, batch, step)
            if step == runs.stop_after:
                loop.interrupts.requested = "SIGTERM"

        monkeypatch.setattr(training_loop._Loop, "train_step", train_step)

    def train(self, settings: dict[str, Any], stop_after: int | None = None, **options: Any) -> tuple[Any, list[str]]:
        self.stop_after, lines = stop_after, []
        if stop_after is None:
            horizon_lm.train(settings, print_fn=lines.append, **options)
        else:
            with pytest.raises(InterruptedRunError, match="go on from there"):
                horizon_lm.train(settings, print_fn=lines.append, **options)
        return self.loops[-1], lines


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    return Runs(monkeypatch)


def outcome(loop: Any) -> dict[str, Any]:
    """Return what two equal runs have in common."""
    folder = loop.run_dir.path
    return {
        "memory": digest(loop),
        "metrics": untimed(folder / "metrics.jsonl"),
        "samples": (folder / "samples.jsonl").read_text() if (folder / "samples.jsonl").exists() else "",
        "model": hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest(),
    }


def assert_resumes(runs: Runs, settings: dict[str, Any], tmp_path: Path, steps: Sequence[int], **options: Any) -> None:
    """Train with a checkpoint after each step, then once more from some of them, and compare."""
    make = options.pop("make", lambda: {})
    whole = tmp_path / "whole"
    saving = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}
    expected = outcome(runs.train({**settings, **saving, "output_dir": str(whole)}, **options, **make())[0])
    for step in steps:
        folder = tmp_path / f"from-{step}"
        folder.mkdir()
        for name in ("config.yaml", "metrics.jsonl", "samples.jsonl"):
            if (whole / name).exists():
                shutil.copy(whole / name, folder)
        point = {"output_dir": str(folder), "resume_from_checkpoint": str(whole / f"checkpoint-{step}")}
        resumed, lines = runs.train({**settings, **point}, **options, **make())
        assert any(line.startswith(f"resume: from {whole / f'checkpoint-{step}'} (step {step} of") for line in lines)
        assert outcome(resumed) == expected, f"after step {step}"


def test_resume_after_every_step_is_exact(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    assert_resumes(runs, base, tmp_path, range(1, 8))


def test_resume_after_a_signal_is_exact(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    """No checkpoint is due, but the signal writes one; neither it nor other checkpoints change the training."""
    expected = outcome(runs.train({**base, "output_dir": str(tmp_path / "whole"), "save_strategy": "no"})[0])
    cut = {**base, "output_dir": str(tmp_path / "cut")}
    runs.train(cut, stop_after=5)
    resumed, lines = runs.train(cut)
    assert f"resume: from {tmp_path / 'cut' / 'checkpoint-5'} (step 5 of 8)" in lines
    assert outcome(resumed) == expected


def flip(folder: Path) -> None:
    path = folder / "units" / "block1.safetensors"
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "a flipped bit": (flip, "units/block1.safetensors is damaged"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "it has no manifest.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(
    runs: Runs, base: dict[str, Any], tmp_path: Path, damage: str
) -> None:
    """Without a word from the user, the run goes on, exactly; without any good checkpoint, it does not begin anew."""
    change, message = DAMAGES[damage]
    base = {**base, "save_strategy": "steps", "save_steps": 1}
    expected = outcome(runs.train({**base, "output_dir": str(tmp_path / "whole")})[0])
    cut = {**base, "output_dir": str(tmp_path / "cut")}
    runs.train(cut, stop_after=5)
    change(tmp_path / "cut" / "checkpoint-5")
    shutil.copytree(tmp_path / "cut", tmp_path / "hopeless")
    resumed, lines = runs.train(cut)
    warning, used = (line for line in lines if line.startswith("resume: "))
    assert warning.startswith(f"resume: warning: {tmp_path / 'cut' / 'checkpoint-5'}")
    assert message in warning
    assert used == f"resume: from {tmp_path / 'cut' / 'checkpoint-4'} (step 4 of 8)"
    assert outcome(resumed) == expected
    change(tmp_path / "hopeless" / "checkpoint-4")
    with pytest.raises(
        ConfigError, match=rf"(?s)checkpoint-5.*{message}.*checkpoint-4.*{message}.*no checkpoint can be used"
    ):
        horizon_lm.train({**cut, "output_dir": str(tmp_path / "hopeless")}, print_fn=lambda line: None)


MODES: dict[str, dict[str, Any]] = {
    "bf16, 8-bit moments, in the backward": {
        "precision": "bf16", "moments": "8bit", "update_in_backward": True, "max_grad_norm": 0,
    },
    "float32, bfloat16 moments, packing": {
        "precision": "float32", "moments": "bfloat16", "packing": True, "max_length": 48, "weight_decay": 0.1,
    },
    "frozen blocks, accumulation, micro-batches": {
        "trainable": "model.layers.1", "gradient_accumulation_steps": 2, "device_micro_batch_size": 2,
    },
    "skipped steps, epochs": {"non_finite": "skip", "max_steps": -1, "num_train_epochs": 2.0, "save_strategy": "epoch"},
}  # fmt: skip


@pytest.mark.parametrize("mode", MODES)
def test_resume_is_exact_in_all_modes(runs: Runs, base: dict[str, Any], tmp_path: Path, mode: str) -> None:
    assert_resumes(runs, base | MODES[mode], tmp_path, (1, 4, 6))


def test_resume_is_exact_with_a_mixture(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    more = tiny.write_jsonl(tmp_path / "more.jsonl", [{"text": f"The rain comes on night {n}."} for n in range(7)])
    datasets = [*base["datasets"], {"path": str(more), "weight": 0.5}]
    assert_resumes(runs, base | {"datasets": datasets, "train_on": "all"}, tmp_path, (2, 5))


@pytest.mark.parametrize("in_backward", [False, True], ids=["normal", "in the backward"])
def test_run_whose_device_dies_is_resumed_exactly(
    runs: Runs, base: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_backward: bool
) -> None:
    """The state is saved from host memory, without the device, while a checkpoint may be on its way."""
    settings = {**base, "save_strategy": "steps", "save_steps": 2}
    settings |= {"update_in_backward": True, "max_grad_norm": 0} if in_backward else {}
    expected = outcome(runs.train({**settings, "output_dir": str(tmp_path / "whole")})[0])
    saved = set()
    for at in (0, 40, 90):
        cut, death = {**settings, "output_dir": str(tmp_path / f"cut-{at}")}, Death()
        with monkeypatch.context() as patch:
            patch.setattr("horizon_lm.engine.options.open_device", lambda *_, death=death: dying(CpuDevice, death))
            runs.before_step[5] = lambda death=death, at=at: death.arm(at)
            with pytest.raises(DeviceFaultError, match=r"the device failed in step [56] .*the device died"):
                horizon_lm.train(cut, print_fn=lambda line: None)
        runs.before_step.clear()
        resumed, lines = runs.train(cut)
        saved.add(next(line for line in lines if line.startswith("resume: from")).split("checkpoint-")[1].split()[0])
        assert outcome(resumed) == expected, f"operation {at}, {death.killed_by}"
    assert "4" in saved
