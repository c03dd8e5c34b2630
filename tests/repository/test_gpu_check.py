"""scripts/gpu_check.py goes on after a failure, keeps within its limits, and prints the stacks of a hanging command."""

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.thinned_cases import thinned

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
    assert not check.run("hangs", [sys.executable, "-c", HANGING], tmp_path, 3.0, environment)
    log = (tmp_path / "hangs.txt").read_text()
    assert "wait_forever" in log
    assert "Thread" in log


@pytest.fixture
def ran(check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[str]]]:
    """Run the check with commands that do nothing but fail by name; return its exit code and the commands."""

    def main(*arguments: str, broken: str = "", tools: tuple[str, ...] = ()) -> tuple[int, list[str]]:
        names: list[str] = []
        monkeypatch.setattr(check, "run", lambda name, *_: names.append(name) or name != broken)
        monkeypatch.setattr(check, "describe_machine", lambda: "a machine")
        monkeypatch.setattr(check.shutil, "which", lambda name: name if name in tools else None)
        monkeypatch.setattr(sys, "argv", ["gpu_check.py", *arguments, "--output", str(tmp_path)])
        return check.main(), names

    return main


@pytest.mark.parametrize("broken", ["import", "kernels", "tests", ""])
def test_goes_on_after_a_failure(
    ran: Callable[..., tuple[int, list[str]]], tmp_path: Path, broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(broken=broken) == (
        1 if broken else 0,
        ["import", "ceilings", "first_steps", "kernels", "attention", "tests"],
    )
    assert (f"FAILED, or out of time: {broken}." in capsys.readouterr().out) == bool(broken)
    assert (tmp_path / "environment.txt").read_text() == "a machine"


def test_calls_run_by_name_and_what_is_not_installed_is_left_out(ran: Callable[..., tuple[int, list[str]]]) -> None:
    assert ran("1", tools=("compute-sanitizer",))[1][-1] == "sanitizer"
    assert ran("4") == (0, ["7b"])
    assert ran("3", "--minutes", "0") == (1, [])
    with pytest.raises(SystemExit):
        ran("8")


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_call_fits_into_ten_minutes_and_eight_files_of_one_folder(
    check: ModuleType, tmp_path: Path, device: str
) -> None:
    for call in check.CALLS:
        commands = check.commands(call, device, tmp_path)
        assert sum(command.minutes for command in commands) <= 9.5
        assert len({command.name for command in commands}) == len(commands)
        # Without a mark of their own, tests for a GPU are deselected.
        assert all(c.arguments.count("-m") == 2 for c in commands if "pytest" in c.arguments)
        words = [word for command in commands for word in command.arguments]
        written = [words[i + 1] for i, word in enumerate(words) if word in ("--output", "--trace-dir", "--profile")]
        assert all(Path(path).is_relative_to(tmp_path) for path in written)
        files = [path for path in written if Path(path).suffix]
        # A trace of each of our systems: three of 7B, two of 3B, and one of a mixture of experts.
        traces = {"3": 2, "4": 3, "5": 1}.get(call, 0) if device == "cuda" else 0
        assert 1 + len(commands) + len(files) + traces <= 8


def test_a_benchmark_that_is_stopped_keeps_what_it_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu = importlib.import_module("gpu")
    case = gpu.make_case(gpu.SUITES["3b"]()[0], "cpu", 1)
    printed = b'a warning\n{"seconds": [1.0]}\n{"seconds": [1.0], "waited": {}}\n{"seconds": [1'

    def stopped(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired([], 1.0, output=printed)

    monkeypatch.setattr(gpu.subprocess, "run", stopped)
    assert gpu.measure(case, 1.0, None) == {"seconds": [1.0], "waited": {}, "rows_at_once": case.rows_at_once}
    printed = b"a warning\n"
    assert "error" in gpu.measure(case, 1.0, None)


CHECKS = ("rates", "bits", "memory", "sleeps", "kills", "speed")


@pytest.mark.parametrize("name", thinned(CHECKS, every=len(CHECKS)))
def test_checks_for_two_gpus_on_toys(name: str) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_pair.py"), name, "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compilers_share_the_cores(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, workers in ((16, "4"), (2, "1")):
        monkeypatch.setattr(os, "cpu_count", lambda cores=cores: cores)
        assert check.make_environment([], 4)["TORCHINDUCTOR_COMPILE_THREADS"] == workers


def test_commands_find_the_packages_that_the_check_has_found(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters put packages on PYTHONPATH; the checkout's come first."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/modules/torch", "/modules/pytest"]))
    found = check.make_environment([Path("src")], 1)["PYTHONPATH"].split(os.pathsep)
    assert found == ["src", "/modules/torch", "/modules/pytest"]


def test_tests_that_compile_do_not_delay_the_others(check: ModuleType, tmp_path: Path) -> None:
    (tests,) = check.commands("2", "cuda", tmp_path)
    assert "gpu and not compiled" in tests.arguments
    assert f"faulthandler_timeout={check.HANG_SECONDS}" in tests.arguments
