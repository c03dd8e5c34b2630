"""Write docs/generated/peers.md and peers-images.md from the results of the suites."""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.peers.runner import ROOT, results_of
from tests.peers.suites import SUITES
from tests.peers.verdicts import KINDS, LOG_TOLERANCE, PARAMETER_TOLERANCE, Verdict, judge, read

FOLDER = ROOT / "docs" / "generated"
_HEAD = """# {title}

{tests}, run on streamed models. `python -m tests.peers run` runs them, and
`python -m tests.peers page` writes this page. A test runs on plain models first; if it passes, it runs on streamed ones, on the CPU and in
float32. A test that trains takes the same number of steps in both, and is compared beyond its own assertions: each logged figure within
{log:g}, sum and norm of every parameter after the training within {parameter:g}, relative.

Run with {versions}; {sources}. Models and data sets are those of TRL's scripts, with a small tokenizer in place of the hub's.

| column | meaning |
|---|---|
| collected | {collected} |
| tried | on plain models |
| plain | of these, passed; others need a GPU, a network or a package that is not installed |
| run | of these, run on streamed models |
| pass | passed, with equal values |
| unused | passed or skipped without a streamed model in it |
| rejected | ended in an error of Horizon-LM that names what is not supported |
| differs | passed, with other values, which are explained below |
| fail | anything else |
"""
PAGES = {  # the name of a page's file: the title, the tests, and those that are collected
    "peers.md": (
        "Tests of other projects", "The tests that TRL, PEFT and transformers have for text models",
        "all tests of the suite's files, without those for images, liger, vllm and GPUs",
    ),
    "peers-images.md": (
        "Tests of other projects with images", "The tests that TRL has for models of images and text",
        "the tests for images of the suite's files, without those for liger, vllm and GPUs, and of collators alone",
    ),
}  # fmt: skip
_SECTIONS = {"rejected": "Rejected", "differs": "Other values, or no error", "fail": "Failures"}
_TITLES = {"rejected": "not supported", "differs": "reason, and what was seen", "fail": "what was seen"}


def verdicts(results: Path, name: str) -> dict[str, Verdict]:
    """Return the verdict on each test of a suite that was run on streamed models."""
    plain, streamed = (read(results_of(results, name, mode))[0] for mode in ("plain", "streamed"))
    return {test: judge(plain[test], row) for test, row in streamed.items()}


def summary(name: str, found: Mapping[str, Verdict]) -> str:
    """Return the counts of a suite in a line, and a line for each failure."""
    counts = Counter(each.kind for each in found.values())
    failed = [f"  {test}: {_one_line(each.reason)}" for test, each in found.items() if each.kind == "fail"]
    return "\n".join([f"{name}: {len(found)} tests: {', '.join(f'{counts[kind]} {kind}' for kind in KINDS)}", *failed])


def write_pages(results: Path) -> None:
    """Write each page whose suites have results."""
    for name in PAGES:
        if any(results_of(results, suite, "streamed").exists() for suite in suites_of(name)):
            (FOLDER / name).write_text(page(results, name), encoding="utf-8")


def suites_of(page_name: str) -> list[str]:
    return [name for name, suite in SUITES.items() if suite.images == (page_name == "peers-images.md")]


def page(results: Path, page_name: str) -> str:
    """Return a page in Markdown."""
    suites, (title, tests, collected) = suites_of(page_name), PAGES[page_name]
    found = {name: verdicts(results, name) for name in suites if results_of(results, name, "streamed").exists()}
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "transformers", "trl", "peft"))
    sources = _sources(results.parent)
    texts = {"title": title, "tests": tests, "collected": collected, "versions": versions, "sources": sources}
    lines = [_HEAD.format(log=LOG_TOLERANCE, parameter=PARAMETER_TOLERANCE, **texts)]
    rows = [_counts(results, name, each) for name, each in found.items()]
    total = ("all", *(sum(column) for column in zip(*(row[1:] for row in rows), strict=True)))
    others = [(name, *["not run"] * (len(total) - 1)) for name in suites if name not in found]
    lines += _table(("suite", "collected", "tried", "plain", "run", *KINDS), [*rows, *others, total])
    lines += filter(None, (_drawn(results, name) for name in found))
    for kind, title in _SECTIONS.items():
        groups: dict[tuple[str, str], list[str]] = defaultdict(list)
        for each in found.values():
            for test, verdict in each.items():
                if verdict.kind == kind:
                    seen = "" if kind == "rejected" else _one_line(verdict.reason)
                    groups[verdict.explanation, seen].append(test)
        if groups:
            rows = [
                (": ".join(filter(None, texts)), len(tests), f"`{_short(tests[0])}`") for texts, tests in groups.items()
            ]
            lines += ["", f"## {title}", "", *_table((_TITLES[kind], "tests", "one of them"), rows)]
    return "\n".join(lines) + "\n"


def _sources(folder: Path) -> str:
    """Return a clause with the versions of the tests, which are not those of the installed packages if a snapshot was taken."""
    files = {"TRL": folder / "trl" / "VERSION", "transformers": folder / "transformers" / "setup.py"}
    texts = {name: path.read_text("utf-8") for name, path in files.items() if path.exists()}
    found = {name: re.search(r'(?:\A|version=")([\d.]+\w*)', text) for name, text in texts.items()}
    return "tests of " + ", ".join(
        [f"{name} {each[1]}" for name, each in found.items() if each] + ["PEFT as installed"]
    )


def _drawn(results: Path, name: str) -> str:
    """Return a sentence on which tests of a suite were run, if not all."""
    run = read(results_of(results, name, "plain"))[1]
    also = f"all tests that match `{run['also']}`, and " if run["also"] else ""
    return f"\nOf {name}, {also}{run['share']}% of the{' others' if also else ' tests'}." if run["share"] < 100 else ""


def _counts(results: Path, name: str, found: Mapping[str, Verdict]) -> tuple[Any, ...]:
    plain, run = read(results_of(results, name, "plain"))
    counts = Counter(each.kind for each in found.values())
    passed = sum(row["outcome"] == "passed" for row in plain.values())
    return name, run["collected"], len(plain), passed, len(found), *(counts[kind] for kind in KINDS)


def _short(test: str) -> str:
    path, bracket, parameters = test.partition("[")
    return path.rpartition("/")[2] + bracket + parameters


def _one_line(text: str) -> str:
    short = " ".join(text.split()).replace("|", "\\|")
    return short if len(short) < 240 else short[:240].rpartition(" ")[0] + " ..."


def _table(columns: Iterable[Any], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    columns = tuple(columns)
    yield f"| {' | '.join(columns)} |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield f"| {' | '.join(str(cell) for cell in row)} |"
