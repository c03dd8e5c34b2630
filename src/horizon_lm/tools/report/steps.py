"""A step of a run, predicted and measured: the data of its figures, and the tables of streams, stalls and operations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from horizon_lm.common.quantities import Item, format_duration, listed
from horizon_lm.planning.arithmetic.items import overlaps, speeds, stalls, utilization
from horizon_lm.planning.arithmetic.plan_file import PlannedStep
from horizon_lm.runs.palette import FIRST, KINDS, SECOND
from horizon_lm.runs.run_files import Run
from horizon_lm.schedule.ops import CAUSE_TITLES, SOMETIMES, Kind, Stream
from horizon_lm.schedule.trace import Span, Trace, busy_seconds, exposed_seconds
from horizon_lm.tools.report.summary import median_step

Table = tuple[list[str], list[list[str]]]  # headings and rows


@dataclass(frozen=True, slots=True)
class Part:
    """The part of an operation inside a step, in seconds from the step's start, and the length of the whole operation."""

    span: Span
    seconds: float


@dataclass(frozen=True, slots=True)
class StepView:
    """A step to plot.

    Attributes:
        name: Predicted or Measured.
        title: name, length and number of the step.
        colour: colour of its lines.
        seconds: length of the step.
        parts: its operations.
        memory: ``device`` and ``host``: seconds from the start of the step, and the bytes in use since that moment.
    """

    name: str
    title: str
    colour: str
    seconds: float
    parts: Sequence[Part]
    memory: dict[str, list[tuple[float, float]]]


def step_views(run: Run) -> list[StepView]:
    """Return the predicted and the measured step. Without a predicted trace, memory comes from the plan."""
    predicted, measured = _view("Predicted", FIRST, run.predicted), _view("Measured", SECOND, run.measured)
    planned = None if run.plan is None else run.plan.memory
    if planned is not None and planned.seconds and (predicted is None or not any(predicted.memory.values())):
        seconds, parts = (planned.seconds[-1], ()) if predicted is None else (predicted.seconds, predicted.parts)
        memory = {
            place: list(zip(planned.seconds, in_use, strict=True))
            for place, in_use in (("device", planned.device), ("host", planned.host))
        }
        predicted = StepView("Predicted", f"Predicted: {format_duration(seconds)}", FIRST, seconds, parts, memory)
    return [view for view in (predicted, measured) if view is not None]


def _view(name: str, colour: str, trace: Trace | None) -> StepView | None:
    """Return the median step of a trace as it is drawn; None without a step."""
    step = None if trace is None else median_step(trace)
    if trace is None or step is None:
        return None
    number, start, end = step
    which = f", step {number}, the median of {len(trace.steps)}" if len(trace.steps) > 1 else ""
    parts = [
        Part(_cut(span, start, end), span.end - span.start)
        for span in trace.spans
        if span.start < end and span.end > start
    ]
    memory = {place: _memory_within(trace, f"{place} bytes", start, end) for place in ("device", "host")}
    return StepView(name, f"{name}: {format_duration(end - start)}{which}", colour, end - start, parts, memory)


def _cut(span: Span, start: float, end: float) -> Span:
    """Return the part of an operation inside a step, in seconds from the step's start."""
    begun = max(span.start, start)
    reached = min(max(span.reached, start), begun)  # when its stream had finished all earlier operations
    return replace(span, start=begun - start, end=min(span.end, end) - start, reached=reached - start)


def _memory_within(trace: Trace, counter: str, start: float, end: float) -> list[tuple[float, float]]:
    """Return points of the bytes in use within a step: seconds since its start, and the bytes from then on. The last point repeats the
    bytes at the end of the step. The list is empty without samples.
    """
    points = [(moment, sample[counter]) for moment, sample in trace.samples if counter in sample and moment < end]
    at_start = [(0.0, used) for moment, used in points if moment <= start][-1:]
    within = at_start + [(moment - start, used) for moment, used in points if moment > start]
    if not within:
        return []
    _, used_at_end = within[-1]
    return [*within, (end - start, used_at_end)]


def busy_shares(spans: Sequence[Span], seconds: float) -> dict[str, float]:
    """Return the share of a step in which each stream is busy."""
    used = {span.op.stream for span in spans}  # few steps write a checkpoint
    streams = [stream for stream in Stream if stream in used or stream not in SOMETIMES]
    return {stream: busy_seconds([span for span in spans if span.op.stream == stream]) / seconds for stream in streams}


def verdict(planned: PlannedStep) -> str:
    """Return the plan's prediction for a step as text."""
    step, rate, operations = (item.text for item in speeds(planned))
    text = (
        f"The plan expects {step}, {rate} and {operations}, limited by "
        f"{CAUSE_TITLES.get(planned.limited_by, planned.limited_by)}."
    )
    if overlapped := listed(overlaps(planned)):
        text += f" Fully overlapped with compute: {overlapped}."
    if planned.run_seconds is not None:
        text += f" The whole run takes {format_duration(planned.run_seconds)}."
    return text


def stream_tables(views: Sequence[StepView], planned: PlannedStep | None) -> list[Table]:
    """Return the tables of busy streams and of stalls of compute, by cause, with a column for each step."""
    busy, exposed = {}, {}
    if planned is not None:
        busy["predicted"], exposed["predicted"] = utilization(planned.busy), stalls(planned.exposed_seconds)
    for view in views:
        spans, step = [part.span for part in view.parts], view.name.lower()
        busy[step], exposed[step] = utilization(busy_shares(spans, view.seconds)), stalls(exposed_seconds(spans))
    return [_table("busy share of stream", busy), _table("compute stalls, by cause", exposed)] if busy else []


def _table(heading: str, columns: Mapping[str, Sequence[Item]]) -> Table:
    """Return a table with a column of items for each step, and the items of one name in one row."""
    texts = [{item.name: item.text for item in items} for items in columns.values()]
    names = dict.fromkeys(name for column in texts for name in column)
    return [heading, *columns], [[name, *(column.get(name, "none") for column in texts)] for name in names]


def operation_tables(views: Sequence[StepView]) -> list[Table]:
    """Return the table of operations with their total time and number."""
    kinds = {part.span.op.kind for view in views for part in view.parts}
    rows = [[str(kind), *(_total(view, kind) for view in views)] for kind in KINDS if kind in kinds]
    return [(["operations", *(view.name.lower() for view in views)], rows)] if views else []


def _total(view: StepView, kind: Kind) -> str:
    """Return the time within the step of all operations of a kind, and their number, as text."""
    spans = [part.span for part in view.parts if part.span.op.kind == kind]
    return f"{format_duration(sum(span.end - span.start for span in spans))} ({len(spans)})" if spans else "none"
