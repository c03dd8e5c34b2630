"""Write a run as one HTML page that is self-contained and works offline."""

import base64
import gzip
import hashlib
import json
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from horizon_lm.config import RunConfig
from horizon_lm.errors import ConfigError
from horizon_lm.quantities import counted, format_bytes
from horizon_lm.report import run_files
from horizon_lm.report.figures import (
    DARK,
    loss_figure,
    preferences_figure,
    run_memory_figure,
    tokens_figure,
    waterfall_figure,
)
from horizon_lm.report.html import Child, absent, chart, code, data, document, missing, node, nothing_logged, table
from horizon_lm.report.run_files import Place, Run, load_run
from horizon_lm.report.step_sections import step_memory_section, timeline_section
from horizon_lm.report.summary import count, summarise

PLOTLY = "plotly-basic.min.js"  # of the npm package plotly.js-basic-dist-min; the bundle in the Python package has three times the size


def loss_section(run: Run) -> list[Element]:
    """Return the figure of loss and learning rate."""
    if run.metrics is None:
        return [missing(run_files.METRICS)]
    if not run.metrics.losses and not run.metrics.evaluations:
        return [nothing_logged()]
    return [chart("loss", loss_figure(run.metrics))]


def preferences_section(run: Run) -> list[Element]:
    """Return the figure of reward margins and accuracy; empty for runs that do not learn preferences."""
    if run.metrics is None or not run.metrics.of_preferences:
        return []
    return [chart("preferences", preferences_figure(run.metrics))]


def samples_section(run: Run) -> list[Element]:
    """Return a table of answers for each sample prompt."""
    answers: dict[str, list[list[Child]]] = {}
    for line in run.samples or ():
        for each in line.samples:
            answers.setdefault(each.prompt, []).append([f"{line.step:,}", each.answer or "(an empty answer)"])
    parts = ((node("h3", prompt), table(["step", "answer"], rows, "samples")) for prompt, rows in answers.items())
    return [element for part in parts for element in part]


def tokens_section(run: Run) -> list[Element]:
    """Return the figure of tokens per second."""
    if run.metrics is None:
        return [missing(run_files.METRICS)]
    return [chart("tokens", tokens_figure(run.metrics))] if run.metrics.training else [nothing_logged()]


def run_memory_section(run: Run) -> list[Element]:
    """Return the figure of memory over the run, compared with the plan."""
    notes = [missing(run_files.PLAN)] if run.plan is None else []
    if run.metrics is None:
        return [missing(run_files.METRICS), *notes]
    if not run.metrics.training:
        return [nothing_logged(), *notes]
    return [*notes, chart("run-memory", run_memory_figure(run.metrics, run.plan))]


def bytes_section(run: Run) -> list[Element]:
    """Return the planned items of host, device and disk as figures and tables."""
    if run.plan is None:
        return [missing(run_files.PLAN)]
    places = {"Host": run.plan.host, "Device": run.plan.device}
    if run.plan.buffers is not None and run.plan.buffers.is_used:
        places["Buffers, part of the device"] = run.plan.buffers
    places["Disk"] = run.plan.disk
    return [part for name, place in places.items() for part in _place(name, place)]


def _place(name: str, place: Place) -> list[Element]:
    heading = node("h3", f"{name}: {format_bytes(place.bytes)}")
    if not place.is_used:
        return [heading, absent("No memory is planned here. On a CPU, device memory is part of host memory.")]
    rows = [[item.name, format_bytes(item.bytes), item.note] for item in place.items]
    details = node("details", node("summary", "as a table"), table(["item", "bytes", "note"], rows, "bytes"))
    figure = chart(f"bytes-{name.partition(',')[0].lower()}", waterfall_figure(place))
    return [heading, node("p", _available(place), class_="note"), figure, details]


def _available(place: Place) -> str:
    """Return the available bytes and their limits as text."""
    if place.available is None:
        return "The available bytes are not known."
    limits = "; ".join(f"{limit.name} {format_bytes(limit.bytes)}" for limit in place.limits)
    return f"Available: {format_bytes(place.available)}{f' ({limits})' if limits else ''}."


def settings_section(run: Run) -> list[Element]:
    """Return all settings of the run, and the reasons for the settings chosen by the plan."""
    settings = run.settings or {}
    planned, reasons = ({}, []) if run.plan is None else (run.plan.run.settings, run.plan.run.reasons)
    parts = [missing(run_files.SETTINGS)] if run.settings is None else []
    if reasons:
        parts.append(node("p", "Reasons for the settings chosen by the plan:"))
        parts.append(node("ul", *(node("li", reason) for reason in reasons)))
    rows = [[_name(name), _values(name, settings, planned)] for name in dict.fromkeys([*settings, *planned])]
    if rows:
        parts.append(table(["setting", "value"], rows, "settings"))
    return parts


def _name(name: str) -> Element:
    """Return the name of a setting with its description, if this version has the setting."""
    field = RunConfig.model_fields.get(name)
    description = "" if field is None else field.description or ""
    return node("div", node("small", description), node("code", name))


def _values(name: str, settings: dict[str, Any], planned: dict[str, Any]) -> Element:
    values: list[Child] = [node("code", _text(settings[name]))] if name in settings else []
    if name in planned and (name not in settings or planned[name] != settings[name]):
        values.append(node("small", "planned: ", node("code", _text(planned[name]))))
    return node("div", *values)


def _text(value: Any) -> str:
    """Return a value as written in a run file."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return ", ".join(_text(each) for each in value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_text(each)}" for key, each in value.items()) + "}"
    return str(value)


_SECTIONS = {
    "Loss and learning rate": loss_section,
    "Preferences": preferences_section,
    "Sample answers": samples_section,
    "Tokens per second": tokens_section,
    "Memory over the run": run_memory_section,
    "Timeline of a step": timeline_section,
    "Memory over a step": step_memory_section,
    "Where the bytes go": bytes_section,
    "Settings": settings_section,
}


def write_report(folder: Path, output: Path) -> None:
    """Write the page of a run's folder.

    Raises:
        ConfigError: the folder has no files of a run, one of them is invalid, or the page cannot be written.
    """
    page = build_page(load_run(folder))
    try:
        output.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror or error}; choose another --output") from error


def build_page(run: Run) -> str:
    """Return the page of a run as text."""
    name, about = _about(run)
    plotly, script = _asset(PLOTLY), _asset("page.js")
    contents = {title: section(run) for title, section in _SECTIONS.items()}
    sections = [node("section", node("h2", title), *parts) for title, parts in contents.items() if parts]
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", http_equiv="Content-Security-Policy", content=_policy([plotly, script])),
        node("meta", name="viewport", content="width=device-width, initial-scale=1"),
        node("title", f"{name}: report of a run"),
        code("style", _asset("page.css")),
    )
    body = node(
        "body",
        node("header", node("h1", name), node("p", about, class_="about"), _strip(run)),
        node("noscript", node("p", "The figures need JavaScript; the tables do not.")),
        *sections,
        data("dark-colours", json.dumps(DARK)),
        data("plotly", json.dumps(_compress(plotly))),
        code("script", script),
    )
    return document(head, body)


def _about(run: Run) -> tuple[str, str]:
    """Return the title of the page, which is the name of the run, and a line about model, step, machine and date."""
    settings = run.settings or {}
    model_name, precision = settings.get("model_name_or_path"), settings.get("precision")
    facts = []
    if run.plan is not None:
        model = run.plan.model
        model_name, precision = model.name, run.plan.run.precision
        active = "" if model.active_parameters == model.parameters else f", {count(model.active_parameters)} active"
        facts.append(f"{count(model.parameters)} parameters{active}")
        facts.append(counted(model.num_blocks, "block"))
        facts.append(f"{run.plan.run.rows} × {run.plan.run.length:,} tokens a step")
    if precision is not None:
        facts.append(str(precision))
    if run.plan is not None and run.plan.hardware is not None and "name" in run.plan.hardware:
        facts.append(str(run.plan.hardware["name"]))
    if run.metrics is not None:
        facts.append(f"{run.metrics.written:%Y-%m-%d %H:%M %Z}")
    if model_name is not None:
        name = str(model_name)
        facts.insert(0, Path(name).name if name.startswith(("/", ".", "~")) else name)
    return str(settings.get("run_name") or run.folder.resolve().name), " · ".join(facts)


def _strip(run: Run) -> Element:
    """Return the summary as a strip of boxes."""
    boxes = [
        node("div", node("dt", each.name), node("dd", each.value, node("small", each.comparison)))
        for each in summarise(run)
    ]
    return node("dl", *boxes, class_="summary")


def _policy(scripts: list[str]) -> str:
    """Return a content security policy that lets browsers run only the page's own scripts and fetch nothing."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _compress(script: str) -> str:
    """Compress a script to base64-encoded gzip, which page.js unpacks: 0.5 MB for Plotly instead of 1.2."""
    return base64.b64encode(gzip.compress(script.encode(), mtime=0)).decode()


def _asset(name: str) -> str:
    return (resources.files("horizon_lm.report") / "assets" / name).read_text(encoding="utf-8")
