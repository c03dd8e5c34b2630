"""Record the operations of a step as they run, and measure their overlap."""

import json
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from horizon_lm.common.disk import Disk, write_file
from horizon_lm.common.units import Unit
from horizon_lm.schedule.ops import UPDATES, Kind, Op, Stream

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Span:
    """The time of one operation, in seconds of one clock.

    Attributes:
        op: the operation.
        start, end: its first and last moment.
        reached: moment at which its stream had finished all earlier operations; until ``start`` the stream waits.
    """

    op: Op
    start: float
    end: float
    reached: float


Counters = Mapping[str, float]  # bytes in use, by name

_MICRO = 1e-6  # seconds of a microsecond, the unit of time in files


class Trace:
    """Spans in the order of their ends, added from several threads (Python's ``list.append`` is atomic).

    Args:
        sample: function that returns the bytes in use, called at the end of each operation.

    Attributes:
        samples: bytes in use, each with its time.
        steps: number, start and end of each traced step.
    """

    def __init__(self, sample: Callable[[], Counters] | None = None) -> None:
        self.spans: list[Span] = []
        self.samples: list[tuple[float, Counters]] = []
        self.steps: list[tuple[int, float, float]] = []
        self._sample = sample

    def add(self, op: Op, start: float, end: float, reached: float | None = None) -> None:
        """Add an operation; ``reached`` defaults to its start."""
        self.spans.append(Span(op, start, end, start if reached is None else reached))
        if self._sample is not None:
            self.samples.append((time.perf_counter(), self._sample()))

    def drop_before(self, moment: float) -> None:
        """Drop the spans that ended and the samples taken before a moment."""
        self.spans = [span for span in self.spans if span.end > moment]
        self.samples = [(at, sample) for at, sample in self.samples if at > moment]

    def write(self, path: Path) -> None:
        """Write the trace as a file for chrome://tracing or Perfetto."""
        write_chrome(path, self.spans, self.samples, self.steps)

    @classmethod
    def read(cls, events: Sequence[Mapping[str, Any]], other: Mapping[str, Any]) -> "Trace":
        """Return the trace in a file that `write_chrome` has written. A trace that names no steps is one step.

        Args:
            events: the file's ``traceEvents``.
            other: its ``otherData``.

        Raises:
            ValueError: an event or the steps are invalid; the message names the first one.
        """
        trace, rows, place = cls(), dict[int, Stream](), ""
        try:
            for number, event in enumerate(events):
                place = f"traceEvents[{number}]"
                trace._read_event(event, rows)
            place = "otherData.steps"
            trace.steps = _read_steps(other.get("steps", []))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{place} is invalid ({error!r})") from error
        if not trace.steps and trace.spans:
            trace.steps = [(1, min(span.start for span in trace.spans), max(span.end for span in trace.spans))]
        trace.samples.sort(key=lambda sample: sample[0])
        return trace

    def _read_event(self, event: Mapping[str, Any], rows: dict[int, Stream]) -> None:
        """Add an event of a file to the trace. An event that names a row is added to ``rows``; a file names each row before its events."""
        if event["ph"] == "M" and event["name"] == "thread_name":
            rows[event["tid"]] = Stream(event["args"]["name"])
        elif event["ph"] == "X":
            kind = Kind(event["cat"])
            op = Op(kind, Unit.parse(event["name"].removeprefix(kind).strip()), rows[event["tid"]])
            start = float(event["ts"]) * _MICRO
            reached = float(event.get("args", {}).get("reached", event["ts"])) * _MICRO
            self.spans.append(Span(op, start, start + float(event["dur"]) * _MICRO, reached))
        elif event["ph"] == "C":
            self.samples.append((float(event["ts"]) * _MICRO, {event["name"]: float(event["args"]["bytes"])}))


def _read_steps(marks: Sequence[Mapping[str, Any]]) -> list[tuple[int, float, float]]:
    """Return number, start and end of the steps of a file, in seconds; raise ValueError if one ends before it begins."""
    steps = [(int(each["step"]), float(each["start"]) * _MICRO, float(each["end"]) * _MICRO) for each in marks]
    if any(end <= start for _, start, end in steps):
        raise ValueError("a step ends before it begins")
    return steps


def write_chrome(
    path: Path,
    spans: Sequence[Span],
    samples: Sequence[tuple[float, Counters]] = (),
    steps: Sequence[tuple[int, float, float]] = (),
) -> None:
    """Write a file for chrome://tracing or Perfetto, with one row for each stream and a curve for each counter.

    Args:
        path: file to write.
        spans: spans of operations, in seconds of one clock.
        samples: bytes in use at moments of the same clock.
        steps: number, start and end of steps, as additional data.
    """
    rows = {stream: row for row, stream in enumerate(Stream)}
    names = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": str(stream)}}
        for stream, row in rows.items()
    ]
    first = min([*(span.start for span in spans), *(start for _, start, _ in steps)], default=0.0)

    def micros(seconds: float) -> float:
        return round((seconds - first) * 1e6, 3)

    events = [
        {
            "ph": "X", "name": str(span.op), "cat": str(span.op.kind), "pid": 0, "tid": rows[_row(span.op)],
            "ts": micros(span.start), "dur": round((span.end - span.start) * 1e6, 3), "args": {"reached": micros(span.reached)},
        }
        for span in spans
    ]  # fmt: skip
    counters = [
        {"ph": "C", "name": name, "pid": 0, "ts": micros(at), "args": {"bytes": num_bytes}}
        for at, sample in samples
        for name, num_bytes in sample.items()
    ]
    marks = [{"step": number, "start": micros(start), "end": micros(end)} for number, start, end in steps]
    content = {"traceEvents": names + events + counters, "otherData": {"steps": marks}}
    write_file(Disk(), path, json.dumps(content).encode())


def _row(op: Op) -> Stream:
    """Return the stream in whose row an operation is drawn. Updates of rows run in the order of the copy-in stream, but are host work."""
    return Stream.HOST if op.kind in UPDATES else op.stream


def select(spans: Iterable[Span], *kinds: Kind) -> list[Span]:
    """Return the spans of these kinds of operations."""
    return [span for span in spans if span.op.kind in kinds]


def busy_seconds(spans: Sequence[Span]) -> float:
    """Return the time in which at least one of the spans was running."""
    return _length(_union(spans))


def exposed_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """Return the time between the first and the last computation in which nothing was computed, by cause.

    A computation that was enqueued in time waited for a copy to the device, or for the update before that copy. A
    computation that was enqueued late was delayed by the host: by gradients that had to land before the step could end,
    or by Python.

    Args:
        spans: spans of one or more steps.

    Returns:
        Seconds by cause: ``copy_in``, ``update``, ``copy_out``, and ``host`` for the rest; with several ranks also ``gather`` and
        ``reduce``. A moment in which several were busy counts for the first of them in the order copy_in, update, copy_out, gather,
        reduce.
    """
    updates = select(spans, *UPDATES)
    copies_in = [s for s in spans if s.op.stream == Stream.COPY_IN and s.op.kind not in UPDATES]
    copies_out = [s for s in spans if s.op.stream == Stream.COPY_OUT]
    gathers, sums = select(spans, Kind.GATHER), select(spans, Kind.REDUCE)
    collectives = {"gather": gathers, "reduce": sums} if gathers or sums else {}
    # A moment is charged to the first of these that was busy.
    causes_of_waiting = {"copy_in": copies_in, "update": updates, "copy_out": copies_out, **collectives}
    causes_of_lateness = {"copy_out": copies_out, **({"reduce": sums} if collectives else {})}
    found = dict.fromkeys([*causes_of_waiting, "host"], 0.0)
    waiting, lateness = (
        {cause: _union(spans) for cause, spans in each.items()} for each in (causes_of_waiting, causes_of_lateness)
    )
    computed = sorted((s for s in spans if s.op.stream == Stream.COMPUTE), key=lambda s: s.start)
    for before, span in pairwise(computed):
        # Until this moment of the gap the computation was not enqueued, because the host was late. From then on it waited for other
        # operations. If it was enqueued before the gap, it waited in all of it.
        enqueued = min(max(span.reached, before.end), span.start)
        for gap, causes in (((before.end, enqueued), lateness), ((enqueued, span.start), waiting)):
            for cause, seconds in _seconds_by_cause(gap, causes).items():
                found[cause] += seconds
    return found


def _seconds_by_cause(gap: Interval, causes: Mapping[str, Sequence[Interval]]) -> dict[str, float]:
    """Return the seconds of a gap by cause. A moment counts for the first cause that was busy then, or for ``host`` if none was.

    Args:
        gap: start and end, in seconds.
        causes: for each cause the disjoint intervals in which it was busy, in order.
    """
    found: dict[str, float] = {}
    left = [gap] if gap[0] < gap[1] else []
    for cause, busy in causes.items():
        first, last = bisect_right(busy, gap[0], key=itemgetter(1)), bisect_left(busy, gap[1], key=itemgetter(0))
        remaining = _without(left, busy[first:last])
        found[cause] = _length(left) - _length(remaining)
        left = remaining
    return found | {"host": _length(left)}


def _without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Return the parts of the intervals that lie outside of all others."""
    left = list(intervals)
    for begin, end in others:
        parts = [part for start, stop in left for part in ((start, min(stop, begin)), (max(start, end), stop))]
        left = [(start, stop) for start, stop in parts if start < stop]
    return left


def _length(intervals: Iterable[Interval]) -> float:
    """Return the seconds of all intervals together."""
    return sum(end - start for start, end in intervals)


def _union(spans: Sequence[Span]) -> list[Interval]:
    """Return disjoint intervals that cover the same time as the spans."""
    merged: list[Interval] = []
    for span in sorted(spans, key=lambda s: s.start):
        if merged and span.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end))
        else:
            merged.append((span.start, span.end))
    return merged
