"""Spikes of loss and gradient norm are reported once, rarely without cause, and their window survives a checkpoint."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from horizon_lm.runs.objective.sft import nll
from horizon_lm.runs.training.spikes import Spikes
from horizon_lm.runs.training.train import train
from tests.e2e import tiny


def alarms(values: np.ndarray) -> list[int]:
    spikes = Spikes()
    return [step for step, value in enumerate(values) if spikes.add(2.0, float(value))]


NOISES = {
    "normal": lambda rng, n: 1 + 0.1 * rng.standard_normal(n),
    "student": lambda rng, n: np.maximum(1 + 0.1 * rng.standard_t(4, n), 1e-3),
    "lognormal": lambda rng, n: np.exp(0.6 * rng.standard_normal(n)),
    "gamma": lambda rng, n: rng.gamma(2, 1, n),
    "constant": lambda rng, n: np.ones(n),
}


@pytest.mark.parametrize("noise", list(NOISES))
def test_noise_is_rarely_reported(noise: str) -> None:
    rng, steps = np.random.default_rng(0), 3000
    decay = 2 + 3 * np.exp(-np.arange(steps) / 500)
    assert len(alarms(decay * NOISES[noise](rng, steps))) <= 1


def test_a_spike_is_reported_at_its_first_step_only() -> None:
    values = np.exp(0.2 * np.random.default_rng(1).standard_normal(300))
    values[200:205] *= 20
    values[250] *= 20
    assert alarms(values) == [200, 250]


def test_a_new_level_is_reported_once() -> None:
    values = np.concatenate([np.full(200, 1.0), np.full(200, 6.0)])
    assert alarms(values) == [200]


def test_the_text_has_the_numbers() -> None:
    spikes = Spikes()
    for _ in range(50):
        assert spikes.add(2.0, 0.5) == []
    first, second = spikes.add(8.0, 5.0)
    assert first == "the loss 8 is 4 times the median of the 50 steps before (2)"
    assert second == "the gradient norm 5 is 10 times the median of the 50 steps before (0.5)"


def test_an_explosion_is_reported_before_there_is_a_window() -> None:
    spikes = Spikes()
    assert spikes.add(10.8, 3.0) == []
    assert spikes.add(10.7, 500.0) == []
    loss, norm = spikes.add(1.9e7, 5.7e8)
    assert loss == "the loss 1.9e+07 is 1.77e+06 times the median of the 2 steps before (10.75)"
    assert norm.startswith("the gradient norm 5.7e+08 is ")
    assert spikes.add(1.9e7, 5.7e8) == []


def test_gradients_of_zero_are_reported_once() -> None:
    printed: list[str] = []
    optimizer = SimpleNamespace(grad_norm=0.0)
    spikes = Spikes(optimizer, printed.append)
    for step, norm in enumerate((1.0, 0.0, 0.0, 1.0), 1):
        optimizer.grad_norm = norm
        spikes.after_update(step, 2.0, None)  # type: ignore[arg-type]
    assert [line.split(",")[0] for line in printed] == ["step 2: all gradients are zero"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0])
def test_other_values_are_ignored(value: float) -> None:
    spikes = Spikes()
    before = spikes.state_dict()
    assert spikes.add(value, None) == []
    assert spikes.state_dict() == before


@pytest.mark.parametrize("cut", [10, 150, 202])
def test_a_restored_window_goes_on_as_if_it_had_not_been_saved(cut: int) -> None:
    values = np.exp(0.2 * np.random.default_rng(1).standard_normal(300))
    values[200:205] *= 20
    first, second = Spikes(), Spikes()
    texts = [first.add(float(value), float(value)) for value in values[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    texts += [second.add(float(value), float(value)) for value in values[cut:]]
    whole = Spikes()
    assert texts == [whole.add(float(value), float(value)) for value in values]
    assert any(texts)


def run(model: Path, folder: Path, spike_at: int | None, done: int = 0, **settings: object) -> list[str]:
    """Train on two rows a step, multiply the loss of one step, and return the lines about spikes.

    The steps of the run are counted from ``done``, those of the checkpoint that it goes on from.
    """
    said: list[str] = []
    step = done

    def objective(model: object, batch: object) -> torch.Tensor:
        nonlocal step
        step += 1
        return nll(model, batch).value * (100.0 if step == spike_at else 1.0)

    config = {
        "model_name_or_path": str(model), "datasets": str(folder / "rows.jsonl"), "output_dir": str(folder / f"run-{done}"),
        "device": "cpu", "max_steps": 50, "per_device_train_batch_size": 2, "learning_rate": 3e-3, **settings,
    }  # fmt: skip
    tiny.write_jsonl(folder / "rows.jsonl", tiny.alpaca_rows(12))
    train(config, objective=objective, print_fn=said.append)
    return [line for line in said if ": spike: " in line]


def test_a_run_without_spikes_reports_none(tmp_path: Path, model: Path) -> None:
    assert run(model, tmp_path, spike_at=None) == []


def test_a_run_reports_the_rows_of_a_spike_also_when_resumed(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = run(model, tmp_path, spike_at=45, save_strategy="steps", save_steps=42)
    assert len(found) == 2
    assert all(line.startswith("step 45: spike: the ") and "rows.jsonl:" in line for line in found)
    point = {"resume_from_checkpoint": str(tmp_path / "run-0" / "checkpoint-42"), "overwrite_output_dir": True}
    assert run(model, tmp_path, spike_at=45, done=42, **point) == found
    monkeypatch.setattr(Spikes, "load_state_dict", lambda *args: None)
    assert run(model, tmp_path, spike_at=45, done=42, **point) == [], "a window of two steps reports nothing"
