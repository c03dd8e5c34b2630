"""Run each row of the table on each of its cases, then compare its line in docs/compatibility.md."""

import re

import pytest

from tests.seams import rows  # noqa: F401  (fills the table)
from tests.seams.page import PAGE, _cell, line
from tests.seams.seam import ROWS, run


@pytest.mark.parametrize(("key", "case"), [(key, name) for key, row in ROWS.items() for name in (*row.cases, None)],
                         ids=lambda part: "page" if part is None else part)  # fmt: skip
def test_seam(key: str, case: str | None) -> None:
    if case is None:
        if line(ROWS[key]) not in PAGE.read_text(encoding="utf-8").splitlines():
            pytest.fail(f"run python -m tests.seams; the line is now\n{line(ROWS[key])}", pytrace=False)
    elif not ROWS[key].allows(outcome := run(key, case)):
        pytest.fail(f"{ROWS[key].text}: it {outcome.kind}, {outcome.message}", pytrace=False)


def test_the_page_has_exactly_the_lines_of_the_table() -> None:
    """The tests of the rows compare their own lines; this test compares the texts and their order."""
    written = re.findall(r"^\| (.*?) \| .* \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    texts = [_cell(row.text) for row in ROWS.values()]
    assert sorted(text for text in written if text != "use") == sorted(texts)
    assert len(set(texts)) == len(texts)
