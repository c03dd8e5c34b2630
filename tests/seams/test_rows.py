"""Run each row of the table on each of its cases, then compare its line in docs/generated/compatibility.md."""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.seams import rows  # noqa: F401  (fills the table)
from tests.seams.page import PAGE, cell, line, words
from tests.seams.seam import ROWS, run


def _params() -> Iterator[Any]:
    """Yield each row with each of its cases, and with None for its line of the page.

    By default the first case of a row runs, and in every third row another one, at another place in each. A line needs
    all cases.
    """
    for number, (key, row) in enumerate(ROWS.items()):
        names = list(row.cases)
        by_default = {names[0], names[number // 3 % len(names) if number % 3 == 0 else 0]}
        for name in (*names, None):
            runs = name in by_default or len(names) == 1
            yield pytest.param(key, name, marks=[] if runs else pytest.mark.slow)


@pytest.mark.parametrize(("key", "case"), list(_params()), ids=lambda part: "page" if part is None else part)
def test_seam(key: str, case: str | None) -> None:
    written = PAGE.read_text(encoding="utf-8").splitlines()
    if case is None:
        if line(ROWS[key]) not in written:
            pytest.fail(f"run python -m tests.seams; the line is now\n{line(ROWS[key])}", pytrace=False)
        return
    if not ROWS[key].allows(outcome := run(key, case)):
        pytest.fail(f"{ROWS[key].text}: it {outcome.kind}, {outcome.message}", pytrace=False)
    on_page = next((each for each in written if each.startswith(f"| {cell(ROWS[key].text)} |")), "no line")
    if cell(words(outcome)) not in on_page:
        pytest.fail(f"run python -m tests.seams; the line is\n{on_page}\nand lacks\n{words(outcome)}", pytrace=False)


def test_the_page_has_exactly_the_lines_of_the_table() -> None:
    """The tests of the rows compare their own lines; this test compares the texts and their order."""
    written = re.findall(r"^\| (.*?) \| .* \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    texts = [cell(row.text) for row in ROWS.values()]
    assert sorted(text for text in written if text != "use") == sorted(texts)
    assert len(set(texts)) == len(texts)
