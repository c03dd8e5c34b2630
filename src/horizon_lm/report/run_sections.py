"""Sections about the whole run: loss, speed, memory against the plan, and where the bytes go."""

from xml.etree.ElementTree import Element

from horizon_lm.report import load
from horizon_lm.report.figures import (
    loss_figure,
    preferences_figure,
    run_memory_figure,
    tokens_figure,
    waterfall_figure,
)
from horizon_lm.report.html import Child, chart, node, table
from horizon_lm.report.load import Run
from horizon_lm.report.notes import absent, missing, nothing_logged
from horizon_lm.report.plan_file import Place
from horizon_lm.units import format_bytes


def loss_section(run: Run) -> list[Element]:
    """Loss and learning rate."""
    if run.metrics is None:
        return [missing(load.METRICS)]
    if not run.metrics.losses and not run.metrics.evaluations:
        return [nothing_logged()]
    return [chart("loss", loss_figure(run.metrics))]


def preferences_section(run: Run) -> list[Element]:
    """By how much, and how often, the preferred answer wins; nothing for runs that do not learn it."""
    if run.metrics is None or not run.metrics.of_preferences:
        return []
    return [chart("preferences", preferences_figure(run.metrics))]


def samples_section(run: Run) -> list[Element]:
    """The answers to each prompt, step after step; nothing for runs without prompts."""
    answers: dict[str, list[list[Child]]] = {}
    for line in run.samples or ():
        for each in line.samples:
            answers.setdefault(each.prompt, []).append([f"{line.step:,}", each.answer or "(an empty answer)"])
    parts = ((node("h3", prompt), table(["step", "answer"], rows, "samples")) for prompt, rows in answers.items())
    return [element for part in parts for element in part]


def tokens_section(run: Run) -> list[Element]:
    """Tokens per second."""
    if run.metrics is None:
        return [missing(load.METRICS)]
    return [chart("tokens", tokens_figure(run.metrics))] if run.metrics.training else [nothing_logged()]


def run_memory_section(run: Run) -> list[Element]:
    """Memory over the run. Without a plan there is nothing to hold it against."""
    notes = [missing(load.PLAN)] if run.plan is None else []
    if run.metrics is None:
        return [missing(load.METRICS), *notes]
    if not run.metrics.training:
        return [nothing_logged(), *notes]
    return [*notes, chart("run-memory", run_memory_figure(run.metrics, run.plan))]


def bytes_section(run: Run) -> list[Element]:
    """Where the planned bytes go, on the host, the device and the disk."""
    if run.plan is None:
        return [missing(load.PLAN)]
    places = {"Host": run.plan.host, "Device": run.plan.device}
    if run.plan.buffers is not None and run.plan.buffers.is_used:
        places["Buffers, of the device"] = run.plan.buffers
    places["Disk"] = run.plan.disk
    return [part for name, place in places.items() for part in _place(name, place)]


def _place(name: str, place: Place) -> list[Element]:
    heading = node("h3", f"{name}: {format_bytes(place.bytes)}")
    if not place.is_used:
        return [heading, absent("Nothing is planned there: a CPU's device memory, for one, is part of the host's.")]
    rows = [[item.name, format_bytes(item.bytes), item.note] for item in place.items]
    details = node("details", node("summary", "as a table"), table(["item", "bytes", "what it is"], rows, "bytes"))
    figure = chart(f"bytes-{name.partition(',')[0].lower()}", waterfall_figure(place))
    return [heading, node("p", _available(place), class_="note"), figure, details]


def _available(place: Place) -> str:
    """What there is for it, and what it is limited by."""
    if place.available is None:
        return "What is available is not known."
    limits = "; ".join(f"{limit.name} {format_bytes(limit.bytes)}" for limit in place.limits)
    return f"Available: {format_bytes(place.available)}{f' ({limits})' if limits else ''}."
