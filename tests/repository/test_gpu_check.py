"""scripts/gpu_check.py goes on after a failure, keeps within its limits, and prints the stacks of a hanging command."""

import importlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

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
    log = tmp_path / "log.txt"
    assert check.run("before", [sys.executable, "-c", "print('first')"], log, 60.0, environment)
    assert not check.run("hangs", [sys.executable, "-c", HANGING], log, 3.0, environment)
    text = log.read_text()
    assert (
        text.index("first") < text.index("before: passed") < text.index("wait_forever") < text.index("hangs: STOPPED")
    )
    assert "Thread" in text


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


THREE_CALLS = [
    "ceilings_A", "3b", "resident-3b", "new", "compiled", "ceilings_B", "7b", "peers", "losses", "resident-7b",
    "ceilings_C", "14b", "8b-24gb", "quantized",
]  # fmt: skip


@pytest.fixture
def with_peft(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "is_installed", lambda module: True)


@pytest.mark.usefixtures("with_peft")
@pytest.mark.parametrize("broken", ["ceilings_A", "peers", "quantized", ""])
def test_goes_on_after_a_failure(
    ran: Callable[..., tuple[int, list[str]]], tmp_path: Path, broken: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ran(broken=broken) == (1 if broken else 0, THREE_CALLS)
    assert (f"FAILED, or out of time: {broken}." in capsys.readouterr().out) == bool(broken)
    assert (tmp_path / "environment.txt").read_text() == "a machine"


def test_a_command_that_is_made_to_fail(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands after it run, their results are there, and the check names it and exits with 1."""

    def commands(call: str, device: str, output: Path) -> list[Any]:
        write = "import sys; open(sys.argv[1], 'w').write('found')"
        return [
            check.Command(name, ["-c", write, str(output / f"{name}.md")], 1.0) for name in ("first", "second", "third")
        ]

    monkeypatch.setattr(check, "commands", commands)
    monkeypatch.setattr(
        sys, "argv", ["gpu_check.py", "A", "--device", "cpu", "--break", "second", "--output", str(tmp_path)]
    )
    assert check.main() == 1
    assert sorted(path.name for path in tmp_path.glob("*.md")) == ["first.md", "third.md"]
    printed, log = capsys.readouterr().out, (tmp_path / "log_A.txt").read_text()
    assert "FAILED, or out of time: second. Results are in" in printed
    for text in (printed, log):
        assert "this command was made to fail" in text
        assert "second: FAILED with exit code 1" in text
        assert "third: passed" in text


def test_what_is_not_installed_is_left_out(
    check: ModuleType, ran: Callable[..., tuple[int, list[str]]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:  # fmt: skip
    monkeypatch.setattr(check, "is_installed", lambda module: module != "peft")
    assert ran("C") == (0, ["ceilings_C", "14b", "8b-24gb"])
    assert "quantized: left out, peft is not installed" in capsys.readouterr().out
    assert ran("T", tools=("compute-sanitizer",))[1][-1] == "sanitizer"
    assert ran("T")[1][-1] == "moe"
    assert ran("A", "--minutes", "0") == (1, [])
    with pytest.raises(SystemExit):
        ran("8")


def test_a_command_gets_the_time_that_others_have_left(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is left, but the minutes of the commands after it; and a benchmark is told."""
    given: list[tuple[str, float]] = []

    def run(name: str, words: list[str], log: Path, seconds: float, environment: dict[str, str]) -> bool:
        given.append((name, seconds))
        if "--minutes" in words:
            assert 60 * float(words[words.index("--minutes") + 1]) == pytest.approx(seconds - 12, abs=0.5)
        return True

    monkeypatch.setattr(check, "run", run)
    monkeypatch.setattr(check, "describe_machine", lambda: "")
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "B", "--output", os.devnull])
    monkeypatch.setattr(check.Path, "mkdir", lambda *_, **__: None)
    monkeypatch.setattr(check.Path, "write_text", lambda *_: None)
    monkeypatch.setattr(check.Path, "unlink", lambda *_, **__: None)
    check.main()
    commands = {command.name: command for command in check.commands("B", "cuda", Path())}
    for name, seconds in given:  # they end at once, so the last one has nearly all of the call
        assert seconds >= 60 * commands[name].minutes - 1
    assert given[-1][1] > 60 * 9


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_call_fits_into_ten_minutes_and_eight_files_of_one_folder(
    check: ModuleType, tmp_path: Path, device: str
) -> None:
    for call in check.CALLS:
        commands = check.commands(call, device, tmp_path)
        assert sum(command.minutes for command in commands) <= 9.501
        assert len({command.name for command in commands}) == len(commands)
        # Without a mark of their own, tests for a GPU are deselected.
        assert all(c.arguments.count("-m") == 2 for c in commands if "pytest" in c.arguments)
        words = [word for command in commands for word in command.arguments]
        written = [words[i + 1] for i, word in enumerate(words) if word in ("--output", "--trace-dir")]
        # What is measured first is read by others.
        written += [words[i + 1] for i, word in enumerate(words) if word == "--profile" and words[i - 2] == "--output"]
        assert all(Path(path).is_relative_to(tmp_path) for path in written)
        files = [path for path in written if Path(path).suffix]
        # A trace of each of our systems that is trained; a stand-in of 14B leaves none beside the first.
        traces = {"A": 2, "B": 1, "C": 2, "T": 1}.get(call, 0)
        log_and_environment = 2
        assert log_and_environment + len(files) + traces <= 8


def test_a_benchmark_that_is_stopped_keeps_what_it_has_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    gpu = importlib.import_module("gpu")
    case = gpu.make_case(gpu.SUITES["3b"]()[0], "cpu", 1)
    printed = b'a warning\n{"seconds": [1.0]}\n{"seconds": [1.0], "waited": {}}\n{"seconds": [1'

    def stopped(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired([], 1.0, output=printed)

    monkeypatch.setattr(gpu.subprocess, "run", stopped)
    known = {"seconds": [1.0], "waited": {}, "rows_at_once": case.rows_at_once}
    assert gpu.measure(case, 1.0, None) == known | {"stopped": "stopped after 1 s"}
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
    tests = {command.name: command.arguments for command in check.commands("T", "cuda", tmp_path)}["tests"]
    assert "gpu and not compiled" in tests
    assert f"faulthandler_timeout={check.HANG_SECONDS}" in tests
