"""Sections of the page about one step, predicted and measured."""

from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from horizon_lm.report import run_files
from horizon_lm.report.figures import FIRST, KINDS, SECOND, StepView, step_memory_figure, timeline_figure
from horizon_lm.report.html import absent, chart, missing, node, table
from horizon_lm.report.run_files import PlannedStep, Run
from horizon_lm.report.summary import count, duration
from horizon_lm.report.trace_file import Step, TraceFile, busy_shares
from horizon_lm.schedule.ops import CAUSE_TITLES, STREAM_TITLES, Kind
from horizon_lm.schedule.trace import exposed_seconds


def timeline_section(run: Run) -> list[Element]:
    """Return the timeline of the streams, and tables of their utilization."""
    notes = _missing_traces(run)
    planned = None if run.plan is None else run.plan.step
    if planned is not None:
        notes.append(node("p", _verdict(planned), class_="note"))
    views = [view for view in step_views(run) if view.parts]
    figures = [chart("timeline", timeline_figure(views))] if views else []
    return [*notes, *figures, node("div", *_tables(views, planned), class_="tables")]


def step_memory_section(run: Run) -> list[Element]:
    """Return the figure of memory over the step."""
    views = [view for view in step_views(run) if any(view.memory.values())]
    notes = _missing_traces(run)
    if not views:
        return notes or [absent("The traces have no memory counters.")]
    return [*notes, chart("step-memory", step_memory_figure(views))]


def step_views(run: Run) -> list[StepView]:
    """Return the predicted and the measured step. Without a predicted trace, memory comes from the plan."""
    views = [_view("Predicted", FIRST, run.predicted), _view("Measured", SECOND, run.measured)]
    memory = None if run.plan is None else run.plan.memory
    if memory is not None and memory.seconds and (views[0] is None or not any(views[0].memory.values())):
        parts, seconds = ((), memory.seconds[-1]) if views[0] is None else (views[0].parts, views[0].seconds)
        taken = {
            "device": list(zip(memory.seconds, memory.device, strict=True)),
            "host": list(zip(memory.seconds, memory.host, strict=True)),
        }
        views[0] = StepView("Predicted", f"Predicted: {duration(seconds)}", FIRST, seconds, parts, taken)
    return [view for view in views if view is not None]


def _view(name: str, colour: str, trace: TraceFile | None) -> StepView | None:
    step = None if trace is None else trace.median_step()
    if trace is None or step is None:
        return None
    memory = {place: trace.memory_within(place, step) for place in trace.memory}
    return StepView(name, _title(name, step, len(trace.steps)), colour, step.seconds, trace.within(step), memory)


def _title(name: str, step: Step, num_steps: int) -> str:
    which = f", step {step.number}, the median of {num_steps}" if num_steps > 1 else ""
    return f"{name}: {duration(step.seconds)}{which}"


def _missing_traces(run: Run) -> list[Element]:
    notes = []
    for name, trace in ((run_files.PREDICTED, run.predicted), (run_files.MEASURED, run.measured)):
        if trace is None:
            notes.append(missing(name))
        elif not trace.steps:
            notes.append(absent(node("code", name), " has no step: the run ended before the first traced step."))
    return notes


def _verdict(planned: PlannedStep) -> str:
    """Return the plan's prediction for a step as text."""
    text = (
        f"The plan expects {duration(planned.seconds)} per step, {planned.tokens_per_second:,.0f} tokens per second and "
        f"{planned.model_tflops:.3g} model TFLOP/s, limited by {CAUSE_TITLES.get(planned.limited_by, planned.limited_by)}."
    )
    hidden = [
        f"{CAUSE_TITLES.get(cause, cause)} from {count(tokens)}"
        for cause, tokens in planned.hidden_from_tokens.items()
        if tokens is not None
    ]
    if hidden:
        text += f" Fully overlapped with compute: {', '.join(hidden)} tokens per step."
    if planned.run_seconds is not None:
        text += f" The whole run takes {duration(planned.run_seconds)}."
    return text


def _tables(views: Sequence[StepView], planned: PlannedStep | None) -> list[Element]:
    """Return tables of busy streams, stalls of compute, and operations with their total time and number."""
    streams, operations = [], []
    shares: dict[str, Mapping[str, float]] = {"predicted": planned.busy} if planned is not None else {}
    shares |= {view.name.lower(): busy_shares([part.span for part in view.parts], view.seconds) for view in views}
    if shares:
        rows = [
            [words, *(f"{share.get(stream, 0):.1%}" for share in shares.values())]
            for stream, words in STREAM_TITLES.items()
            if any(stream in share for share in shares.values())
        ]
        streams.append(table(["busy share of stream", *shares], rows, "numbers"))
    exposed = {view.name.lower(): exposed_seconds([part.span for part in view.parts]) for view in views}
    if planned is not None and "predicted" not in exposed:
        exposed = {"predicted": dict(planned.exposed_seconds), **exposed}
    if exposed:
        causes = next(iter(exposed.values()))
        rows = [
            [CAUSE_TITLES.get(cause, cause), *(duration(each[cause]) for each in exposed.values())] for cause in causes
        ]
        streams.append(table(["compute stalls, by cause", *exposed], rows, "numbers"))
    if views:
        found = {part.span.op.kind for view in views for part in view.parts}
        rows = [[str(kind), *(_kind_total(view, kind) for view in views)] for kind in KINDS if kind in found]
        operations.append(table(["operations", *(view.name.lower() for view in views)], rows, "numbers"))
    return [node("div", *streams), node("div", *operations)]


def _kind_total(view: StepView, kind: Kind) -> str:
    """Return the total time of the operations of a kind, and their number, as text."""
    spans = [part.span for part in view.parts if part.span.op.kind == kind]
    return f"{duration(sum(span.end - span.start for span in spans))} ({len(spans)})" if spans else "none"
