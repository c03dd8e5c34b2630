"""Write a run as one HTML page that is self-contained and works offline."""

import base64
import gzip
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from plotly.graph_objects import Figure
from plotly.offline import get_plotlyjs

from horizon_lm.common.quantities import counted, format_bytes, format_count
from horizon_lm.errors import ConfigError
from horizon_lm.planning.arithmetic.render import setting_text
from horizon_lm.runs import run_files
from horizon_lm.runs.config import RunConfig
from horizon_lm.runs.palette import DARK
from horizon_lm.runs.run_files import Run, load_run
from horizon_lm.tools.report.figures import run_figures, step_memory_figure, timeline_figure, waterfall_figure
from horizon_lm.tools.report.steps import operation_tables, step_views, stream_tables, verdict
from horizon_lm.tools.report.summary import summarise

_ORIGINS = {
    run_files.METRICS: "horizon-lm train writes a line every logging_steps steps.",
    run_files.SETTINGS: "horizon-lm train writes it before the first step.",
    run_files.PLAN: "horizon-lm train writes it before the first step.",
    run_files.PREDICTED: "horizon-lm train writes it if horizon-lm doctor has measured this machine.",
    run_files.MEASURED: "horizon-lm train --trace_steps 3 writes it.",
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
    views, planned = step_views(run), None if run.plan is None else run.plan.step
    traced = [view for view in views if view.parts]
    views_with_memory = [view for view in views if any(view.memory.values())]
    figures = run_figures(run)
    if traced:
        figures["timeline"] = timeline_figure(traced)
    if views_with_memory:
        figures["step-memory"] = step_memory_figure(views_with_memory)
    places = _places(run)
    figures |= {f"bytes-{name}": waterfall_figure(budget) for name, _, budget in places}
    plotly, script = get_plotlyjs(), _asset("page.js")
    return _environment().get_template("page.html.jinja").render(
        run=run, missing=[*_missing(run)], title=_title(run), about=" · ".join(_facts(run)), statistics=summarise(run), figures=figures,
        places=places, verdict=None if planned is None else verdict(planned), settings=_settings(run), answers=_answers(run),
        tables=(stream_tables(traced, planned), operation_tables(traced)), policy=_policy([plotly, script]),
        style=Markup(_asset("page.css")), script=Markup(script), dark=DARK, plotly=_compressed_plotly(),
    )  # fmt: skip


def _environment() -> Environment:
    """Return a template environment that escapes every text, and rejects names that nothing defines."""
    environment = Environment(
        loader=PackageLoader("horizon_lm.tools.report", "assets"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {"bytes": format_bytes, "figure_json": figure_json}
    return environment


def figure_json(figure: Figure) -> Markup:
    """Return a figure as JSON for a script element. Angle brackets are encoded, so that no text can end the element."""
    text = str(figure.to_json())
    for character in "<>&":  # in JSON they occur only in strings
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _missing(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the files that the page lacks, or that have nothing to show yet, with the reason."""
    traces = {run_files.PREDICTED: run.predicted, run_files.MEASURED: run.measured}
    contents = {run_files.METRICS: run.metrics, run_files.SETTINGS: run.settings, run_files.PLAN: run.plan, **traces}
    yield from ((file, f"is missing: {_ORIGINS[file]}") for file, content in contents.items() if content is None)
    if run.metrics is not None and not run.metrics.training:
        yield run_files.METRICS, "has no training step yet: the first line comes with step 1."
    for file, trace in traces.items():
        if trace is not None and not trace.steps:
            yield file, "has no step: the run ended before the first traced step."


def _title(run: Run) -> str:
    """Return the title of the page, which is the name of the run."""
    return str((run.settings or {}).get("run_name") or run.folder.resolve().name)


def _facts(run: Run) -> Iterator[str]:
    """Yield what is known of model, step, machine and date."""
    plan, settings = run.plan, run.settings or {}
    name, precision = settings.get("model_name_or_path"), settings.get("precision")
    if plan is not None:
        name, precision = plan.model.name, plan.run.precision
    if name is not None:
        yield Path(name).name if str(name).startswith(("/", ".", "~")) else str(name)
    if plan is not None:
        parameters, active = format_count(plan.model.parameters), format_count(plan.model.active_parameters)
        yield f"{parameters} parameters" + (f", {active} active" if active != parameters else "")
        yield counted(plan.model.num_blocks, "block")
        most = "" if settings.get("packing") else "up to "  # rows of a batch are padded to the longest of them
        yield f"{plan.run.rows} × {most}{plan.run.length:,} tokens a step"
    if precision is not None:
        yield str(precision)
    if plan is not None and plan.hardware is not None and "name" in plan.hardware:
        yield str(plan.hardware["name"])
    if run.metrics is not None:
        yield f"{run.metrics.written:%Y-%m-%d %H:%M %Z}"


def _places(run: Run) -> list[tuple[str, str, Any]]:
    """Return the places that a plan has bytes for: the name of the figure, the heading, and the budget (`Budget`) of each."""
    plan = run.plan
    if plan is None:
        return []
    places = [
        ("host", "Host", plan.host),
        ("device", "Device", plan.device),  # on a CPU, the device's memory is the host's
        ("buffers", "Device buffers, part of the device", plan.buffers),
        ("disk", "Disk", plan.disk),
    ]
    return [each for each in places if each[-1] is not None and each[-1].items]


def _answers(run: Run) -> dict[str, list[tuple[str, str]]]:
    """Return the steps and answers of each sample prompt."""
    answers: dict[str, list[tuple[str, str]]] = {}
    for line in run.samples or ():
        for each in line.samples:
            answers.setdefault(each.prompt, []).append((f"{line.step:,}", each.answer or "(an empty answer)"))
    return answers


def _settings(run: Run) -> list[tuple[str, str, str | None, str | None]]:
    """Return the name, description, value and planned value of each setting; None for a planned value that is the run's own."""
    given = run.settings or {}
    planned = {} if run.plan is None else run.plan.run.settings
    rows = []
    for name in dict.fromkeys([*given, *planned]):
        field = RunConfig.model_fields.get(name)  # None if this version does not have the setting
        description = "" if field is None else field.description or ""
        differs = name in planned and (name not in given or planned[name] != given[name])
        value = setting_text(given[name]) if name in given else None
        rows.append((name, description, value, setting_text(planned[name]) if differs else None))
    return rows


def _policy(scripts: list[str]) -> str:
    """Return a content security policy that lets browsers run only the page's own scripts and fetch nothing."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'" for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def _compressed_plotly() -> str:
    """Return Plotly's script as base64-encoded gzip, which page.js unpacks: 2 MB instead of 4.8."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _asset(name: str) -> str:
    return (resources.files("horizon_lm.tools.report") / "assets" / name).read_text(encoding="utf-8")
