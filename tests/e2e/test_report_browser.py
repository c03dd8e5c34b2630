"""The report in an offline browser draws all figures, requests nothing, and runs no injected script."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from horizon_lm.tools.report.page import write_report
from tests.report.report_run import write_run
from tests.support.thinned_cases import thinned

NAME = 'Meadow <script>document.title = "run"</script> & <img src=x onerror=alert(1)>'
HEADINGS = [
    "Loss and learning rate", "Tokens per second", "Memory over the run", "Timeline of a step", "Memory over a step",
    "Where the bytes go", "Settings",
]  # fmt: skip
FIGURES = ["loss", "tokens", "run-memory", "timeline", "step-memory", "bytes-host", "bytes-device", "bytes-disk"]


def find_chromium() -> str:
    """Return the browser. Without one, skip the test, or fail if HORIZON_REQUIRE_CHROMIUM is 1."""
    for name in ("chromium", "chromium-browser", "google-chrome"):
        if (found := shutil.which(name)) is not None:
            return found
    reason = "no chromium, chromium-browser or google-chrome is installed"
    if os.environ.get("HORIZON_REQUIRE_CHROMIUM") == "1":
        pytest.fail(reason)
    pytest.skip(reason)


@dataclass(frozen=True)
class Visit:
    """A visited page: the document after its scripts, console messages, and network requests."""

    dom: str
    console: list[str]
    requests: list[str]


def visit(page: Path, tmp_path: Path, width: int = 1280) -> Visit:
    log = tmp_path / "net.json"
    command = [
        find_chromium(), "--headless=new", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking", "--disable-component-update",
        "--no-first-run", "--virtual-time-budget=10000", "--enable-logging=stderr", f"--log-net-log={log}",
        f"--window-size={width},2000", "--dump-dom", page.as_uri(),
    ]  # fmt: skip
    if os.geteuid() == 0:
        command.insert(1, "--no-sandbox")
    done = subprocess.run(command, capture_output=True, text=True, encoding="utf-8", timeout=60, check=True)
    console = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return Visit(done.stdout, console, requests_of_page(json.loads(log.read_text())))


def requests_of_page(log: dict) -> list[str]:
    """Return the addresses that a page requests. The browser's own requests have no origin."""
    start = log["constants"]["logEventTypes"]["URL_REQUEST_START_JOB"]
    jobs = [event["params"] for event in log["events"] if event["type"] == start and "url" in event.get("params", {})]
    pages = [job["url"] for job in jobs if job.get("initiator") != "not an origin"]
    return [url for url in pages if re.match("(http|ws)s?:", url)]


class Texts(HTMLParser):
    """A parser of the headings of a page and, for each figure, the number of SVG images that Plotly drew."""

    def __init__(self, dom: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.drawn: dict[str, int] = {}
        self.figure_texts: list[str] = []
        self._tags: list[str] = []
        self.feed(dom)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self._tags.append(tag)
        if tag in ("h1", "h2"):
            self.headings.append("")
        if "data-figure" in attributes and "js-plotly-plot" in (attributes.get("class") or ""):
            self.drawn[str(attributes["data-figure"]).removeprefix("figure-")] = 0
        if tag == "svg" and attributes.get("class") == "main-svg":
            self.drawn[list(self.drawn)[-1]] += 1

    def handle_endtag(self, tag: str) -> None:
        while self._tags and self._tags.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if self._tags and self._tags[-1] in ("h1", "h2"):
            self.headings[-1] += data
        if self._tags and self._tags[-1] in ("text", "tspan"):
            self.figure_texts.append(data)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_run(tmp_path_factory.mktemp("run"), NAME)
    plan = json.loads((folder / "plan.json").read_text())
    plan["host"]["items"][0]["name"] = "weights <script>1</script>"
    (folder / "plan.json").write_text(json.dumps(plan))
    with (folder / "config.yaml").open() as stream:
        settings = YAML(typ="safe", pure=True).load(stream)
    (folder / "config.yaml").write_text(json.dumps(settings | {"run_name": NAME}))
    write_report(folder, folder / "report.html")
    return folder / "report.html"


@pytest.fixture(scope="module")
def visited(page: Path, tmp_path_factory: pytest.TempPathFactory) -> Visit:
    return visit(page, tmp_path_factory.mktemp("browser"))


def test_all_figures_are_drawn_without_errors_or_requests(visited: Visit) -> None:
    texts = Texts(visited.dom)
    assert list(texts.drawn) == FIGURES
    assert all(pictures > 0 for pictures in texts.drawn.values())
    assert visited.console == []
    assert visited.requests == []


def test_text_of_files_is_escaped(visited: Visit) -> None:
    texts = Texts(visited.dom)
    assert texts.headings == [NAME, *HEADINGS]
    assert "<title>Meadow &lt;script&gt;" in visited.dom
    assert "weights <script>1</script>" in texts.figure_texts


def test_no_button_uploads_data(visited: Visit) -> None:
    assert set(re.findall('data-title="([^"]*)"', visited.dom)) == {
        "Zoom",
        "Pan",
        "Reset axes",
        "Download plot as a PNG",
    }


def test_bad_page_is_detected(page: Path, tmp_path: Path) -> None:
    bad = """<script>document.querySelector('[data-figure="figure-loss"]').remove(); new Image().src = "http://a.invalid/x";
    fetch("https://b.invalid/y").catch(() => 0); missing.property</script></body>"""
    text = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    (tmp_path / "bad.html").write_text(text.replace("</body>", bad))
    found = visit(tmp_path / "bad.html", tmp_path)
    assert list(Texts(found.dom).drawn) == FIGURES[1:]
    assert set(found.requests) >= {"http://a.invalid/x", "https://b.invalid/y"}
    assert any("missing is not defined" in line for line in found.console)


def test_injected_script_does_not_run(page: Path, tmp_path: Path) -> None:
    bad = '<script>document.title = "other"; new Image().src = "http://a.invalid/x"</script></body>'
    (tmp_path / "bad.html").write_text(page.read_text().replace("</body>", bad))
    found = visit(tmp_path / "bad.html", tmp_path, width=800)
    assert "<title>other" not in found.dom
    assert found.requests == []
    assert any("Content Security Policy" in line for line in found.console)
    assert list(Texts(found.dom).drawn) == FIGURES


@pytest.mark.parametrize("width", thinned([420, 1280], every=2))
def test_nothing_is_wider_than_the_window(page: Path, tmp_path: Path, width: int) -> None:
    """The page is in a frame, because the browser itself is never narrower than 500 pixels."""
    check = """<script>addEventListener("load", () => setTimeout(() => {
      const width = (each) => Math.ceil(each.getBoundingClientRect().right);
      const wide = [...document.querySelectorAll("body *, svg text")].filter((each) => width(each) > innerWidth + 1);
      document.title = `${innerWidth} ${wide.length} ${wide.slice(0, 5).map((each) => each.textContent)}`;
      parent.postMessage(document.title, "*");
    }, 3000))</script></body>"""
    text = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", page.read_text())
    (tmp_path / "page.html").write_text(text.replace("</body>", check))
    frame = f'<iframe src="page.html" width="{width}" height="5000" style="border:0"></iframe><pre id="result"></pre>'
    listen = "<script>onmessage = (event) => { document.getElementById('result').textContent = event.data }</script>"
    (tmp_path / "frame.html").write_text(frame + listen)
    found = visit(tmp_path / "frame.html", tmp_path, width=width + 200)
    assert re.search('id="result">([^<]*)<', found.dom)[1].strip() == f"{width} 0"


@pytest.mark.parametrize(("required", "outcome"), [("1", pytest.fail.Exception), ("0", pytest.skip.Exception)])
def test_missing_browser(required: str, outcome: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setenv("HORIZON_REQUIRE_CHROMIUM", required)
    with pytest.raises(outcome, match="no chromium"):
        find_chromium()
