"""One page about a run: a file that needs nothing else, and asks no other host for anything."""

import base64
import hashlib
import json
from importlib import resources
from pathlib import Path
from xml.etree.ElementTree import Element

from plotly.offline import get_plotlyjs

from horizon_lm.errors import ConfigError
from horizon_lm.report.html import code, data, document, node
from horizon_lm.report.load import Run, load_run
from horizon_lm.report.run_sections import (
    bytes_section,
    loss_section,
    preferences_section,
    run_memory_section,
    samples_section,
    tokens_section,
)
from horizon_lm.report.settings_section import settings_section
from horizon_lm.report.step_sections import step_memory_section, timeline_section
from horizon_lm.report.style import DARK
from horizon_lm.report.summary import count, summarise

_SECTIONS = {
    "Loss and learning rate": loss_section,
    "Preferences": preferences_section,
    "Answers on the way": samples_section,
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
        ConfigError: nothing of a run is in the folder, a file in it is not what its name says, or the page cannot be
            written.
    """
    page = build_page(load_run(folder))
    try:
        output.write_text(page, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ConfigError(f"{output}: {error.strerror or error}; choose another --output") from error


def build_page(run: Run) -> str:
    """The page as text."""
    name, about = _about(run)
    scripts = [get_plotlyjs(), _asset("page.js")]
    made = {title: section(run) for title, section in _SECTIONS.items()}
    sections = [node("section", node("h2", title), *parts) for title, parts in made.items() if parts]
    head = node(
        "head",
        node("meta", charset="utf-8"),
        node("meta", http_equiv="Content-Security-Policy", content=_policy(scripts)),
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
        *(code("script", script) for script in scripts),
    )
    return document(head, body)


def _about(run: Run) -> tuple[str, str]:
    """The name of the run's model, and a line with what else tells the run from others."""
    settings = run.settings or {}
    name, precision = settings.get("model_name_or_path"), settings.get("precision")
    words = []
    if run.plan is not None:
        model = run.plan.model
        name, precision = model.name, run.plan.run.precision
        if name.startswith(("/", ".", "~")):
            name = Path(name).name
        active = "" if model.active_parameters == model.parameters else f", {count(model.active_parameters)} active"
        words.append(f"{count(model.parameters)} parameters{active}")
        words.append(f"{model.num_blocks} blocks")
        words.append(f"{run.plan.run.rows} × {run.plan.run.length:,} tokens a step")
    if precision is not None:
        words.append(str(precision))
    if run.plan is not None and run.plan.hardware is not None and "name" in run.plan.hardware:
        words.append(str(run.plan.hardware["name"]))
    if run.metrics is not None:
        words.append(f"{run.metrics.written:%Y-%m-%d %H:%M %Z}")
    return str(name or run.folder.resolve().name), " · ".join(words)


def _strip(run: Run) -> Element:
    """The figures that matter."""
    boxes = [
        node("div", node("dt", each.name), node("dd", each.value, node("small", each.beside)))
        for each in summarise(run)
    ]
    return node("dl", *boxes, class_="summary")


def _policy(scripts: list[str]) -> str:
    """Only the page's own scripts run, and nothing is fetched from anywhere: browsers see to it."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return (resources.files("horizon_lm.report") / "assets" / name).read_text(encoding="utf-8")
