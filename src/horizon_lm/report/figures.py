"""Figures of a run and of one step, in a common style for light and dark pages."""

import html
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from plotly.graph_objects import Bar, Figure, Scatter
from plotly.subplots import make_subplots

from horizon_lm.quantities import format_bytes
from horizon_lm.report.run_files import MetricsFile, Place, Plan
from horizon_lm.report.trace_file import Part
from horizon_lm.schedule.ops import SOMETIMES, STREAM_TITLES, Kind

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

TEXT, MUTED, GRID, PAGE = "#24292f", "#656d76", "#e4e7eb", "#ffffff"
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, sans-serif'
FIRST, SECOND, THIRD, LIMIT = "#4c78a8", "#f58518", "#54a24b", "#e45756"
DARK = {TEXT: "#d5dbe2", MUTED: "#98a2ad", GRID: "#30363d", PAGE: "#151a21", FIRST: "#6699cc"}

# Copies in are blue, computation is green and orange, copies out are red and mauve, updates are yellow.
KINDS = {
    Kind.STREAM_IN: "#4c78a8",
    Kind.FETCH: "#88bde6",
    Kind.FORWARD: "#54a24b",
    Kind.BACKWARD: "#f58518",
    Kind.STAGE: "#9d755d",
    Kind.OFFLOAD: "#b279a2",
    Kind.STREAM_OUT: "#e45756",
    Kind.UPDATE: "#d0a829",
    Kind.UPDATE_ROWS: "#8d7518",
    Kind.SAVE: "#79706e",
}

NOT_FROM_ZERO = "axis not from 0"


def apply_style(figure: "Figure", height: int, top: int = 32, right: int = 24) -> "Figure":
    """Set the fonts, axes and margins of a finished figure. The upper 28 pixels of ``top`` are for Plotly's buttons."""
    axis: dict[str, Any] = {
        "gridcolor": GRID, "linecolor": GRID, "zeroline": False, "showline": True, "ticks": "outside", "tickcolor": GRID,
        "automargin": True, "title_font_size": 13, "spikecolor": MUTED, "spikethickness": 1,
    }  # fmt: skip
    figure.update_layout(
        template="none",
        height=height,
        font={"family": FONT, "size": 13, "color": TEXT},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        margin={"l": 70, "r": right, "t": top, "b": 48},
        legend={"orientation": "h", "x": 0, "xanchor": "left", "yref": "container", "y": 0, "yanchor": "bottom"},
        hoverlabel={"bgcolor": PAGE, "bordercolor": GRID, "font": {"family": FONT, "color": TEXT}, "align": "left"},
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": MUTED, "activecolor": TEXT},
    )
    figure.update_xaxes(**axis)
    figure.update_yaxes(title_standoff=12, **axis)
    return figure


def as_text(text: str, width: int | None = None) -> str:
    """Escape text for a figure, where Plotly reads angle brackets as markup; with ``width``, also wrap it."""
    lines = [text] if width is None else textwrap.wrap(text, width) or [""]
    return "<br>".join(html.escape(line, quote=False) for line in lines)


def byte_scale(values: Iterable[float]) -> tuple[float, str]:
    """Return the unit of an axis for these numbers of bytes: its size and its name."""
    largest = max(values, default=0.0)
    unit, name = 1.0, "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if largest < unit * 1024:
            break
        unit, name = unit * 1024, larger
    return unit, name


def time_scale(seconds: float) -> tuple[float, str]:
    """Return the unit of an axis of this length: its seconds and its name."""
    return (1.0, "s") if seconds >= 10 else (1e-3, "ms")


_MAX_MARKED_POINTS = 60  # lines with more points have no markers


def loss_figure(metrics: MetricsFile) -> Figure:
    """Plot training loss and eval loss above the learning rate."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.7, 0.3], vertical_spacing=0.06)
    steps = [line.step for line in metrics.training]
    figure.add_trace(_line("training", steps, [line.loss for line in metrics.training], FIRST, "%{y:.4f}"), 1, 1)
    if metrics.evaluations:
        eval_steps = [each.step for each in metrics.evaluations]
        points = _line("eval", eval_steps, [each.eval_loss for each in metrics.evaluations], SECOND, "%{y:.4f}")
        figure.add_trace(points.update(_EVAL_STYLE), 1, 1)
    rates = [line.learning_rate for line in metrics.training]
    figure.add_trace(_line("learning rate", steps, rates, THIRD, "%{y:.3g}"), 2, 1)
    figure.update_yaxes(title=f"{metrics.loss_title}<br>({NOT_FROM_ZERO})", row=1, col=1)
    figure.update_yaxes(title="learning rate", exponentformat="e", rangemode="tozero", nticks=4, row=2, col=1)
    _set_steps(figure, metrics, rows=2)
    figure.update_layout(hovermode="x unified")
    return apply_style(figure, 440)


def preferences_figure(metrics: MetricsFile) -> Figure:
    """Plot reward margins above accuracy: the share of pairs whose chosen answer has the higher reward."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.6, 0.4], vertical_spacing=0.08)
    for name, lines, colour in (("training", metrics.training, FIRST), ("eval", metrics.evaluations, SECOND)):
        if not lines:
            continue
        steps = [line.step for line in lines]
        for row, values in ((1, [line.margin for line in lines]), (2, [line.accuracy for line in lines])):
            trace = _line(name, steps, values, colour, "%{y:.3f}")
            if name == "eval":
                trace.update(_EVAL_STYLE)
            figure.add_trace(trace.update(showlegend=row == 1), row, 1)
    figure.update_yaxes(title="reward margin", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="accuracy", range=[-0.05, 1.05], row=2, col=1)
    _set_steps(figure, metrics, rows=2)
    figure.update_layout(hovermode="x unified")
    return apply_style(figure, 440)


def tokens_figure(metrics: MetricsFile) -> Figure:
    """Plot the tokens per second, for all tokens and for trained tokens."""
    steps = [line.step for line in metrics.training]
    total = [line.tokens_per_second for line in metrics.training]
    trained = [line.trained_tokens_per_second for line in metrics.training]
    figure = Figure([
        _line("all tokens", steps, total, FIRST, "%{y:,.1f}"),
        _line("trained tokens", steps, trained, SECOND, "%{y:,.1f}"),
    ])  # fmt: skip
    figure.update_layout(hovermode="x unified")
    figure.update_yaxes(title="tokens per second", rangemode="tozero")
    _set_steps(figure, metrics, rows=1)
    return apply_style(figure, 320)


def run_memory_figure(metrics: MetricsFile, plan: Plan | None) -> Figure:
    """Plot host and device memory over the run, with lines at the planned and available bytes."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.1)
    steps = [line.step for line in metrics.training]
    host, device = (None, None) if plan is None else (plan.host, plan.device_peak)
    rows = [
        (1, "host memory", "resident", FIRST, [line.host_bytes for line in metrics.training], host),
        (2, "device memory", "peak of buffers", SECOND, [line.device_bytes_peak for line in metrics.training], device),
    ]
    for row, title, quantity, colour, used, place in rows:
        unit, name = byte_scale(_axis_values(used, place))
        trace = _line(f"{title}, {quantity}", steps, [value / unit for value in used], colour, f"%{{y:,.3f}} {name}")
        figure.add_trace(trace, row, 1)
        _add_limits(figure, row, used, place, unit)
        figure.update_yaxes(title=f"{title}, {name}", rangemode="tozero", row=row, col=1)
    _set_steps(figure, metrics, rows=2)
    figure.update_layout(hovermode="x unified")
    return apply_style(figure, 520, top=48)


def waterfall_figure(place: Place) -> Figure:
    """Plot how the items of a plan add up, with a line at the available bytes. Bars are numbered, because names may
    repeat.
    """
    largest = max(place.bytes, sum(item.bytes for item in place.items), 1)
    unit, name = byte_scale([largest])
    sizes = [item.bytes for item in place.items] + [place.bytes]
    starts = [*accumulate(sizes[:-2], initial=0), 0] if place.items else [0]
    texts = [f"{item.name}: {format_bytes(item.bytes)}. {item.note}" for item in place.items]
    figure = Figure(
        Bar(  # not Waterfall, which Plotly's basic bundle does not have
            orientation="h",
            y=list(range(len(sizes))),
            base=[start / unit for start in starts],
            x=[size / unit for size in sizes],
            hovertext=[as_text(text, 60) for text in [*texts, f"total: {format_bytes(place.bytes)}"]],
            hovertemplate="%{hovertext}<extra></extra>",
            marker={"color": [FIRST] * len(place.items) + [SECOND]},
            width=0.7,
        )
    )
    names = [as_text(item.name, 34) for item in place.items] + ["total"]
    rows = list(range(len(sizes)))
    figure.update_yaxes(tickvals=rows, ticktext=names, range=[len(sizes) - 0.5, -0.5], showgrid=False)
    for row, size in enumerate(sizes):  # sizes are a column at the right, away from bars and lines
        figure.add_annotation(
            text=format_bytes(size), xref="paper", x=1, xanchor="left", xshift=10, y=row, showarrow=False
        )
    end, top = largest, 32
    if place.available is not None and place.available <= 2 * largest:
        end, top = max(largest, place.available), 48  # leave room for the label of the line
        text = f"available {format_bytes(place.available)}"
        figure.add_vline(
            place.available / unit, line={"color": LIMIT, "width": 1.5},
            annotation={"text": text, "font": {"color": LIMIT, "size": 12}, "yanchor": "bottom", "xanchor": "right"},
            annotation_position="top left",
        )  # fmt: skip
    figure.update_xaxes(title=name, range=[0, end * 1.02 / unit])
    figure.update_layout(showlegend=False, meta={"bars": True})  # page.js moves the names on narrow screens
    return apply_style(figure, 34 * len(sizes) + 72 + top, top, right=100)


def _set_steps(figure: Figure, metrics: MetricsFile, rows: int) -> None:
    """Give all figures of a run the same axis of steps."""
    last = max([1, *(line.step for line in metrics.training), *(each.step for each in metrics.evaluations)])
    figure.update_xaxes(
        range=[-0.01 * last, 1.01 * last], dtick=1 if last < 10 else None, unifiedhovertitle_text="step %{x}"
    )
    figure.update_xaxes(title="step", row=rows if rows > 1 else None, col=1 if rows > 1 else None)


_EVAL_STYLE = {"mode": "lines+markers", "line_dash": "dot", "marker": {"size": 9, "symbol": "diamond"}}


def _line(name: str, steps: Sequence[int], values: Sequence[float | None], colour: str, value_format: str) -> Scatter:
    return Scatter(
        name=name,
        x=list(steps),
        y=list(values),
        mode="lines+markers" if len(steps) <= _MAX_MARKED_POINTS else "lines",
        line={"color": colour, "width": 2},
        marker={"size": 5, "color": colour},
        hovertemplate=f"{value_format}<extra>{name}</extra>",
    )


def _axis_values(used: Sequence[float], place: Place | None) -> list[float]:
    """Return the values that an axis must include. A limit far above the others is left out, as it would
    flatten them.
    """
    if place is None:
        return list(used)
    shown = [*used, place.bytes]
    near = place.available is not None and place.available <= 2 * max(shown)
    return [*shown, place.available] if near and place.available is not None else shown


def _add_limits(figure: Figure, row: int, used: Sequence[float], place: Place | None, unit: float) -> None:
    """Add lines at the planned and available bytes, or a note if the available bytes are far above."""
    if place is None:
        return
    figure.add_hline(
        place.bytes / unit, row=row, col=1, line={"color": MUTED, "dash": "dash", "width": 1.5},
        annotation={"text": f"planned {format_bytes(place.bytes)}", "font": {"color": MUTED, "size": 12}},
        annotation_position="top left",
    )  # fmt: skip
    if place.available is None:
        return
    text = f"available {format_bytes(place.available)}"
    if place.available in _axis_values(used, place):
        figure.add_hline(
            place.available / unit, row=row, col=1, line={"color": LIMIT, "width": 1.5},
            annotation={"text": text, "font": {"color": LIMIT, "size": 12}}, annotation_position="top right",
        )  # fmt: skip
    else:
        number = "" if row == 1 else str(row)
        figure.add_annotation(
            text=f"↑ {text}", xref=f"x{number} domain", yref=f"y{number} domain", x=1, y=1, xanchor="right",
            yanchor="bottom", showarrow=False, font={"color": LIMIT, "size": 12},
        )  # fmt: skip


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


def timeline_figure(views: Sequence[StepView]) -> Figure:
    """Plot operations as bars, one row per stream. Each kind of operation is one Plotly trace, which keeps it fast."""
    longest = max(view.seconds for view in views)
    unit, name = time_scale(longest)
    figure = make_subplots(
        rows=len(views), cols=1, shared_xaxes=True, vertical_spacing=0.12,
        subplot_titles=[view.title for view in views],
    )  # fmt: skip
    figure.update_annotations(x=0, xanchor="left", font={"size": 14})
    used = {part.span.op.stream for view in views for part in view.parts}
    # A row for checkpoints only if one was being written, and for collectives if there are several ranks.
    titles = {stream: title for stream, title in STREAM_TITLES.items() if stream in used or stream not in SOMETIMES}
    rows = {stream: row for row, stream in enumerate(titles)}
    in_legend = set()
    for number, view in enumerate(views, start=1):
        for kind, colour in KINDS.items():
            parts = [part for part in view.parts if part.span.op.kind == kind]
            if not parts:
                continue
            bars = Bar(
                name=str(kind), legendgroup=str(kind), showlegend=kind not in in_legend, orientation="h", width=0.8,
                y=[rows[part.span.op.stream] for part in parts],
                base=[round(part.span.start / unit, 5) for part in parts],
                x=[round((part.span.end - part.span.start) / unit, 5) for part in parts],
                customdata=[round(part.seconds * 1e3, 4) for part in parts],
                hovertext=[as_text(str(part.span.op)) for part in parts],
                hovertemplate=f"%{{hovertext}}: %{{customdata:,.3f}} ms<br>from %{{base:,.2f}} {name}<extra></extra>",
                marker={"color": colour, "line": {"color": PAGE, "width": 0.4}},
            )  # fmt: skip
            in_legend.add(kind)
            figure.add_trace(bars, number, 1)
        figure.add_vline(view.seconds / unit, row=number, col=1, line={"color": MUTED, "dash": "dot", "width": 1.5})
    figure.update_layout(barmode="overlay", bargap=0.2)
    figure.update_yaxes(
        tickvals=list(rows.values()), ticktext=list(titles.values()), range=[len(rows) - 0.5, -0.5], fixedrange=True,
        showgrid=False,
    )  # fmt: skip
    figure.update_xaxes(range=[0, longest * 1.01 / unit])
    figure.update_xaxes(title=f"{name} from the step's start", row=len(views), col=1)
    return apply_style(figure, 190 * len(views) + 126, top=48)


def step_memory_figure(views: Sequence[StepView]) -> Figure:
    """Plot the bytes in use on the device and on the host over a step."""
    places = [place for place in ("device", "host") if any(view.memory[place] for view in views)]
    longest = max(view.seconds for view in views)
    time_unit, time_name = time_scale(longest)
    figure = make_subplots(rows=len(places), cols=1, shared_xaxes=True, vertical_spacing=0.1)
    for row, place in enumerate(places, start=1):
        unit, name = byte_scale(used for view in views for _, used in view.memory[place])
        for view in views:
            points = view.memory[place]
            trace = Scatter(
                name=view.name, legendgroup=view.name, showlegend=row == 1, mode="lines",
                x=[moment / time_unit for moment, _ in points],
                y=[used / unit for _, used in points],
                hovertext=[format_bytes(used) for _, used in points],
                hovertemplate="%{hovertext}",
                line={"color": view.colour, "width": 1.5, "shape": "hv"},
            )  # fmt: skip
            figure.add_trace(trace, row, 1)
        figure.update_yaxes(title=f"{place}, {name}<br>({NOT_FROM_ZERO})", row=row, col=1)
    figure.update_xaxes(range=[0, longest * 1.01 / time_unit], unifiedhovertitle_text=f"%{{x:,.2f}} {time_name}")
    figure.update_xaxes(title=f"{time_name} from the step's start", row=len(places), col=1)
    figure.update_layout(hovermode="x unified")
    return apply_style(figure, 200 * len(places) + 90)
