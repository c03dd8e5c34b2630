"""The report: figures, summary, sections, notes about missing files, escaping, and the command."""

import base64
import gzip
import hashlib
import json
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from plotly.graph_objects import Figure, Scatter
from plotly.offline import get_plotlyjs
from typer.testing import CliRunner

from horizon_lm.cli import app
from horizon_lm.common.quantities import format_count, format_duration
from horizon_lm.runs.palette import axis_note
from horizon_lm.runs.run_files import load_run, read_metrics, read_plan
from horizon_lm.runs.training.loss_png import write_loss_png
from horizon_lm.tools.report.figures import (
    loss_figure,
    preferences_figure,
    run_memory_figure,
    step_memory_figure,
    timeline_figure,
    tokens_figure,
    waterfall_figure,
)
from horizon_lm.tools.report.page import build_page, figure_json
from horizon_lm.tools.report.steps import StepView, step_views, verdict
from horizon_lm.tools.report.summary import _compared, summarise
from tests.report import report_run
from tests.report.report_run import GIB, metrics_file, span, step, taken, trace_file, training

FILES = ("metrics.jsonl", "config.yaml", "plan.json", "predicted_trace.json", "trace.json")


class Page(HTMLParser):
    """A parsed page: its text by section, its scripts and its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: dict[str, str] = {"": ""}
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.attributes: list[tuple[str, str | None]] = []
        self._inside = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        self.attributes += attrs
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[-1] = (self.scripts[-1][0], self.scripts[-1][1] + data)
        elif self._inside == "h2":
            self.words[data] = ""
        elif self._inside != "style" and data.strip():
            section = list(self.words)[-1]
            self.words[section] += data

    @property
    def figures(self) -> dict[str, Any]:
        found = {str(a["id"]): text for a, text in self.scripts if a.get("type") == "application/json"}
        return {name: json.loads(text) for name, text in found.items() if name.startswith("figure-")}


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report_run.write_run(tmp_path_factory.mktemp("run"))


# Figures


def test_figures_show_the_metrics(tmp_path: Path) -> None:
    lines = report_run.evaluation(0, 5.0), training(1), training(2, loss=None), report_run.evaluation(2, 2.5)
    metrics = read_metrics(metrics_file(tmp_path, *lines))
    losses, held_out, rates = loss_figure(metrics).data
    assert (losses.x, losses.y) == ((1, 2), (3.0, None))
    assert (held_out.x, held_out.y) == ((0, 2), (5.0, 2.5))
    assert rates.y == (0.25, 0.5)
    total, trained = tokens_figure(metrics).data
    assert (total.y, trained.y) == ((201.0, 202.0), (101.0, 102.0))


def test_sections_of_preferences_and_sample_answers(tmp_path: Path, complete: Path) -> None:
    pairs = {"rewards/margins": 0.25, "rewards/accuracies": 0.75}
    held_out = {"step": 2, "eval_loss": 0.5, "eval_rewards/margins": 0.5, "eval_rewards/accuracies": 1.0}
    metrics_file(tmp_path, training(1, **pairs), training(2, **pairs | {"rewards/margins": 0.5}), held_out)
    answers = [{"prompt": "Why <b>?", "answer": "Stars."}, {"prompt": "And?", "answer": ""}]
    (tmp_path / "samples.jsonl").write_text(json.dumps({"step": 2, "samples": answers}) + "\n" + '{"step": 4, "sam')
    run = load_run(tmp_path)
    words = Page(build_page(run)).words
    assert "Why <b>?" in words["Sample answers"]
    assert "(an empty answer)" in words["Sample answers"]
    assert run.metrics is not None
    margins, held_margins, accuracies, held_accuracies = preferences_figure(run.metrics).data
    assert (list(margins.y), list(accuracies.y)) == ([0.25, 0.5], [0.75, 0.75])
    assert (list(held_margins.y), list(held_accuracies.y)) == ([0.5], [1.0])
    assert loss_figure(run.metrics).layout.yaxis.title.text == "loss per pair<br>(axis not from 0)"
    others = Page(build_page(load_run(complete))).words
    assert "Preferences" not in others
    assert "Sample answers" not in others


def test_run_memory_compared_with_the_plan(tmp_path: Path, complete: Path) -> None:
    metrics = read_metrics(metrics_file(tmp_path, training(1, host_bytes=99 * GIB), training(2)))
    plan = read_plan(complete / "plan.json")
    figure = run_memory_figure(metrics, plan)
    host, device = figure.data
    assert (host.y, device.y) == ((99.0, 20.0), (1.0, 2.0))
    assert (figure.layout.yaxis.title.text, figure.layout.yaxis2.title.text) == (
        "host memory, GiB",
        "device buffers, GiB",
    )
    # A line at the 139 GiB of the device would flatten the figure, so there is a note instead.
    lines = [(line.yref, line.y0) for line in figure.layout.shapes]
    assert lines == [("y", plan.host.bytes / GIB), ("y", 180.0), ("y2", plan.device.bytes / GIB)]
    words = [note.text for note in figure.layout.annotations]
    assert words == ["planned 111.15 GiB", "available 180.00 GiB", "planned 4.29 GiB", "↑ available 139.00 GiB"]
    assert not run_memory_figure(metrics, None).layout.shapes


def test_waterfall_adds_up(complete: Path) -> None:
    plan = read_plan(complete / "plan.json")
    bars = waterfall_figure(plan.host).data[0]
    assert bars.x == (*(item.bytes / GIB for item in plan.host.items), plan.host.bytes / GIB)
    assert sum(bars.x[:-1]) == pytest.approx(bars.x[-1])
    assert bars.base == (*(sum(bars.x[:count]) for count in range(7)), 0)
    column = [(note.y, note.text) for note in waterfall_figure(plan.host).layout.annotations if note.xref == "paper"]
    assert column[3:5] == [(3, "60.00 GiB"), (4, "1.88 GiB")]
    assert [line.x0 for line in waterfall_figure(plan.host).layout.shapes] == [180.0]
    assert not waterfall_figure(plan.device).layout.shapes  # 139 GiB is far above
    assert not waterfall_figure(plan.disk).layout.shapes  # unknown


def test_timeline_shows_the_operations(tmp_path: Path) -> None:
    trace_file(
        tmp_path,
        span("stream_in", "block0", 7, 100, 4), span("stream_in", "block1", 7, 104, 5), span("forward", "a<b", 1, 104, 7),
        taken("host bytes", 100, 2 * GIB), taken("host bytes", 105, 3 * GIB),
        steps=[step(4, 100, 120)],
    )  # fmt: skip
    views = step_views(load_run(tmp_path))
    copies, forward = timeline_figure(views).data
    assert (copies.name, copies.base, copies.x, copies.y) == ("stream_in", (0.0, 4.0), (4.0, 5.0), (0, 0))
    assert copies.customdata == (4.0, 5.0)
    assert copies.hovertext == ("stream_in block0", "stream_in block1")
    assert (forward.name, forward.base, forward.x, forward.y) == ("forward", (4.0,), (7.0,), (1,))
    assert forward.hovertext == ("forward a&lt;b",)
    (memory,) = step_memory_figure(views).data
    assert memory.x == (0.0, pytest.approx(5.0), pytest.approx(20.0))
    assert memory.y == (2.0, 3.0, 3.0)


def test_step_memory_comes_from_the_plan_without_a_trace(tmp_path: Path) -> None:
    memory = {"seconds": [0.0, 0.5, 0.8], "device": [1.0 * GIB, 2.0 * GIB, 1.0 * GIB], "host": [GIB, GIB, GIB]}
    (tmp_path / "plan.json").write_text(json.dumps(report_run.plan() | {"memory": memory}))
    device, host = step_memory_figure(step_views(load_run(tmp_path))).data
    assert (device.name, device.x, device.y) == ("Predicted", (0.0, 500.0, 800.0), (1.0, 2.0, 1.0))
    assert host.y == (1.0, 1.0, 1.0)


# The page


def test_summary(tmp_path: Path, complete: Path) -> None:
    metrics_file(tmp_path, report_run.evaluation(0, 5.0), training(1), training(3), report_run.evaluation(3, 2.5))
    plan = report_run.plan()
    plan["step"].update(seconds=1.6, tokens_per_second=101.0)
    plan["host"]["bytes"], plan["device"]["bytes"] = 40 * GIB, 2 * GIB
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    found = {item.name: (item.text, item.note) for item in summarise(load_run(tmp_path))}
    assert found == {
        "Last training loss": ("1.0000", "step 3 of 200; first 3.0000"),
        "Eval loss": ("5 → 2.5", "before → after 3 steps"),
        "Tokens per second": ("203", "median; predicted 101 (+101.0%)"),
        "Step": ("1.97 s", "median; predicted 1.6 s (+23.2%)"),
        "Host peak": ("30.00 GiB", "planned 40.00 GiB (-25.0%)"),
        "Device buffers": ("3.00 GiB", "planned 2.00 GiB (+50.0%)"),
    }


def test_summary_of_energy(tmp_path: Path) -> None:
    lines = [
        training(step) | {"host_joules_per_token": 0.1, "device_joules_per_token": device}
        for step, device in ((1, 0.9), (2, None), (3, 0.2), (4, 0.3))
    ]
    metrics_file(tmp_path, *lines)
    found = {item.name: (item.text, item.note) for item in summarise(load_run(tmp_path))}
    assert found["Energy per token"] == ("0.4 J", "median; processors 0.1 J, GPU 0.3 J")


@pytest.mark.parametrize(
    ("measured", "cores"), [([None, 2.5, 1.26], "1.3 cores"), ([None, 0.2], None), ([None, None], None)]
)
def test_cores_that_other_programs_used(tmp_path: Path, measured: list[float | None], cores: str | None) -> None:
    """The last line has the average of most steps."""
    metrics_file(tmp_path, *(training(step, cores_of_others=each) for step, each in enumerate(measured, start=1)))
    found = {item.name: (item.text, item.note) for item in summarise(load_run(tmp_path))}
    expected = None if cores is None else (cores, "on average, which may have slowed the run")
    assert found.get("Used by other programs") == expected
    assert ("Used by other programs" in build_page(load_run(tmp_path))) == (cores is not None)


def test_step_seconds_of_a_short_run_come_from_its_trace(tmp_path: Path) -> None:
    metrics_file(tmp_path, training(1))
    trace_file(tmp_path, steps=[step(1, 0, 30)])
    found = {item.name: (item.text, item.note) for item in summarise(load_run(tmp_path))}
    assert found["Step"] == ("30 ms", "median of traced steps")


def test_cpu_run_has_no_device_memory(tmp_path: Path) -> None:
    plan = report_run.plan() | {"hardware": None}
    plan["device"] = {"items": [], "bytes": 0, "available": None, "limits": []}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    metrics = read_metrics(metrics_file(tmp_path, training(1)))
    run = load_run(tmp_path)
    assert {item.name: item.note for item in summarise(run)}["Device buffers"] == ""
    assert {line.yref for line in run_memory_figure(metrics, run.plan).layout.shapes} == {"y"}
    assert "Device" not in Page(build_page(run)).words["Where the bytes go"]  # it is part of the host


def test_device_peak_is_compared_with_limited_buffers(tmp_path: Path) -> None:
    limited = report_run.plan()["device"] | {"bytes": 2 * GIB, "available": 3 * GIB, "limits": []}
    (tmp_path / "plan.json").write_text(json.dumps(report_run.plan() | {"buffers": limited}))
    metrics = read_metrics(metrics_file(tmp_path, training(1)))
    run = load_run(tmp_path)
    assert {item.name: item.note for item in summarise(run)}["Device buffers"] == "planned 2.00 GiB (-50.0%)"
    lines = run_memory_figure(metrics, run.plan).layout.shapes
    assert [line.y0 for line in lines if line.yref == "y2"] == [2.0, 3.0]
    assert "figure-bytes-buffers" in Page(build_page(run)).figures


def test_number_formats() -> None:
    assert [format_duration(s) for s in (0, 6.7e-6, 0.0321, 0.9999, 1.234, 99.4, 200)] == [
        "0 ms",
        "6.7 µs",
        "32.1 ms",
        "1 s",
        "1.23 s",
        "99.4 s",
        "3 min 20 s",
    ]
    assert [format_count(n) for n in (12, 5900, 134_515_008, 999_999_999, 7.6e9, 1.2e12)] == [
        "12", "5.9k", "135M", "1B", "7.6B", "1.2T",
    ]  # fmt: skip


def test_complete_page(complete: Path) -> None:
    page = Page(build_page(load_run(complete)))
    assert list(page.words)[1:] == [
        "Loss and learning rate", "Tokens per second", "Memory over the run", "Timeline of a step", "Memory over a step",
        "Where the bytes go", "Settings",
    ]  # fmt: skip
    for word in ("Meadow-8B-Instruct", "8.03B parameters", "fp32_master", "NVIDIA H200, 64 cores", "2.931 → 1.722"):
        assert word in page.words[""]
    assert "is missing" not in "".join(page.words.values())
    assert len(page.figures) == 8
    settings = page.words["Settings"]
    assert "Peak learning rate.learning_rate2e-05" in settings
    assert "resident_blocks" in settings
    assert "nullplanned: 2" in settings
    assert "on the device there would be room for 11 of 30" in settings
    shares = [_share_computed(view) for view in step_views(load_run(complete))]
    assert f"compute{shares[0]:.1%}{shares[1]:.1%}device-to-host" in page.words["Timeline of a step"]


def test_title_is_the_name_of_the_run(complete: Path, tmp_path: Path) -> None:
    def title(folder: Path) -> tuple[str, str]:
        text = build_page(load_run(folder))
        return re.search("<h1>(.*?)</h1>", text)[1], re.search("<title>(.*?)</title>", text)[1]

    assert title(complete) == (complete.name, f"{complete.name}: report of a run")
    (tmp_path / "config.yaml").write_text("model_name_or_path: Meadow\nrun_name: a night\n")
    assert title(tmp_path) == ("a night", "a night: report of a run")


@pytest.mark.parametrize(
    ("packing", "tokens"), [("true", "8 × 1,024 tokens a step"), ("false", "8 × up to 1,024 tokens a step")]
)
def test_rows_that_are_not_packed_have_up_to_the_planned_tokens(
    complete: Path, tmp_path: Path, packing: str, tokens: str
) -> None:
    (tmp_path / "plan.json").write_bytes((complete / "plan.json").read_bytes())
    (tmp_path / "config.yaml").write_text(f"packing: {packing}\n")
    assert tokens in Page(build_page(load_run(tmp_path))).words[""]


def test_streams_have_one_name_each(complete: Path) -> None:
    page = Page(build_page(load_run(complete)))
    words = page.words["Timeline of a step"]
    for name in ("host-to-device", "device-to-host"):
        assert words.count(name) >= 2  # busy share and stalls
    assert (
        "Fully overlapped with compute: host-to-device copies from 5.9k tokens per step, optimizer from 7.3k tokens per step"
        in words
    )
    assert page.figures["figure-timeline"]["layout"]["yaxis"]["ticktext"] == [
        "host-to-device", "compute", "device-to-host", "host",
    ]  # fmt: skip
    assert not re.search("cop(y|ies) (in|out)", words)


def test_what_any_step_hides_has_no_number_of_tokens(complete: Path) -> None:
    plan = load_run(complete).plan
    assert plan is not None
    assert plan.step is not None
    step = replace(plan.step, hidden_from_tokens={"update": 0})
    assert "Fully overlapped with compute: optimizer with any number of tokens." in verdict(step)


def test_axes_start_at_zero_or_say_so(complete: Path, tmp_path: Path) -> None:
    figures = Page(build_page(load_run(complete))).figures
    margins = {"rewards/margins": 0.25, "rewards/accuracies": 0.75}
    metrics_file(tmp_path, training(1, **margins), training(2, **margins))
    figures |= Page(build_page(load_run(tmp_path))).figures
    for name, figure in figures.items():
        for axis, layout in figure["layout"].items():
            if not axis.startswith("yaxis") or "ticktext" in layout:
                continue
            from_zero = layout.get("rangemode") == "tozero" or layout.get("range", [1])[0] <= 0
            assert from_zero != ("axis not from 0" in layout["title"]["text"]), (name, axis)


def _share_computed(view: StepView) -> float:
    """Return the busy share of compute, whose operations do not overlap, so that their seconds add up."""
    spans = [part.span for part in view.parts if part.span.op.stream == "compute"]
    return sum(each.end - each.start for each in spans) / view.seconds


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_leaves_out_its_sections(complete: Path, tmp_path: Path, name: str) -> None:
    """The page says once, at its end, which file it lacks; no section does nothing else."""
    for file in FILES:
        if file != name:
            (tmp_path / file).write_bytes((complete / file).read_bytes())
    page, whole = Page(text := build_page(load_run(tmp_path))), Page(build_page(load_run(complete)))
    assert (
        whole.words.keys() - page.words.keys()
        == {
            "metrics.jsonl": {"Loss and learning rate", "Tokens per second", "Memory over the run"},
            "config.yaml": set(),  # the plan has settings, too
            "plan.json": {"Where the bytes go"},
            "predicted_trace.json": set(),
            "trace.json": set(),
        }[name]
    )
    assert text.count("is missing: ") == 1
    assert f"<code>{name}</code> is missing: horizon-lm train" in text.partition("<footer>")[2]


@pytest.mark.parametrize(
    ("losses", "note"), [([2.0, 1.5], "axis not from 0"), ([2.0, 0.01], ""), ([1.0, -1.0], ""), ([], "")]
)
def test_an_axis_that_shows_zero_is_not_said_to_begin_elsewhere(losses: list[float], note: str) -> None:
    assert axis_note([*losses, None, float("nan")]) == note


def test_equal_figures_are_named_once(complete: Path, tmp_path: Path) -> None:
    plan = json.loads((complete / "plan.json").read_text())
    model = plan["model"] | {"parameters": 134_515_584, "active_parameters": 134_515_000}
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"model": model}))
    page = build_page(load_run(tmp_path))
    assert f"{format_count(134_515_584)} parameters ·" in page
    assert "active" not in page.split("</header>")[0].split("<header>")[1]


@pytest.mark.parametrize(
    ("value", "words"), [(99.97, "planned 100"), (100.03, "planned 100"), (99.0, "planned 100 (-1.0%)")]
)
def test_no_difference_is_not_a_negative_one(value: float, words: str) -> None:
    (item,) = _compared("Step", value, "{:.0f}".format, "", "planned", 100.0)
    assert item.note == words


@pytest.mark.parametrize("name", FILES)
def test_one_file_is_enough_for_a_page(complete: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes((complete / name).read_bytes())
    expected = {
        "metrics.jsonl": {"loss", "tokens", "run-memory"},
        "config.yaml": set(),
        "plan.json": {"bytes-host", "bytes-device", "bytes-disk"},
        "predicted_trace.json": {"timeline", "step-memory"},
        "trace.json": {"timeline", "step-memory"},
    }[name]
    assert set(Page(build_page(load_run(tmp_path))).figures) == {f"figure-{each}" for each in expected}


def test_run_without_a_step(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    trace_file(tmp_path)
    text = build_page(load_run(tmp_path))
    assert not Page(text).figures
    assert list(Page(text).words) == [""]
    assert "<code>metrics.jsonl</code> has no training step yet" in text
    assert "<code>trace.json</code> has no step" in text


EVIL = "</script><script>alert(1)</script><!-- & <img src=x onerror=alert(2)> \" ' \u2028 %{x} $x$"


def test_text_of_files_is_escaped(tmp_path: Path) -> None:
    report_run.write_run(tmp_path, name=EVIL)
    plan = report_run.plan(EVIL)
    plan["host"]["items"][0].update(name=EVIL, note=EVIL)
    plan["host"]["limits"][0]["name"] = plan["hardware"]["name"] = plan["step"]["limited_by"] = EVIL
    plan["run"].update(reasons=[EVIL], settings={EVIL: EVIL})
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    (tmp_path / "config.yaml").write_text(json.dumps({"model_name_or_path": EVIL, EVIL: [EVIL, {EVIL: EVIL}]}))
    trace_file(tmp_path, span("forward", EVIL, 1, 0, 1), steps=[step(1, 0, 2)])
    harmless = report_run.write_run(tmp_path / "harmless", "name")

    text = build_page(load_run(tmp_path))
    page, other = Page(text), Page(build_page(load_run(harmless)))
    assert len(page.scripts) == len(other.scripts)
    assert {name for name, _ in page.attributes} == {name for name, _ in other.attributes}
    assert "<img" not in text
    words = "".join(page.words.values())
    for section in ("", "Where the bytes go", "Settings", "Timeline of a step"):
        assert EVIL in page.words[section]
    assert words.count(EVIL) > 10
    # in figures, Plotly would read angle brackets as markup
    shown = EVIL.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    assert page.figures["figure-timeline"]["data"][-1]["hovertext"] == [f"forward {shown}"]
    names = page.figures["figure-bytes-host"]["layout"]["yaxis"]["ticktext"]
    assert not re.search("<(?!br>)", names[0])


def test_data_cannot_end_its_script_element() -> None:
    text = figure_json(Figure(Scatter(name=EVIL, customdata=[EVIL])))
    assert json.loads(text)["data"][0] == {"name": EVIL, "customdata": [EVIL], "type": "scatter"}
    assert not re.search("[<>&]", text)


def test_page_makes_no_external_requests(complete: Path) -> None:
    text = build_page(load_run(complete))
    page = Page(text)
    assert not {name for name, _ in page.attributes} & {"src", "href", "srcset", "action"}
    assert not re.search(r"https?:|url\(|@import", text)  # Plotly is compressed


def test_content_security_policy(complete: Path) -> None:
    page = Page(build_page(load_run(complete)))
    policy = next(str(value) for name, value in page.attributes if name == "content" and "default-src" in str(value))
    (own,) = [text for attributes, text in page.scripts if "type" not in attributes]
    (packed,) = [json.loads(text) for attributes, text in page.scripts if attributes.get("id") == "plotly"]
    plotly = gzip.decompress(base64.b64decode(packed)).decode()
    assert plotly == get_plotlyjs()  # of the Python package, which makes the figures
    hashes = [base64.b64encode(hashlib.sha256(code.encode()).digest()).decode() for code in (plotly, own)]
    assert re.search(r"script-src ([^;]*);", policy)[1].split() == [f"'sha256-{each}'" for each in hashes]
    assert policy.startswith("default-src 'none';")


# The command


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["report", *map(str, arguments)])


def test_command_writes_the_page(complete: Path, tmp_path: Path) -> None:
    page = complete / "report.html"
    result = run(complete)
    assert (result.exit_code, result.stdout) == (0, f"report: {page}\n")
    assert page.read_text().startswith("<!DOCTYPE html>\n<html")
    assert run(complete, "--output", tmp_path / "other.html").exit_code == 0
    assert (tmp_path / "other.html").read_bytes() == page.read_bytes()


def test_command_rejects_bad_paths(complete: Path, tmp_path: Path) -> None:
    for folder, output, message in (
        (tmp_path, tmp_path / "page.html", "no files of a run"),
        (tmp_path / "nowhere", tmp_path / "page.html", "no such folder"),
        (complete, tmp_path / "nowhere" / "page.html", "nowhere does not exist; create it"),
        (complete, tmp_path, "is a folder; name a file in it"),
    ):
        result = run(folder, "--output", output)
        assert result.exit_code == 2
        assert message in result.stderr
    assert not list(tmp_path.iterdir())


# loss.png


def test_loss_png(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: (drawn.append(self), save(self, *a, **k)))
    file = metrics_file(
        tmp_path, report_run.evaluation(0, 5.0), training(1), training(2, loss=None), training(3), report_run.evaluation(3, 2.0)
    )  # fmt: skip
    with file.open("a") as end:
        end.write('{"step": 4, "lo')
    write_loss_png(file, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    losses, rates = drawn[0].axes
    assert {line.get_label(): line.get_xydata().tolist() for line in (*losses.lines, *rates.lines)} == {
        "training loss": [[1, 3.0], [3, 1.0]],
        "eval loss": [[0, 5.0], [3, 2.0]],
        "learning rate": [[1, 0.25], [2, 0.5], [3, 0.75]],
    }


def test_no_picture_without_the_extra(complete: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("cli.report", "runs.training.loss_png"):
        monkeypatch.setattr(sys.modules[f"horizon_lm.{module}"], "find_spec", lambda name: None)
    write_loss_png(complete / "metrics.jsonl", tmp_path / "loss.png")
    result = run(complete, "--output", tmp_path / "page.html")
    assert result.exit_code == 2
    assert "pip install 'horizon-lm[report]'" in result.stderr
    assert not {"loss.png", "page.html"} & {path.name for path in tmp_path.iterdir()}


def test_no_loss_png_without_a_loss(tmp_path: Path) -> None:
    file = metrics_file(tmp_path, report_run.evaluation(0, 5.0), training(1, loss=None))
    write_loss_png(file, tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


def test_report_imports_neither_torch_nor_pyplot(complete: Path, tmp_path: Path) -> None:
    code = f"""
import sys
from pathlib import Path
import horizon_lm.cli
assert not {{"plotly", "matplotlib"}} & set(sys.modules), "slow to start"
from horizon_lm.tools.report.page import write_report
from horizon_lm.runs.training.loss_png import write_loss_png
write_report(Path({str(complete)!r}), Path({str(tmp_path / "page.html")!r}))
assert "matplotlib" not in sys.modules
write_loss_png(Path({str(complete / "metrics.jsonl")!r}), Path({str(tmp_path / "loss.png")!r}))
assert not {{"torch", "transformers", "matplotlib.pyplot"}} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert 1_000_000 < (tmp_path / "page.html").stat().st_size < 2_500_000  # Plotly is compressed
    assert (tmp_path / "loss.png").stat().st_size > 10_000
