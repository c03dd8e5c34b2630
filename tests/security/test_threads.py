"""Too few threads or processes allowed: libraries abort without them, so a command says so before it loads one."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from horizon_lm.cli import common
from horizon_lm.common.resources import threads_left
from tests.e2e.command import run

STATUS = "Name:\tpython\nUid:\t{user}\t0\t0\t0\nThreads:\t{threads}\nCapEff:\t{capabilities:016x}\n"


def system(root: Path, capabilities: int = 0, pids: str | None = None) -> None:
    """Write /proc with 12 threads of user 1000, and a control group."""
    for number, user, threads in (("self", 1000, 7), ("7", 1000, 7), ("8", 1000, 5), ("9", 2000, 100)):
        folder = root / "proc" / number
        folder.mkdir(parents=True)
        (folder / "status").write_text(STATUS.format(user=user, threads=threads, capabilities=capabilities))
    (root / "proc" / "self" / "cgroup").write_text("0::/run\n")
    (root / "cgroups" / "run").mkdir(parents=True)
    if pids is not None:
        (root / "cgroups" / "run" / "pids.max").write_text(pids)
        (root / "cgroups" / "run" / "pids.current").write_text("90\n")


@pytest.mark.parametrize(
    ("limit", "user", "capabilities", "pids", "left"),
    [
        (20, 1000, 0, None, 8),
        (10, 1000, 0, None, 0),
        (20, 0, 0, None, None),
        (20, 1000, 1 << 24, None, None),
        (-1, 1000, 0, "max\n", None),
        (-1, 1000, 0, "100\n", 10),
        (20, 1000, 0, "100\n", 8),
    ],
)
def test_threads_left(limit: int, user: int, capabilities: int, pids: str | None, left: int, tmp_path: Path) -> None:
    system(tmp_path, capabilities, pids)
    found = threads_left(tmp_path / "proc", tmp_path / "cgroups", user, limit)
    assert (found and found[0]) == left


def test_a_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "threads_left", lambda: (3, "RLIMIT_NPROC (ulimit -u)"))
    result = run("train", "run.yaml")
    assert result.exit_code == 2
    assert "only 3 more threads or processes may be started" in result.stderr
    assert run("version").exit_code == 0


@pytest.mark.skipif(not (shutil.which("setpriv") and shutil.which("prlimit")), reason="needs util-linux")
def test_under_a_real_limit(tmp_path: Path) -> None:
    as_user = [
        "setpriv",
        "--reuid",
        "65534",
        "--clear-groups",
        "--inh-caps",
        "-all,+dac_override",
        "--ambient-caps",
        "-all,+dac_override",
    ]
    command = ["prlimit", "--nproc=2", *as_user, sys.executable, "-c"]
    if subprocess.run([*command, ""], capture_output=True).returncode:
        pytest.skip("may not change the user")
    source = str(Path(__file__).resolve().parents[2] / "src")
    code = f"import sys; sys.path.insert(0, {source!r}); from horizon_lm.cli import app; app()"
    result = subprocess.run([*command, code, "train", "run.yaml"], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 2, result.stderr
    assert "RLIMIT_NPROC" in result.stderr
