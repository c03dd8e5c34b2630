"""A new entry of a table is tested by every law: an optimizer with one line, a format of rows with one and its function."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAWS = ("placement", "planned_bytes", "ranks", "rejections", "resume", "runs", "saved", "updates")
OPTIMIZER = '    "tiger": OptimizerEntry("horizon_lm.optim.tiger", "Tiger", 1, settings=("update_in_backward",)),\n'
FORMAT = '    RowFormat("riddle", ("sft",), (("riddle", "solution"),), _WITH_MESSAGES),\n'
CONVERTER = '    "riddle": _from_riddle,\n'
FUNCTION = """def _from_riddle(row: Mapping[str, Any]) -> Conversation:
    turns = zip(("user", "assistant"), ("riddle", "solution"), strict=True)
    return _conversation(row, [{"role": role, "content": _text_field(row, name)} for role, name in turns])


"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a copy of the package that a test may change."""
    ignored = shutil.ignore_patterns("__pycache__")
    return shutil.copytree(ROOT / "src", tmp_path / "src", ignore=ignored) / "horizon_lm"


def insert(file: Path, text: str, before: str) -> None:
    """Insert ``text`` into a file, before the only place of ``before``."""
    start, found, end = file.read_text().partition(before)
    assert found
    assert before not in end
    file.write_text(start + text + found + end)


def laws_passed(package: Path, laws: tuple[str, ...], name: str) -> set[str]:
    """Return those of the laws that have passed cases of an entry; fail if one of the cases fails."""
    environment = os.environ | {"PYTHONPATH": str(package.parent)}
    files = [str(ROOT / "tests" / "laws" / f"test_{law}.py") for law in laws]
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-n", "0", "-p", "no:cacheprovider", "-k", name, *files]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    return set(re.findall(r"^PASSED tests/laws/test_(\w+)\.py", done.stdout, re.MULTILINE))


@pytest.mark.slow
def test_one_line_adds_an_optimizer_to_every_law(package: Path) -> None:
    optim = package / "optim"
    (optim / "tiger.py").write_text((optim / "lion.py").read_text().replace("Lion", "Tiger"))
    insert(package / "common" / "optimizers.py", OPTIMIZER, before='    "muon": OptimizerEntry(')
    assert laws_passed(package, LAWS, "tiger") == set(LAWS)


def test_a_function_and_its_lines_add_a_format_of_rows(package: Path) -> None:
    insert(package / "runs" / "config" / "datasets.py", FORMAT, before='    RowFormat("text",')
    insert(package / "runs" / "data" / "formats.py", FUNCTION, before="def _from_alpaca(")
    insert(package / "runs" / "data" / "formats.py", CONVERTER, before='    "text": _from_text,')
    assert laws_passed(package, ("formats",), "riddle") == {"formats"}
