"""Causes of stalls found in a trace, and the operations in a trace of some steps."""

import json
import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import horizon_lm
from horizon_lm.common.units import block
from horizon_lm.runs.training.tracing import Tracing
from horizon_lm.schedule.ops import Kind, Op, Stream
from horizon_lm.schedule.trace import Span, Trace, exposed_seconds


def _span(kind: Kind, stream: Stream, start: float, end: float, reached: float | None = None) -> Span:
    return Span(Op(kind, block(0), stream), start, end, start if reached is None else reached)


def _computed(start: float, end: float, reached: float | None = None) -> Span:
    return _span(Kind.FORWARD, Stream.COMPUTE, start, end, reached)


def _copied_in(start: float, end: float) -> Span:
    return _span(Kind.STREAM_IN, Stream.COPY_IN, start, end)


def _copied_out(start: float, end: float) -> Span:
    return _span(Kind.STREAM_OUT, Stream.COPY_OUT, start, end)


def _updated(start: float, end: float, kind: Kind = Kind.UPDATE) -> Span:
    return _span(kind, Stream.HOST if kind == Kind.UPDATE else Stream.COPY_IN, start, end)


@pytest.mark.parametrize(
    ("others", "reached", "expected"),
    [
        ([], 1.0, {"host": 4.0}),
        ([_copied_in(0.0, 5.0)], 1.0, {"copy_in": 4.0}),
        # The copy itself waited for an update.
        ([_updated(0.0, 3.0), _copied_in(3.0, 5.0)], 1.0, {"update": 2.0, "copy_in": 2.0}),
        ([_updated(0.0, 3.0, Kind.UPDATE_ROWS), _copied_in(3.0, 4.5)], 1.0, {"update": 2.0, "copy_in": 1.5, "host": 0.5}),
        ([_copied_out(0.0, 2.5)], 1.0, {"copy_out": 1.5, "host": 2.5}),
        # It was enqueued late, so a concurrent copy to the device was not the cause.
        ([_copied_in(0.0, 5.0)], 4.0, {"host": 3.0, "copy_in": 1.0}),
        ([_copied_out(0.0, 3.0), _copied_in(0.0, 5.0)], 4.0, {"copy_out": 2.0, "host": 1.0, "copy_in": 1.0}),
        ([_updated(0.0, 5.0)], 5.0, {"host": 4.0}),
        # Only the gap counts.
        ([_copied_in(0.0, 1.0), _copied_in(5.0, 6.0)], 1.0, {"host": 4.0}),
    ],
)  # fmt: skip
def test_gap_is_attributed_to_causes(others: list[Span], reached: float, expected: dict[str, float]) -> None:
    spans = [_computed(0.0, 1.0), _computed(5.0, 6.0, reached), *others]
    nothing = dict.fromkeys(("copy_in", "update", "copy_out", "host"), 0.0)
    assert exposed_seconds(spans) == pytest.approx(nothing | expected)


def test_device_without_stalls() -> None:
    spans = [_computed(0.0, 1.0), _computed(1.0, 2.0), _computed(2.0, 3.0), _copied_in(0.0, 3.0)]
    assert sum(exposed_seconds(spans).values()) == 0
    assert sum(exposed_seconds([]).values()) == 0


def test_updates_of_previous_step_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates overlap the forward pass of the first traced step; operations that ended before that step are dropped."""
    monkeypatch.setattr(horizon_lm, "synchronize", lambda model: None)
    device: Any = SimpleNamespace(trace=None, used_bytes=lambda: 0)
    model = SimpleNamespace(_horizon=SimpleNamespace(engine=SimpleNamespace(device=device)))
    session = SimpleNamespace(
        run_dir=SimpleNamespace(path=tmp_path),
        ranks=SimpleNamespace(is_first=True),
        reporter=SimpleNamespace(attempt=nullcontext),
    )
    settings = SimpleNamespace(config=SimpleNamespace(trace_steps=2))
    run: Any = SimpleNamespace(settings=settings, intervals=SimpleNamespace(num_steps=9), session=session)
    training: Any = SimpleNamespace(model=model)
    tracing = Tracing(run, training)
    at_submission: dict[
        int, tuple[Trace | None, float]
    ] = {}  # an update reports to the trace that was active when it was submitted
    for step in range(1, 6):
        tracing.before_step(step)
        at_submission[step] = device.trace, time.perf_counter()
        if device.trace is not None:
            now = time.perf_counter()
            device.trace.add(Op(Kind.FORWARD, block(step), Stream.COMPUTE), now, now + 1e-9)
        trace, began = at_submission.get(step - 1, (None, 0.0))
        if trace is not None:
            trace.add(Op(Kind.UPDATE, block(step - 1), Stream.HOST), began, time.perf_counter())
    content = json.loads((tmp_path / "trace.json").read_text())
    assert [step["step"] for step in content["otherData"]["steps"]] == [3, 4]
    names = {event["name"] for event in content["traceEvents"] if event["ph"] == "X"}
    assert names == {"update block2", "forward block3", "update block3", "forward block4"}
