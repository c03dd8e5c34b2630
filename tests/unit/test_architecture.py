"""The documentation pages about the code agree with the code."""

import re
from pathlib import Path

import pytest

import horizon_lm

ROOT = Path(horizon_lm.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
MODULE = re.compile(r"\b(?:[a-z]+/)+[a-z_]+\.py\b")


WIDTH = 100  # columns that the site shows of a block of code in a window of 1300 pixels


@pytest.mark.parametrize("page", sorted(PAGE.parent.glob("*.md")), ids=lambda page: page.stem)
def test_listings_are_not_cut_off(page: Path) -> None:
    listings = re.findall(r"```text\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    assert all(len(line) <= WIDTH for listing in listings for line in listing.splitlines())


def test_every_decision_is_in_the_navigation() -> None:
    root = PAGE.parents[1]
    files = {path.relative_to(root).as_posix() for path in (root / "docs" / "decisions").glob("*.md")}
    assert files <= set(re.findall(r"docs/decisions/[\w.-]+\.md", (root / "mkdocs.yml").read_text(encoding="utf-8")))


@pytest.mark.parametrize("module", sorted(set(MODULE.findall(PAGE.read_text(encoding="utf-8")))))
def test_every_module_on_the_page_exists(module: str) -> None:
    assert (
        (ROOT / module).is_file()
        or (ROOT.parents[1] / "tests" / module).is_file()
        or (PAGE.parents[1] / module).is_file()
    )


def test_every_package_is_on_the_page() -> None:
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert packages == set(re.findall(r"^\| `([a-z]+)` \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE))
