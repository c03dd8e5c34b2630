"""What a device waited for, found in a trace."""

import pytest

from horizon_lm.schedule.ops import Kind, Op, Stream
from horizon_lm.schedule.trace import Span, exposed_seconds


def _span(kind: Kind, stream: Stream, start: float, end: float, reached: float | None = None) -> Span:
    return Span(Op(kind, "block0", stream), start, end, start if reached is None else reached)


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
        # The copy waited for an update itself, which was copied from nothing before.
        ([_updated(0.0, 3.0), _copied_in(3.0, 5.0)], 1.0, {"update": 2.0, "copy_in": 2.0}),
        ([_updated(0.0, 3.0, Kind.UPDATE_ROWS), _copied_in(3.0, 4.5)], 1.0, {"update": 2.0, "copy_in": 1.5, "host": 0.5}),
        ([_copied_out(0.0, 2.5)], 1.0, {"copy_out": 1.5, "host": 2.5}),
        # Enqueued late: a copy in that ran meanwhile was not what held it up.
        ([_copied_in(0.0, 5.0)], 4.0, {"host": 3.0, "copy_in": 1.0}),
        ([_copied_out(0.0, 3.0), _copied_in(0.0, 5.0)], 4.0, {"copy_out": 2.0, "host": 1.0, "copy_in": 1.0}),
        ([_updated(0.0, 5.0)], 5.0, {"host": 4.0}),
        # Outside of the gap nothing counts.
        ([_copied_in(0.0, 1.0), _copied_in(5.0, 6.0)], 1.0, {"host": 4.0}),
    ],
)  # fmt: skip
def test_a_gap_is_divided_among_its_causes(others: list[Span], reached: float, expected: dict[str, float]) -> None:
    spans = [_computed(0.0, 1.0), _computed(5.0, 6.0, reached), *others]
    nothing = dict.fromkeys(("copy_in", "update", "copy_out", "host"), 0.0)
    assert exposed_seconds(spans) == pytest.approx(nothing | expected)


def test_a_device_that_never_waits() -> None:
    spans = [_computed(0.0, 1.0), _computed(1.0, 2.0), _computed(2.0, 3.0), _copied_in(0.0, 3.0)]
    assert sum(exposed_seconds(spans).values()) == 0
    assert sum(exposed_seconds([]).values()) == 0
