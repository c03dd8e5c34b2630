"""The documentation pages about the code agree with the code."""

import re
from pathlib import Path

import pytest

import horizon_lm

ROOT = Path(horizon_lm.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
READING = PAGE.with_name("reading.md")
MODULE = re.compile(r"\b(?:[a-z]+/)+[a-z_]+\.py\b")


WIDTH = 100  # columns that the site shows of a block of code in a window of 1300 pixels


@pytest.mark.parametrize("page", sorted(PAGE.parent.glob("*.md")), ids=lambda page: page.stem)
def test_listings_are_not_cut_off(page: Path) -> None:
    listings = re.findall(r"```text\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert all(len(line) <= WIDTH for listing in listings for line in listing.splitlines())


def test_the_navigation_has_each_page_decision_and_result_and_nothing_else() -> None:
    root = PAGE.parents[1]
    folders = ("docs", "docs/generated", "docs/decisions", "benchmarks/results")
    files = {path.relative_to(root).as_posix() for folder in folders for path in (root / folder).glob("*.md")}
    listed = re.findall(rf"(?:{'|'.join(folders)})/[\w.-]+\.md", (root / "mkdocs.yml").read_text(encoding="utf-8"))
    assert sorted(listed) == sorted(files)


@pytest.mark.parametrize("module", sorted({m for p in (PAGE, READING) for m in MODULE.findall(p.read_text("utf-8"))}))
def test_every_module_on_the_pages_exists(module: str) -> None:
    assert (
        (ROOT / module).is_file()
        or (ROOT.parents[1] / "tests" / module).is_file()
        or (PAGE.parents[1] / module).is_file()
    )


def test_eighteen_files_are_in_order() -> None:
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", READING.read_text("utf-8"), re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(1, 19))
    assert all(MODULE.search(file) for _, file in rows)


def test_every_name_on_the_reading_page_is_in_its_file() -> None:
    rows = re.findall(r"^\| \d+ \| .*?`([\w/]+\.py)`.*? \| (.*) \|$", READING.read_text("utf-8"), re.MULTILINE)
    for file, text in rows:
        path = PAGE.parents[1] / file
        code = (path if path.is_file() else ROOT / file).read_text("utf-8")
        for name in re.findall(r"`([\w.]+)`", text):
            assert name.split(".")[-1] in code, f"{file}: {name}"


def test_every_package_is_on_the_page() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(re.findall(r"^\| `([a-z]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
