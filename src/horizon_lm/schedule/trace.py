"""What really happened in a step, in the words of the schedule."""

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from horizon_lm.schedule.ops import UPDATES, Kind, Op, Stream

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Span:
    """One operation from its first to its last moment, in seconds of one clock.

    Attributes:
        reached: when its stream had nothing else left to do; what lies between that and ``start`` is waiting.
    """

    op: Op
    start: float
    end: float
    reached: float


Counters = Mapping[str, int]  # bytes by what they are called


class Trace:
    """Spans in the order in which they ended. Lists in Python may be appended to from several threads.

    Args:
        sample: asked for bytes whenever an operation has ended.

    Attributes:
        samples: what it said, with the time.
        steps: number, begin and end of each step that was traced.
    """

    def __init__(self, sample: Callable[[], Counters] | None = None) -> None:
        self.spans: list[Span] = []
        self.samples: list[tuple[float, Counters]] = []
        self.steps: list[tuple[int, float, float]] = []
        self._sample = sample

    def add(self, op: Op, start: float, end: float, reached: float | None = None) -> None:
        self.spans.append(Span(op, start, end, start if reached is None else reached))
        if self._sample is not None:
            self.samples.append((time.perf_counter(), self._sample()))

    def drop_before(self, moment: float) -> None:
        """Forget what had ended by then."""
        self.spans = [span for span in self.spans if span.end > moment]
        self.samples = [(at, sample) for at, sample in self.samples if at > moment]

    def write(self, path: Path) -> None:
        """A file for chrome://tracing or Perfetto."""
        write_chrome(path, self.spans, self.samples, self.steps)


def write_chrome(
    path: Path,
    spans: Sequence[Span],
    samples: Sequence[tuple[float, Counters]] = (),
    steps: Sequence[tuple[int, float, float]] = (),
) -> None:
    """A file for chrome://tracing or Perfetto, with one row for each stream and a curve for each counter.

    Args:
        spans: of operations, in seconds of one clock.
        samples: bytes at moments of the same clock.
        steps: number, begin and end of steps; of a reader's interest only.
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
    path.write_text(json.dumps(content), encoding="utf-8")


def _row(op: Op) -> Stream:
    """Updates of rows stand in the stream of the copies that wait for them, but are the host's work."""
    return Stream.HOST if op.kind in UPDATES else op.stream


def select(spans: Iterable[Span], *kinds: Kind) -> list[Span]:
    """The spans of these kinds of operations."""
    return [span for span in spans if span.op.kind in kinds]


def busy_seconds(spans: Sequence[Span]) -> float:
    """Time in which at least one of the spans was running."""
    return _length(_union(spans))


def overlap_seconds(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """Time in which at least one of ``spans`` and at least one of ``others`` were running."""
    return sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in _union(spans)
        for other_start, other_end in _union(others)
    )


def exposed_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """Time between the first and the last computation in which nothing was computed, by what it was spent on.

    A computation that was enqueued in time waits for a copy in, or for what that copy waits for: an update. One that was
    enqueued late was held up by the host: by gradients that had to land before the step could end, or by Python.

    Returns:
        Seconds by cause: ``copy_in``, ``update``, ``copy_out``, and ``host`` for the rest.
    """
    updates = select(spans, *UPDATES)
    copies_in = [s for s in spans if s.op.stream == Stream.COPY_IN and s.op.kind not in UPDATES]
    copies_out = [s for s in spans if s.op.stream == Stream.COPY_OUT]
    waiting = {"copy_in": copies_in, "update": updates, "copy_out": copies_out}
    late = {"copy_out": copies_out}
    found = dict.fromkeys([*waiting, "host"], 0.0)
    computed = sorted((s for s in spans if s.op.stream == Stream.COMPUTE), key=lambda s: s.start)
    for before, span in pairwise(computed):
        enqueued = min(max(span.reached, before.end), span.start)
        _divide((before.end, enqueued), late, found)
        _divide((enqueued, span.start), waiting, found)
    return found


def _divide(gap: Interval, causes: Mapping[str, Sequence[Span]], found: dict[str, float]) -> None:
    """Give each part of a gap to the first cause that was busy in it."""
    left = [gap] if gap[0] < gap[1] else []
    for cause, spans in causes.items():
        remaining = _without(left, _union(spans))
        found[cause] += _length(left) - _length(remaining)
        left = remaining
    found["host"] += _length(left)


def _without(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What of some intervals lies in none of the others."""
    for begin, end in others:
        intervals = [
            part
            for start, stop in intervals
            for part in ((start, min(stop, begin)), (max(start, end), stop))
            if part[0] < part[1]
        ]
    return list(intervals)


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - start for start, end in intervals)


def _union(spans: Sequence[Span]) -> list[Interval]:
    """Disjoint intervals that cover the same time."""
    merged: list[Interval] = []
    for span in sorted(spans, key=lambda s: s.start):
        if merged and span.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end))
        else:
            merged.append((span.start, span.end))
    return merged
