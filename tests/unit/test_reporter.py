"""Lines of metrics as people read them."""

from typing import Any

import pytest

from horizon_lm.training.metrics import describe

LINE: dict[str, Any] = {
    "step": 4, "epoch": 0.5, "loss": 1.25, "grad_norm": 2.0, "learning_rate": 1e-5, "trained_tokens_per_second": 10.0,
    "tokens_per_second": 20.0, "device_bytes_peak": 2**20, "host_bytes": 2**30, "eta_seconds": 60.0, "of_planned_speed": 1.0,
}  # fmt: skip


def test_a_line_of_a_step_tells_what_matters() -> None:
    line = describe(LINE, 8)
    assert line.startswith("step 4/8  epoch 0.50  loss 1.2500  grad norm 2.00  lr 1.00e-05  ")
    assert "planned speed" not in line


@pytest.mark.parametrize(("of_planned", "said"), [(0.14, True), (0.5, False), (None, False)])
def test_steps_much_slower_than_planned_are_told(of_planned: float | None, said: bool) -> None:
    line = describe({**LINE, "of_planned_speed": of_planned}, 8)
    assert line.endswith("  (14% of the planned speed)") == said


def test_a_step_that_was_left_out_has_no_loss() -> None:
    assert "loss none" in describe({**LINE, "loss": None}, 8)
