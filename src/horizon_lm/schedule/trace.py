"""What really happened in a step, in the words of the schedule."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from horizon_lm.schedule.ops import Kind, Op, Stream


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


class Trace:
    """Spans in the order in which they ended. Lists in Python may be appended to from several threads."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    def add(self, op: Op, start: float, end: float, reached: float | None = None) -> None:
        self.spans.append(Span(op, start, end, start if reached is None else reached))

    def write(self, path: Path) -> None:
        """A file for chrome://tracing or Perfetto, with one row for each stream."""
        rows = {stream: row for row, stream in enumerate(Stream)}
        names = [
            {"ph": "M", "name": "thread_name", "pid": 0, "tid": row, "args": {"name": str(stream)}}
            for stream, row in rows.items()
        ]
        first = min((span.start for span in self.spans), default=0.0)
        events = [
            {
                "ph": "X", "name": str(span.op), "cat": str(span.op.kind), "pid": 0, "tid": rows[span.op.stream],
                "ts": (span.start - first) * 1e6, "dur": (span.end - span.start) * 1e6,
            }
            for span in self.spans
        ]  # fmt: skip
        path.write_text(json.dumps({"traceEvents": names + events}))


def select(spans: Iterable[Span], *kinds: Kind) -> list[Span]:
    """The spans of these kinds of operations."""
    return [span for span in spans if span.op.kind in kinds]


def busy_seconds(spans: Sequence[Span]) -> float:
    """Time in which at least one of the spans was running."""
    return sum(end - start for start, end in _union(spans))


def overlap_seconds(spans: Sequence[Span], others: Sequence[Span]) -> float:
    """Time in which at least one of ``spans`` and at least one of ``others`` were running."""
    return sum(
        max(0.0, min(end, other_end) - max(start, other_start))
        for start, end in _union(spans)
        for other_start, other_end in _union(others)
    )


def _union(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Disjoint intervals that cover the same time."""
    merged: list[tuple[float, float]] = []
    for span in sorted(spans, key=lambda s: s.start):
        if merged and span.start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], span.end))
        else:
            merged.append((span.start, span.end))
    return merged
