"""The content of ``trace.json`` and ``predicted_trace.json``: the operations of a few steps."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from horizon_lm.errors import ConfigError
from horizon_lm.schedule.ops import SOMETIMES, Kind, Op, Stream
from horizon_lm.schedule.trace import Span, busy_seconds

_COUNTERS = {"device bytes": "device", "host bytes": "host"}
_SECONDS = 1e-6  # seconds per microsecond, the unit of time in these files


@dataclass(frozen=True, slots=True)
class Step:
    """A traced step: its number, start and end, in seconds."""

    number: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Part:
    """The part of an operation inside a step, in seconds from the step's start, and the length of the whole
    operation.
    """

    span: Span
    seconds: float


@dataclass(slots=True)
class TraceFile:
    """The content of a trace; all times are in seconds on one clock.

    Attributes:
        spans: the operations.
        memory: ``device`` and ``host``: moments, and the bytes in use since then.
        steps: the traced steps.
    """

    spans: list[Span] = field(default_factory=list)
    memory: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {"device": [], "host": []})
    steps: list[Step] = field(default_factory=list)

    def median_step(self) -> Step | None:
        """Return the step of median length, or the shorter of two; None if nothing was traced."""
        by_length = sorted(self.steps, key=lambda step: step.seconds)
        return by_length[(len(by_length) - 1) // 2] if by_length else None

    def within(self, step: Step) -> list[Part]:
        """Return the operations in a step, cut off at its start and end."""
        return [
            Part(_cut(span, step), span.end - span.start)
            for span in self.spans
            if span.start < step.end and span.end > step.start
        ]

    def memory_within(self, place: str, step: Step) -> list[tuple[float, float]]:
        """Return the bytes in use from the start of a step to its end."""
        before = [bytes_ for moment, bytes_ in self.memory[place] if moment <= step.start]
        inside = [(m - step.start, b) for m, b in self.memory[place] if step.start < m < step.end]
        points = ([(0.0, before[-1])] if before else []) + inside
        return [*points, (step.seconds, points[-1][1])] if points else []


def _cut(span: Span, step: Step) -> Span:
    start, end = max(span.start, step.start), min(span.end, step.end)
    reached = min(max(span.reached, step.start), start)
    return replace(span, start=start - step.start, end=end - step.start, reached=reached - step.start)


def busy_shares(spans: Sequence[Span], seconds: float) -> dict[str, float]:
    """Return the share of a step in which each stream is busy."""
    used = {s.op.stream for s in spans}  # few steps write a checkpoint
    streams = [stream for stream in Stream if stream in used or stream not in SOMETIMES]
    return {stream: busy_seconds([s for s in spans if s.op.stream == stream]) / seconds for stream in streams}


@dataclass(frozen=True, slots=True)
class TraceContent:
    """The content of the file, with the field names of Chrome's trace format."""

    traceEvents: list[dict[str, Any]]  # noqa: N815
    otherData: dict[str, Any] = field(default_factory=dict)  # noqa: N815


def make_trace(content: TraceContent, path: Path) -> TraceFile:
    """Return what a file says. Raise ConfigError with the event that is invalid."""
    trace = TraceFile()
    rows: dict[int, Stream] = {}
    place = ""
    try:
        for number, event in enumerate(content.traceEvents):
            place = f"traceEvents[{number}]"
            _add(trace, event, rows)
        for points in trace.memory.values():
            points.sort(key=lambda point: point[0])
        place = "otherData.steps"
        trace.steps = _steps(content.otherData, trace.spans)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path}: {place} is invalid ({error!r})") from error
    return trace


def _add(trace: TraceFile, event: dict[str, Any], rows: dict[int, Stream]) -> None:
    """Add an event. ``rows`` maps rows to streams; the file names rows before their events."""
    if event["ph"] == "M" and event["name"] == "thread_name":
        rows[event["tid"]] = Stream(event["args"]["name"])
    elif event["ph"] == "X":
        kind = Kind(event["cat"])
        unit = event["name"].removeprefix(kind).strip()
        start = float(event["ts"]) * _SECONDS
        end = start + float(event["dur"]) * _SECONDS
        reached = float(event.get("args", {}).get("reached", event["ts"])) * _SECONDS
        trace.spans.append(Span(Op(kind, unit, rows[event["tid"]]), start=start, end=end, reached=reached))
    elif event["ph"] == "C" and event["name"] in _COUNTERS:
        point = (float(event["ts"]) * _SECONDS, float(event["args"]["bytes"]))
        trace.memory[_COUNTERS[event["name"]]].append(point)


def _steps(other: dict[str, Any], spans: Sequence[Span]) -> list[Step]:
    """Return the steps named in the file; if no steps are named, the whole trace is one step."""
    steps = [
        Step(int(each["step"]), float(each["start"]) * _SECONDS, float(each["end"]) * _SECONDS)
        for each in other.get("steps", [])
    ]
    if any(step.seconds <= 0 for step in steps):
        raise ValueError("a step ends before it begins")
    if not steps and spans:
        steps = [Step(1, min(span.start for span in spans), max(span.end for span in spans))]
    return steps
