"""A step that takes long shows its phase, its blocks and its time."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import horizon_lm
from horizon_lm.common.units import block
from horizon_lm.engine.streamed import engine_of
from horizon_lm.runs.training import long_steps, reporter
from horizon_lm.schedule.ops import Kind
from tests.e2e import resuming


class Lines:
    """A print function, whose lines a computation can wait for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._wanted, self._printed = "", threading.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        if self._wanted in line:
            self._printed.set()

    def wait_for(self, text: str) -> None:
        self._wanted = text
        self._printed.clear()
        assert self._printed.wait(60), self.lines


@pytest.fixture
def settings(tmp_path: Path, model: Path) -> dict[str, Any]:
    return resuming.settings(tmp_path, model) | {"output_dir": str(tmp_path / "run"), "max_steps": 2}


@pytest.fixture
def silent(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Half a minute passes at once."""
    monkeypatch.setattr(reporter, "_SILENT_SECONDS", -1)
    monkeypatch.setattr(long_steps, "_SECONDS", 0.01)
    yield
    assert not [each for each in threading.enumerate() if each.name == "horizon-long-steps"]


@pytest.mark.usefixtures("silent")
@pytest.mark.parametrize("rows_at_once", [None, 1])
def test_the_phase_and_the_blocks_of_a_step(
    settings: dict[str, Any], rows_at_once: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sums of micro-batches are rounded in computations of their own, which are no blocks."""
    settings["device_micro_batch_size"] = rows_at_once
    lines = Lines()

    def slow(model: Any, batch: Any) -> Any:
        cursor = engine_of(model).cursor
        compute, wanted = (
            cursor.compute,
            [
                (Kind.FORWARD, block(1), "forward, 1 of 2 blocks, "),
                (Kind.BACKWARD, block(0), "backward, 1 of 2 blocks, "),
            ],
        )

        def waiting(kind: Kind, unit: Any) -> Any:
            if wanted and wanted[0][:2] == (kind, unit):
                lines.wait_for(wanted.pop(0)[2])
            return compute(kind, unit)

        monkeypatch.setattr(cursor, "compute", waiting)
        return model(input_ids=batch.input_ids, labels=batch.labels).loss

    horizon_lm.train(settings, objective=slow, print_fn=lines)
    assert any(line.startswith("step 1/2  2 blocks, forward and backward") for line in lines.lines)
    assert not any(line.startswith("step 2/2  2 blocks") for line in lines.lines)
    shown = [line for line in lines.lines if "since its start" in line]
    assert any(line.startswith("step 1/2  forward, 1 of 2 blocks, 0 s since its start") for line in shown)


def test_quick_steps_show_nothing(settings: dict[str, Any]) -> None:
    lines = Lines()
    horizon_lm.train(settings, print_fn=lines)
    assert not [line for line in lines.lines if "forward" in line or "since its start" in line]
