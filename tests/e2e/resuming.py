"""Interrupt runs, resume them, and compare what they leave."""

import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

import horizon_lm
from horizon_lm.errors import InterruptedRunError
from horizon_lm.runs.checkpoints.plain_state import random_state
from horizon_lm.runs.training import loss_png
from horizon_lm.runs.training.loop import Loop
from horizon_lm.runs.training.run_state import FORMAT
from tests.e2e import tiny

TIMED = {
    "seconds", "eta_seconds", "tokens_per_second", "trained_tokens_per_second", "model_tflops", "of_planned_speed",
    "device_bytes_peak", "of_planned_device", "host_bytes", "of_planned_host",
    "host_joules_per_token", "device_joules_per_token", "cores_of_others",
}  # fmt: skip
SAVING = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": None}


def settings(folder: Path, model: Path) -> dict[str, Any]:
    """Return the settings of a short run, whose rows are written into a folder."""
    rows = tiny.write_jsonl(folder / "rows.jsonl", tiny.alpaca_rows(14))
    return {
        "objective": "sft", "model_name_or_path": str(model), "datasets": [{"path": str(rows)}], "max_length": 64,
        "per_device_train_batch_size": 3, "learning_rate": 3e-3, "logging_steps": 2, "test_split_size": 3,
        "eval_strategy": "steps", "eval_steps": 3, "device": "cpu", "max_steps": 8, "lr_scheduler_type": "cosine",
        "warmup_steps": 2, "sample_prompts": ["What does the keeper do?"], "sample_steps": 4, "sample_max_new_tokens": 4,
    }  # fmt: skip


def digest(loop: Any) -> dict[str, str]:
    """Return hashes of everything that a run leaves in memory."""
    horizon_lm.synchronize(loop.model)
    store, parts = loop.model._horizon.engine.store, {}
    for slab in store.slabs:
        moments = loop.optimizer.moments.slabs[slab].values()
        for number, each in enumerate(
            (slab.weights, slab.low, *(m.values for m in moments), *(m.scales for m in moments))
        ):
            if each is not None:
                parts[f"{slab.name} {number}"] = hashlib.sha256(
                    each.contiguous().view(torch.uint8).numpy().data
                ).hexdigest()
    parts["optimizer"] = json.dumps(loop.optimizer.scalars(), sort_keys=True)
    parts["scheduler"] = json.dumps(loop.scheduler.state_dict(), sort_keys=True)
    parts["random"] = json.dumps(random_state())
    return parts


def untimed(path: Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file without what differs between two equal runs."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if name not in TIMED} for line in lines]


class Runs:
    """Trains, with an interruption after a step, and keeps what the last run leaves.

    Attributes:
        loops: the loops of all runs.
        before_step: functions to call before a step.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.loops: list[Any] = []
        self.before_step: dict[int, Callable[[], None]] = {}
        self._stop_after: int | None = None
        self._result: Any = None
        runs, run, train_step = self, Loop.run, Loop.train_step

        def watched_run(loop: Any) -> Any:
            runs.loops.append(loop)
            runs._result = run(loop)
            return runs._result

        def watched_step(loop: Any, batch: Any, step: int) -> None:
            runs.before_step.get(step, lambda: None)()
            train_step(loop, batch, step)
            if step == runs._stop_after:
                loop.interrupts.requested = "SIGTERM"

        monkeypatch.setattr(Loop, "run", watched_run)
        monkeypatch.setattr(Loop, "train_step", watched_step)
        monkeypatch.setattr(loss_png, "write_loss_png", lambda *_: None)  # takes most of the time of a short run

    def interrupt(self, settings: dict[str, Any], stop_after: int, **options: Any) -> None:
        """Train until a signal arrives in a step."""
        self._stop_after = stop_after
        with pytest.raises(InterruptedRunError, match="go on from there"):
            horizon_lm.train(settings, print_fn=lambda line: None, **options)
        self._stop_after = None

    def train(self, settings: dict[str, Any], **options: Any) -> tuple[dict[str, Any], list[str]]:
        """Train, and return what two equal runs have in common, and the printed lines."""
        lines: list[str] = []
        horizon_lm.train(settings, print_fn=lines.append, **options)
        loop, result = self.loops[-1], self._result
        samples = result.output_dir / "samples.jsonl"
        weights = next(result.model_dir.glob("*model.safetensors"))  # of the model, or of its adapters
        outcome = {
            "memory": digest(loop),
            "metrics": untimed(result.output_dir / "metrics.jsonl"),
            "samples": samples.read_text() if samples.exists() else "",
            "model": hashlib.sha256(weights.read_bytes()).hexdigest(),
            "result": (result.num_steps, result.eval_loss_before, result.eval_loss_after, result.num_skipped),
        }
        return outcome, lines


def resume(
    runs: Runs, settings: dict[str, Any], whole: Path, step: int, folder: Path, **options: Any
) -> dict[str, Any]:
    """Go on from a checkpoint of a whole run in a new folder, as if that run had been killed, and return the outcome."""
    folder.mkdir()
    for name in ("config.yaml", "metrics.jsonl", "samples.jsonl"):
        if (whole / name).exists():
            shutil.copy(whole / name, folder)
    point = {"output_dir": str(folder), "resume_from_checkpoint": str(whole / f"checkpoint-{step}")}
    outcome, lines = runs.train({**settings, **point}, **options)
    assert any(line.startswith(f"resume: from {whole / f'checkpoint-{step}'} (step {step} of") for line in lines)
    return outcome


def assert_resumes(
    runs: Runs, settings: dict[str, Any], tmp_path: Path, steps: Sequence[int],
    make: Callable[[], dict[str, Any]] = dict, **options: Any,
) -> None:  # fmt: skip
    """Train with a checkpoint after each step, then once more from some of them, and compare.

    ``make`` returns options of a run that cannot be used twice, such as callbacks.
    """
    whole = tmp_path / "whole"
    expected, _ = runs.train({**settings, **SAVING, "output_dir": str(whole)}, **options, **make())
    state = json.loads((whole / "checkpoint-1" / "training_state.json").read_text())["state"]
    assert state.keys() >= {*FORMAT, "rows_per_step"}
    for step in steps:
        assert resume(runs, settings, whole, step, tmp_path / f"from-{step}", **options, **make()) == expected, step


class LogTheFifth(TrainerCallback, ExportableState):
    """Logs the fifth step that it sees."""

    def __init__(self, num_steps: int = 0) -> None:
        self.num_steps = num_steps

    def state(self) -> dict[str, Any]:
        return {"args": {}, "attributes": {"num_steps": self.num_steps}}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.num_steps += 1
        control.should_log = self.num_steps == 5


def as_dpo(settings: dict[str, Any], folder: Path) -> dict[str, Any]:
    pairs = [
        {"prompt": f"Night {n}? ", "chosen": "The keeper counts the stars.", "rejected": "Rain, rain, rain."}
        for n in range(14)
    ]
    rows = tiny.write_jsonl(folder / "pairs.jsonl", pairs)
    return settings | {"objective": "dpo", "datasets": [{"path": str(rows)}]}
