"""A step that hangs is reported with the operation that it waits for."""

import io
import sys
import threading
from typing import Any

import pytest

import horizon_lm
from horizon_lm.common.units import block
from horizon_lm.device.cpu import CpuDevice
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.schedule.ops import Kind, Stream
from tests.support import tiny_models
from tests.support.threaded_device import ThreadedDevice

pytest.importorskip("pydantic", reason="needs the whole installation")

from horizon_lm.runs.training.long_steps import Watchdog

SECONDS = 120  # until something that does not happen is a failure


class Hanging:
    """A move that waits for an event, and then runs."""

    def __init__(self, move: Any, reached: threading.Event, released: threading.Event) -> None:
        self._move, self._reached, self._released = move, reached, released
        self.host_bytes = move.host_bytes

    def run(self, link: Any) -> None:
        self._reached.set()
        assert self._released.wait(SECONDS)
        self._move.run(link)

    def split(self, pieces: int) -> list[Any]:
        return [self]


def hanging(base: type, kind: Kind, unit: str, reached: threading.Event, released: threading.Event) -> Any:
    """Return a device on which an operation hangs until it is released."""

    class HangingDevice(base):  # type: ignore[misc]
        armed = False

        def issue(self, task: Any) -> None:
            if self.armed and (task.op.kind, task.op.unit) == (kind, unit):
                task.moves = [Hanging(move, reached, released) for move in task.moves]
            super().issue(task)

    return HangingDevice()


def step(model: Any, optimizer: Any) -> float:
    loss = model(**tiny_models.batch()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    horizon_lm.synchronize(model)
    return loss.item()


@pytest.mark.parametrize(
    ("base", "kind", "text"),
    [
        (CpuDevice, Kind.UPDATE, "update block1 on stream host, a thread horizon-host"),
        (CpuDevice, Kind.STREAM_IN, "stream_in block1 on stream copy_in, a thread horizon-copy_in"),
        (ThreadedDevice, Kind.UPDATE, "update block1 on stream host, a thread horizon-host"),
        (ThreadedDevice, Kind.STREAM_IN, "stream_in block1 on stream copy_in, a thread horizon-copy_in"),
        (ThreadedDevice, Kind.STREAM_OUT, "stream_out block1 on stream copy_out, a thread horizon-copy_out"),
    ],
)
def test_a_hanging_operation_is_named(base: type, kind: Kind, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    reached, released, reported = threading.Event(), threading.Event(), threading.Event()
    device = hanging(base, kind, block(1), reached, released)
    model = horizon_lm.stream(tiny_models.build("llama"), device, precision="float32")
    optimizer = horizon_lm.AdamW(model, lr=1e-2)
    assert model._horizon.engine.cursor.describe_unfinished() == []
    before = step(model, optimizer)
    assert model._horizon.engine.cursor.describe_unfinished() == []

    class Report(io.StringIO):
        def write(self, text: str) -> int:
            count = super().write(text)
            if (
                "most recent call first" in self.getvalue()
            ):  # last, also where standard error is no file, as in notebooks
                reported.set()
            return count

    report = Report()
    monkeypatch.setattr(sys, "stderr", report)

    def pending() -> list[str]:
        assert reached.wait(SECONDS)  # the limit may pass before the step has come this far
        return model._horizon.engine.cursor.describe_unfinished()

    def release() -> None:
        reported.wait(SECONDS)
        released.set()

    releaser = threading.Thread(target=release)
    releaser.start()
    device.armed = True
    with Watchdog(0.01, pending).during_step(2):
        after = step(model, optimizer)
    releaser.join()
    assert after < before  # it went on
    assert report.getvalue().count("warning: step 2 has taken more than 0 s (step_timeout)") == 1
    assert text in report.getvalue()
    assert " is MainThread" in report.getvalue()
    assert "in _report" in report.getvalue()
    assert model._horizon.engine.cursor.describe_unfinished() == []


def test_operations_of_a_simulated_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The adversary runs copies inside computations, in the thread of the training."""
    reached, released = threading.Event(), threading.Event()
    device = hanging(SimulatedDevice, Kind.STREAM_OUT, block(0), reached, released)
    model = horizon_lm.stream(tiny_models.build("llama"), device, precision="float32")
    optimizer = horizon_lm.AdamW(model, lr=1e-2)
    step(model, optimizer)
    device.armed = True
    seen: list[str] = []

    def look() -> None:
        assert reached.wait(SECONDS)
        seen.extend(model._horizon.engine.cursor.describe_unfinished())
        released.set()

    looker = threading.Thread(target=look)
    looker.start()
    step(model, optimizer)
    looker.join()
    assert any(line.startswith("stream_out block0 on stream copy_out") for line in seen), seen


def test_an_update_is_named_with_the_copy_that_it_waits_for() -> None:
    device = ThreadedDevice(delay=0.0)
    model = horizon_lm.stream(tiny_models.build("llama", num_hidden_layers=2), device, precision="float32")
    optimizer = horizon_lm.Muon(model)
    model(**tiny_models.batch()).loss.backward()
    horizon_lm.synchronize(model)
    gate = device.hold(Stream.COPY_OUT)
    optimizer.step()
    found = model._horizon.engine.cursor.describe_unfinished()
    gate.set()
    expected = "update block1 on stream host, a thread horizon-host, which waits for return_matrices block1 (copy_out)"
    assert expected in found


@pytest.mark.parametrize("seconds", [None, 1000.0])
def test_a_step_in_time_is_not_reported(seconds: float | None, capsys: pytest.CaptureFixture[str]) -> None:
    before = set(threading.enumerate())  # threads of earlier tests may end at any time
    with Watchdog(seconds, list).during_step(1):
        assert len(set(threading.enumerate()) - before) == (seconds is not None)
    assert capsys.readouterr().err == ""


def test_a_device_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    asked, threads = threading.Event(), list[threading.Thread]()

    def fail() -> list[str]:
        threads.append(threading.current_thread())
        asked.set()
        raise RuntimeError("unspecified launch failure")

    with Watchdog(0.01, fail).during_step(1):
        assert asked.wait(SECONDS)
        threads[0].join(SECONDS)
    assert "unknown, because the device does not answer (unspecified launch failure)" in capsys.readouterr().err
