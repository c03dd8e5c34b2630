"""A new optimizer is tested by every law with one line: that in the table of optimizers."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAWS = ("placement", "planned_bytes", "ranks", "rejections", "resume", "runs", "saved", "updates")
LINE = '    "tiger": OptimizerEntry("horizon_lm.optim.tiger", "Tiger", 1, settings=("update_in_backward",)),\n'


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """Return a copy of the package with one more module, which is Lion under another name, and one more line."""
    source = shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    modules = source / "horizon_lm" / "optim"
    (modules / "tiger.py").write_text((modules / "lion.py").read_text().replace("Lion", "Tiger"))
    table = source / "horizon_lm" / "common" / "optimizers.py"
    before, muon, after = table.read_text().partition('    "muon": OptimizerEntry(')
    table.write_text(before + LINE + muon + after)
    return source


@pytest.mark.slow
def test_one_line_adds_an_optimizer_to_every_law(package: Path) -> None:
    environment = os.environ | {"PYTHONPATH": str(package)}
    laws = [str(ROOT / "tests" / "laws" / f"test_{law}.py") for law in LAWS]
    command = [sys.executable, "-m", "pytest", "-q", "-rA", "-n", "0", "-p", "no:cacheprovider", "-k", "tiger", *laws]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.findall(r"^PASSED tests/laws/test_(\w+)\.py", done.stdout, re.MULTILINE)
    assert set(passed) == set(LAWS)
