"""Each row of the table, on each of its cases."""

import pytest

from tests.seams import rows  # noqa: F401  (fills the table)
from tests.seams.seam import EITHER, REJECTED, ROWS, WORKS, WRONG, all_cases, run


@pytest.mark.parametrize(("key", "case"), all_cases(), ids=lambda part: part)
def test_seam(key: str, case: str) -> None:
    outcome, expected = run(key, case), ROWS[key].expected
    assert outcome.kind != WRONG, outcome.message
    allowed = (WORKS, REJECTED) if expected == EITHER else (expected,)
    assert outcome.kind in allowed, outcome.message
