"""No file imports from a module of tests or a conftest; what several files use is in tests/support."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# Programs that tests run stand in strings, so that lines are read and not the syntax tree.
_IMPORT = re.compile(r"^\s*(?:from|import)\s+tests\b.*\b(?:test_\w+|conftest)\b.*$", re.MULTILINE)


def imports_of_tests(folder: Path) -> list[str]:
    """Return the imports that must not be, each with its file."""
    return [
        f"{path.relative_to(folder)}: {found.group().strip()}"
        for path in sorted(folder.rglob("*.py"))
        for found in _IMPORT.finditer(path.read_text(encoding="utf-8"))
    ]


def test_no_file_imports_from_a_test() -> None:
    assert imports_of_tests(TESTS) == []


@pytest.mark.parametrize(
    "line",
    [
        "from tests.data.test_data import write",
        "    from tests.gpu.conftest import Accelerator",
        "from tests.data import test_data",
    ],
)
def test_such_an_import_is_found(tmp_path: Path, line: str) -> None:
    (tmp_path / "helper.py").write_text(f"def use():\n    pass\n{line}\nfrom tests.support import tiny_models\n")
    assert imports_of_tests(tmp_path) == [f"helper.py: {line.strip()}"]
