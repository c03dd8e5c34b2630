"""scripts/gpu_check.py stops at the first failure, and prints the stacks of the threads of a hanging command."""

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
HANGING = """
import threading
def wait_forever():
    threading.Event().wait()
threading.Thread(target=wait_forever).start()
"""


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", ROOT / "scripts" / "gpu_check.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    monkeypatch.setattr(sys, "path", [*sys.path])
    spec.loader.exec_module(module)
    return module


def test_a_hanging_command_leaves_its_stacks(check: ModuleType, tmp_path: Path) -> None:
    environment = check.make_environment([], 1)
    assert not check.run("hangs", ["-c", HANGING], tmp_path, 3.0, environment)
    log = (tmp_path / "hangs.txt").read_text()
    assert "wait_forever" in log
    assert "Thread" in log


@pytest.mark.parametrize("broken", ["ceilings", "tests", None])
def test_stops_at_the_first_failure(
    check: ModuleType, tmp_path: Path, broken: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def run(name: str, *_: object) -> bool:
        ran.append(name)
        return name != broken

    monkeypatch.setattr(check, "run", run)
    monkeypatch.setattr(check, "describe_machine", lambda: "a machine")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--output", str(tmp_path)])
    assert check.main() == (0 if broken is None else 1)
    commands = ["ceilings", "first_steps", "attention", "tests"]
    assert ran == (commands if broken is None else commands[: commands.index(broken) + 1])
    assert (tmp_path / "environment.txt").read_text() == "a machine"


def test_compilers_share_the_cores(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, workers in ((16, "4"), (2, "1")):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert check.make_environment([], 4)["TORCHINDUCTOR_COMPILE_THREADS"] == workers


def test_tests_that_compile_do_not_delay_the_others(check: ModuleType, tmp_path: Path) -> None:
    (tests,) = check.commands("tests", "cuda", tmp_path)
    assert "gpu and not compiled" in tests.arguments
    assert f"faulthandler_timeout={check.HANG_SECONDS}" in tests.arguments
    minutes = [sum(c.minutes for c in check.commands(part, "cuda", tmp_path)) for part in ("first", "tests")]
    assert minutes == pytest.approx([2, 6])
