"""Skipped steps are reported, and too many consecutive ones end the run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from horizon_lm.errors import NonFiniteError
from horizon_lm.runs.objective.sft import nll
from horizon_lm.runs.training.train import train
from tests.e2e import tiny

SKIPPED = "steps skipped because their gradient was not finite"


def run(model: Path, folder: Path, bad: set[int], steps: int, **settings: Any) -> tuple[Any, list[str]]:
    """Train with a NaN loss in the steps ``bad``, counted from 1; return the result and the printed lines."""
    said: list[str] = []
    step = 0

    def objective(model: Any, batch: Any) -> torch.Tensor:
        nonlocal step
        step += 1
        return nll(model, batch).value * (float("nan") if step in bad else 1.0)

    rows = tiny.write_jsonl(folder / "rows.jsonl", tiny.alpaca_rows())
    config = {
        "model_name_or_path": str(model), "datasets": str(rows), "output_dir": str(folder / "run"), "device": "cpu",
        "max_steps": steps, "non_finite": "skip", **settings,
    }  # fmt: skip
    return train(config, objective=objective, print_fn=said.append), said


@pytest.mark.parametrize(
    ("settings", "limit"), [({}, 3), ({"max_consecutive_skips": 1}, 1), ({"max_consecutive_skips": 5}, 5)]
)
def test_too_many_consecutive_skips_end_the_run(
    model: Path, tmp_path: Path, settings: dict[str, Any], limit: int
) -> None:
    with pytest.raises(
        NonFiniteError, match=rf"step {limit + 3}: .*{limit} steps .*max_consecutive_skips.*rows\.jsonl:"
    ) as raised:
        run(model, tmp_path, set(range(3, 20)), 19, **settings)
    assert raised.value.exit_code == 5
    assert not (tmp_path / "run" / "model").exists()


def test_final_message_has_the_number(model: Path, tmp_path: Path) -> None:
    result, said = run(model, tmp_path, {2, 3, 5}, 6, max_consecutive_skips=2)
    assert f"{SKIPPED}: 3 of 6\n" in said[-1]
    assert result.num_skipped == 3


def test_no_limit_of_skips(model: Path, tmp_path: Path) -> None:
    result, said = run(model, tmp_path, set(range(9)), 5, max_consecutive_skips=None)
    assert f"{SKIPPED}: 5 of 5; the model is unchanged\n" in said[-1]
    assert result.num_skipped == 5


@pytest.mark.parametrize("rate", [1e-5, 5.0])
def test_loss_that_grew_tenfold_is_warned_about(model: Path, tmp_path: Path, rate: float) -> None:
    settings = {"learning_rate": rate, "max_grad_norm": 0.0, "test_split_size": 2, "lr_scheduler_type": "constant"}
    _, said = run(model, tmp_path, set(), 6, **settings)
    for name in ("training", "eval"):
        assert (f"warning: the {name} loss grew from " in said[-1]) == (rate == 5.0)


def test_no_message_without_skips(model: Path, tmp_path: Path) -> None:
    result, said = run(model, tmp_path, set(), 2)
    assert "skipped" not in said[-1]
    assert result.num_skipped == 0
