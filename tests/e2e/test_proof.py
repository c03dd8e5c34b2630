"""Runs of unproven models, and runs that check their gradients."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

import horizon_lm
from horizon_lm.errors import ConfigError, GradientMismatchError, ModelNotSupportedError
from horizon_lm.model import proven
from tests.e2e import tiny
from tests.support.wrong_gradients import wrong_slot


def run(model: Path, folder: Path, **settings: Any) -> list[str]:
    """Train two steps and return the printed lines."""
    said: list[str] = []
    rows = tiny.write_jsonl(folder / "rows.jsonl", tiny.alpaca_rows())
    config = {
        "model_name_or_path": str(model), "datasets": str(rows), "output_dir": str(folder / "run"), "device": "cpu",
        "max_steps": 2, **settings,
    }  # fmt: skip
    horizon_lm.train(config, print_fn=said.append)
    return said


def losses(folder: Path) -> list[float]:
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [line["loss"] for line in map(json.loads, lines) if "loss" in line]


def test_gradients_are_checked_before_training(model: Path, tmp_path: Path) -> None:
    plain, checked = tmp_path / "plain", tmp_path / "checked"
    plain.mkdir()
    checked.mkdir()
    run(model, plain)
    said = run(model, checked, check_gradients=2)
    assert any("the gradients of 2 blocks equal those of plain autograd" in line for line in said)
    assert losses(checked) == losses(plain)  # the check changes nothing


def test_gradient_mismatch_ends_the_run(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong_slot(monkeypatch)
    with pytest.raises(
        GradientMismatchError, match=r"check_gradients: model\.layers\.1\..* differs from plain autograd"
    ):
        run(model, tmp_path, check_gradients=2)
    assert not (tmp_path / "run" / "model").exists()


def test_gradient_check_needs_kept_gradients(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check_gradients"):
        run(model, tmp_path, check_gradients=1, update_in_backward=True, max_grad_norm=0)


def test_unproven_model_is_streamed_on_request_with_a_warning(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proven, "_table", lambda: {"transformers": "5.0", "types": {}})
    with pytest.raises(ModelNotSupportedError, match="allow_unproven_model=True"):
        run(model, tmp_path)
    said = run(model, tmp_path, allow_unproven_model=True)
    assert any(re.search(r"allow_unproven_model: .*not in the table", line) for line in said)
    assert "allow_unproven_model: true" in (tmp_path / "run" / "config.yaml").read_text(encoding="utf-8")
