"""A first step that runs out of device memory is repeated once with a smaller plan, with the results of such a plan."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.errors import DoesNotFitError
from horizon_lm.plan.request import Limit, Machine
from horizon_lm.training import loop
from tests.e2e import tiny

MIB = 2**20


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[SimulatedDevice]:
    """Plan for a device of 64 MiB; the device that is opened has the capacity that a test sets, and no other memory."""
    machine = Machine("test", on_host=False, hardware=None, device_limits=[Limit("of the test", 64 * MIB)])
    monkeypatch.setattr("horizon_lm.preflight.admission.this_machine", lambda run: machine)
    opened: list[SimulatedDevice] = []

    def open_device(name: Any, capacity: int | None = None) -> SimulatedDevice:
        opened.append(SimulatedDevice(seed=1, capacity=CAPACITY[0]))
        return opened[-1]

    monkeypatch.setattr("horizon_lm.engine.options.open_device", open_device)
    monkeypatch.setitem(CAPACITY, 0, None)
    return opened


CAPACITY: dict[int, int | None] = {0: None}


def run(model: Path, folder: Path, **settings: Any) -> tuple[Path, list[str]]:
    said: list[str] = []
    folder.mkdir(exist_ok=True)
    config = {
        "model_name_or_path": str(model), "datasets": str(tiny.write_jsonl(folder / "rows.jsonl", tiny.alpaca_rows(12))),
        "output_dir": str(folder / "run"), "device": "cpu", "per_device_train_batch_size": 6, "max_steps": 3,
        "logging_steps": 1, "precision": "float32", **settings,
    }  # fmt: skip
    loop.train(config, print_fn=said.append)
    return folder / "run", said


def plan_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "plan.json").read_text())


def results(folder: Path) -> list[Any]:
    """Return the trained weights, and the steps' losses and gradient norms."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("step", "loss", "grad_norm", "learning_rate", "tokens_total", "rows_seen")
    return [(folder / "model" / "model.safetensors").read_bytes(), [[line[key] for key in keys] for line in lines]]


def settings_of(plan: dict[str, Any]) -> dict[str, Any]:
    """Return a plan's choices as settings of a run file."""
    chosen = plan["settings"]
    return {
        "device_micro_batch_size": chosen["device_micro_batch_size"], "head_chunk_tokens": chosen["head_chunk_tokens"],
        "activation_checkpoints": chosen["activation_checkpoints"], "resident_blocks": chosen["resident_blocks"],
        "resident_graphs": chosen["resident_graphs"],
    }  # fmt: skip


def test_print_plan(model: Path, tmp_path: Path, devices: list[SimulatedDevice]) -> None:
    folder, said = run(model, tmp_path)
    print(json.dumps(plan_of(folder), indent=1)[:3000])
    print(said, devices[0].counters.allocated_peak, dict(devices[0].counters.allocated))
    assert 0
