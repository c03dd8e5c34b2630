"""Figures of a run and of one step, in a common style for light and dark pages."""

import html
import textwrap
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

from plotly.graph_objects import Bar, Figure, Scatter
from plotly.subplots import make_subplots

from horizon_lm.common.quantities import Item, format_bytes
from horizon_lm.planning.arithmetic.plan_file import PlanFile
from horizon_lm.planning.arithmetic.request import Budget
from horizon_lm.runs.palette import (
    FIRST,
    FONT,
    GRID,
    KINDS,
    LIMIT,
    MAX_MARKED_POINTS,
    MUTED,
    PAGE,
    SECOND,
    TEXT,
    THIRD,
    axis_note,
)  # fmt: skip
from horizon_lm.runs.run_files import MetricsFile, Run
from horizon_lm.schedule.ops import SOMETIMES, STREAM_TITLES
from horizon_lm.tools.report.steps import StepView

_EVAL = {"mode": "lines+markers", "line_dash": "dot", "marker": {"size": 9, "symbol": "diamond"}}


def run_figures(run: Run) -> dict[str, Figure]:
    """Return the figures over the steps of a run, by name, without those for which it has no data."""
    metrics, figures = run.metrics, {}
    if metrics is None:
        return {}
    if metrics.losses or metrics.evaluations:
        figures["loss"] = loss_figure(metrics)
    if metrics.of_preferences:
        figures["preferences"] = preferences_figure(metrics)
    if metrics.training:
        figures |= {"tokens": tokens_figure(metrics), "run-memory": run_memory_figure(metrics, run.plan)}
    return figures


def loss_figure(metrics: MetricsFile) -> Figure:
    """Plot training loss and eval loss above the learning rate."""
    steps = [line.step for line in metrics.training]
    loss_lines = [_line("training", steps, [line.loss for line in metrics.training], FIRST, "%{y:.4f}")]
    if metrics.evaluations:
        points = [each.step for each in metrics.evaluations], [each.eval_loss for each in metrics.evaluations]
        loss_lines.append(_line("eval", *points, SECOND, "%{y:.4f}").update(_EVAL))
    rate_line = _line("learning rate", steps, [line.learning_rate for line in metrics.training], THIRD, "%{y:.3g}")
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.7, 0.3], vertical_spacing=0.06)
    _fill_row(figure, 1, loss_lines, **_axis_with_note(metrics.loss_title, loss_lines))
    _fill_row(figure, 2, [rate_line], title="learning rate", exponentformat="e", rangemode="tozero", nticks=4)
    return _finish_over_steps(figure, metrics, 440)


def preferences_figure(metrics: MetricsFile) -> Figure:
    """Plot reward margins above accuracy: the share of pairs whose chosen answer has the higher reward."""
    margins, accuracies = [], []
    for name, lines, colour in (("training", metrics.training, FIRST), ("eval", metrics.evaluations, SECOND)):
        if lines:
            steps, style = [line.step for line in lines], _EVAL if name == "eval" else {}
            margins.append(_line(name, steps, [line.margin for line in lines], colour, "%{y:.3f}").update(style))
            accuracy = _line(name, steps, [line.accuracy for line in lines], colour, "%{y:.3f}")
            accuracies.append(accuracy.update(style).update(showlegend=False))
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, row_heights=[0.6, 0.4], vertical_spacing=0.08)
    _fill_row(figure, 1, margins, title="reward margin", rangemode="tozero")
    _fill_row(figure, 2, accuracies, title="accuracy", range=[-0.05, 1.05])
    return _finish_over_steps(figure, metrics, 440)


def tokens_figure(metrics: MetricsFile) -> Figure:
    """Plot the tokens per second, for all tokens and for trained tokens."""
    steps = [line.step for line in metrics.training]
    total = [line.tokens_per_second for line in metrics.training]
    trained = [line.trained_tokens_per_second for line in metrics.training]
    lines = (("all tokens", total, FIRST), ("trained tokens", trained, SECOND))
    figure = make_subplots(rows=1, cols=1)
    traces = [_line(name, steps, values, colour, "%{y:,.1f}") for name, values, colour in lines]
    _fill_row(figure, 1, traces, title="tokens per second", rangemode="tozero")
    return _finish_over_steps(figure, metrics, 320, last_row=1)


def run_memory_figure(metrics: MetricsFile, plan: PlanFile | None) -> Figure:
    """Plot host memory and device buffers over the run, with lines at the planned and available bytes."""
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.1)
    steps = [line.step for line in metrics.training]
    host, device = (None, None) if plan is None else (plan.host, plan.device_peak)
    rows = [
        ("host memory", "resident", FIRST, [line.host_bytes for line in metrics.training], host),
        ("device buffers", "peak", SECOND, [line.device_bytes_peak for line in metrics.training], device),
    ]
    for row, (title, quantity, colour, used, budget) in enumerate(rows, start=1):
        unit, name = byte_scale([*used, *_limits(used, budget)])
        trace = _line(f"{title}, {quantity}", steps, [value / unit for value in used], colour, f"%{{y:,.3f}} {name}")
        _fill_row(figure, row, [trace], title=f"{title}, {name}", rangemode="tozero")
        _add_limits(figure, row, used, budget, unit)
    return _finish_over_steps(figure, metrics, 520, top=48)


def waterfall_figure(budget: Budget) -> Figure:
    """Plot how the items of a plan add up, with a line at the available bytes. Bars are numbered, because names may repeat."""
    largest = max(budget.bytes, sum(item.bytes for item in budget.items), 1)
    unit, name = byte_scale([largest])
    items = [*budget.table, Item("total", budget.bytes, format_bytes)]
    sizes = [item.value for item in items]
    # Each item begins where the last one ends, and the total at 0.
    starts = [*accumulate(sizes[:-2], initial=0), 0] if budget.items else [0]
    rows = list(range(len(sizes)))
    bars = Bar(
        orientation="h", y=rows, base=[start / unit for start in starts], x=[size / unit for size in sizes], width=0.7,
        hovertext=[as_text(f"{item.name}: {item.text}. {item.note}", 60) for item in items],
        hovertemplate="%{hovertext}<extra></extra>", marker={"color": [FIRST] * len(budget.items) + [SECOND]},
    )  # fmt: skip
    figure = Figure(bars)
    names = [as_text(item.name, 34) for item in items]
    figure.update_yaxes(tickvals=rows, ticktext=names, range=[len(sizes) - 0.5, -0.5], showgrid=False)
    for row, item in enumerate(items):  # sizes are a column at the right, away from bars and lines
        figure.add_annotation(text=item.text, xref="paper", x=1, xanchor="left", xshift=10, y=row, showarrow=False)
    end, top = largest, 32  # bytes at the end of the horizontal axis, and pixels of the margin above it
    if budget.available is not None and budget.available <= 2 * largest:
        end, top = max(largest, budget.available), 48  # leave room for the label of the line
        label = _label(f"available {format_bytes(budget.available)}", LIMIT) | {"yanchor": "bottom", "xanchor": "right"}
        line = {"color": LIMIT, "width": 1.5}
        figure.add_vline(budget.available / unit, line=line, annotation=label, annotation_position="top left")
    figure.update_xaxes(title=name, range=[0, end * 1.02 / unit])
    figure.update_layout(showlegend=False, meta={"bars": True})  # page.js moves the names on narrow screens
    return apply_style(figure, 34 * len(sizes) + 72 + top, top, right=100)


def timeline_figure(views: Sequence[StepView]) -> Figure:
    """Plot operations as bars, one row per stream. Each kind of operation is one Plotly trace, which keeps it fast."""
    longest = max(view.seconds for view in views)
    unit, name = time_scale(longest)
    figure = make_subplots(
        rows=len(views), cols=1, shared_xaxes=True, vertical_spacing=0.12, subplot_titles=[view.title for view in views]
    )
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
    _set_seconds_axis(figure, longest / unit, name, last_row=len(views))
    return apply_style(figure, 190 * len(views) + 126, top=48)


def step_memory_figure(views: Sequence[StepView]) -> Figure:
    """Plot the bytes in use on the device and on the host over a step."""
    places = [place for place in ("device", "host") if any(view.memory[place] for view in views)]
    longest = max(view.seconds for view in views)
    time_unit, time_name = time_scale(longest)
    figure = make_subplots(rows=len(places), cols=1, shared_xaxes=True, vertical_spacing=0.1)
    for row, place in enumerate(places, start=1):
        unit, name = byte_scale(used for view in views for _, used in view.memory[place])
        traces = [
            Scatter(
                name=view.name, legendgroup=view.name, showlegend=row == 1, mode="lines",
                x=[moment / time_unit for moment, _ in view.memory[place]],
                y=[used / unit for _, used in view.memory[place]],
                hovertext=[format_bytes(used) for _, used in view.memory[place]],
                hovertemplate="%{hovertext}", line={"color": view.colour, "width": 1.5, "shape": "hv"},
            )
            for view in views
        ]  # fmt: skip
        _fill_row(figure, row, traces, **_axis_with_note(f"{place}, {name}", traces))
    _set_seconds_axis(figure, longest / time_unit, time_name, last_row=len(places))
    figure.update_xaxes(unifiedhovertitle_text=f"%{{x:,.2f}} {time_name}")
    figure.update_layout(hovermode="x unified")
    return apply_style(figure, 200 * len(places) + 90)


def apply_style(figure: Figure, height: int, top: int = 32, right: int = 24) -> Figure:
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
    exponent = max(0, min(4, (int(max(values, default=0)).bit_length() - 1) // 10))
    return 1024.0**exponent, ("B", "KiB", "MiB", "GiB", "TiB")[exponent]


def time_scale(seconds: float) -> tuple[float, str]:
    """Return the unit of an axis of this length: its seconds and its name."""
    return (1.0, "s") if seconds >= 10 else (1e-3, "ms")


def _line(name: str, steps: Sequence[int], values: Sequence[float | None], colour: str, value_format: str) -> Scatter:
    """Return a line over steps. ``value_format``: Plotly's template for the value at the pointer."""
    return Scatter(
        name=name, x=list(steps), y=list(values), mode="lines+markers" if len(steps) <= MAX_MARKED_POINTS else "lines",
        line={"color": colour, "width": 2}, marker={"size": 5, "color": colour},
        hovertemplate=f"{value_format}<extra>{name}</extra>",
    )  # fmt: skip


def _fill_row(figure: Figure, row: int, traces: Sequence[Scatter], **axis: Any) -> None:
    """Add traces to a row of a figure, and set its vertical axis."""
    figure.add_traces(traces, rows=row, cols=1)
    figure.update_yaxes(row=row, col=1, **axis)


def _axis_with_note(title: str, traces: Sequence[Scatter]) -> dict[str, Any]:
    """Return the properties of an axis that begins at 0 or, if the values lie far from 0, elsewhere with a note about it in the title."""
    note = axis_note(value for trace in traces for value in trace.y)
    return {"title": f"{title}<br>({note})"} if note else {"title": title, "rangemode": "tozero"}


def _finish_over_steps(figure: Figure, metrics: MetricsFile, height: int, last_row: int = 2, top: int = 32) -> Figure:
    """Give a figure of a run its axis of steps, titled below the last row, and the common style. Return the figure."""
    last = max([1, *(line.step for line in metrics.training), *(each.step for each in metrics.evaluations)])
    figure.update_xaxes(
        range=[-0.01 * last, 1.01 * last], dtick=1 if last < 10 else None, unifiedhovertitle_text="step %{x}"
    )
    figure.update_xaxes(title="step", row=last_row, col=1)
    figure.update_layout(hovermode="x unified")
    return apply_style(figure, height, top)


def _set_seconds_axis(figure: Figure, length: float, unit: str, last_row: int) -> None:
    """Set the horizontal axes of a figure of a step; the last row has the title."""
    figure.update_xaxes(range=[0, length * 1.01])
    figure.update_xaxes(title=f"{unit} from the step's start", row=last_row, col=1)


def _limits(used: Sequence[float], budget: Budget | None) -> list[int]:
    """Return the planned and the available bytes that an axis must include. A limit far above the others is left out, as
    it would flatten them.
    """
    if budget is None:
        return []
    if budget.available is not None and budget.available <= 2 * max([*used, budget.bytes]):
        return [budget.bytes, budget.available]
    return [budget.bytes]


def _add_limits(figure: Figure, row: int, used: Sequence[float], budget: Budget | None, unit: float) -> None:
    """Add lines at the planned and available bytes, or a note if the available bytes are far above."""
    if budget is None:
        return
    planned = _label(f"planned {format_bytes(budget.bytes)}", MUTED)
    dashed = {"color": MUTED, "dash": "dash", "width": 1.5}
    figure.add_hline(
        budget.bytes / unit, row=row, col=1, line=dashed, annotation=planned, annotation_position="top left"
    )
    if budget.available is None:
        return
    text = f"available {format_bytes(budget.available)}"
    if len(_limits(used, budget)) > 1:
        line, label = {"color": LIMIT, "width": 1.5}, _label(text, LIMIT)
        figure.add_hline(
            budget.available / unit, row=row, col=1, line=line, annotation=label, annotation_position="top right"
        )
    else:
        number = "" if row == 1 else str(row)
        figure.add_annotation(
            xref=f"x{number} domain", yref=f"y{number} domain", x=1, y=1, xanchor="right", yanchor="bottom",
            showarrow=False, **_label(f"↑ {text}", LIMIT),
        )  # fmt: skip


def _label(text: str, colour: str) -> dict[str, Any]:
    """Return the properties of an annotation."""
    return {"text": text, "font": {"color": colour, "size": 12}}
