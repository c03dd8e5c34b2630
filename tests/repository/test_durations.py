"""A command takes as long on one page as on another."""

import re
from collections import defaultdict
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("README.md", "CONTRIBUTING.md", "Makefile", "docs/*.md")
COMMAND = re.compile(r"(?:make demo )?FAST=1|make [a-z-]+|python examples/in_one_file\.py|horizon-lm doctor")
_NUMBER = r"(?:\d+|half an|an?|two|three|four|five|six|eight|ten|fifteen|twenty|thirty|forty|ninety)"
DURATION = re.compile(
    rf"\bin seconds\b|\b(?:about |at most )?(?:{_NUMBER} to )?{_NUMBER} (?:seconds?|minutes?|hours?)\b"
)


def durations(pages: Mapping[str, str]) -> dict[str, dict[str, list[str]]]:
    """Return the pages of each duration that follows a command in its paragraph or row of a table, by command and duration."""
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for page, text in pages.items():
        for paragraph in re.split(r"\n\s*\n|\n(?=[|#\t])|\n(?=\d+\. )", text):
            matches = [*COMMAND.finditer(paragraph)]
            if paragraph.startswith("|"):
                matches = matches[:1]  # a row is about its first command
            for match, following in zip_longest(matches, matches[1:]):
                end = following.start() if following else len(paragraph)
                if duration := DURATION.search(" ".join(paragraph[match.end() : end].split())):
                    command = "make demo FAST=1" if "FAST" in match[0] else match[0]
                    found[command][duration[0]].append(page)
    return found


def test_one_duration_for_one_command() -> None:
    found = durations({path.name: path.read_text(encoding="utf-8") for page in PAGES for path in ROOT.glob(page)})
    assert {command: dict(each) for command, each in found.items() if len(each) > 1} == {}
    several = {command for command, each in found.items() if len({*next(iter(each.values()))}) > 1}
    assert several >= {
        "make demo",
        "make demo FAST=1",
        "make test",
        "make test-slow",
        "python examples/in_one_file.py",
        "make gpu-check",
    }


def test_two_durations_are_found() -> None:
    """The control: other numbers, words and rows of tables."""
    pages = {
        "a": "`make test` runs everything\n(about half an hour on two cores), and `make demo` little.\n\nIt took 3 minutes.",
        "b": "| `make test` | all; ten to fifteen minutes |\n| `make demo FAST=1` | 8 steps; about 90 seconds |",
    }
    assert durations(pages) == {
        "make test": {"about half an hour": ["a"], "ten to fifteen minutes": ["b"]},
        "make demo FAST=1": {"about 90 seconds": ["b"]},
    }


def test_the_demo_says_what_the_pages_say() -> None:
    found = durations({"README.md": (ROOT / "README.md").read_text(), "Makefile": (ROOT / "Makefile").read_text()})
    demo = (ROOT / "examples" / "demo.py").read_text(encoding="utf-8")
    stated = re.search(r'^DURATION, FAST_DURATION = "(.*)", "(.*)"', demo, re.MULTILINE)
    assert stated is not None
    assert (*found["make demo"], *found["make demo FAST=1"]) == stated.groups()
