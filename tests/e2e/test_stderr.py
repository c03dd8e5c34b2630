"""Commands print nothing to standard error that is not ours, with all packages installed that print there themselves."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

import horizon_lm
from horizon_lm import errors
from horizon_lm.model import adapters
from tests.e2e import tiny

pytest.importorskip("triton")
pytest.importorskip("bitsandbytes")


def stderr_of(*arguments: object) -> str:
    command = [sys.executable, "-m", "horizon_lm", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250)
    assert done.stdout or done.returncode, done.stderr
    return done.stderr


def test_a_run_of_adapters(tmp_path: Path, model: Path) -> None:
    """triton's nanobind, PEFT's use of an old name of transformers, and bitsandbytes."""
    rows, run_file, run = (
        tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows()),
        tmp_path / "r.yaml",
        tmp_path / "run",
    )
    run_file.write_text(
        f"model_name_or_path: {model}\ndatasets: {rows}\noutput_dir: {run}\ndevice: cpu\nmax_steps: 1\n"
        "use_peft: true\nlora_target_modules: all-linear\n"
    )
    assert stderr_of("train", run_file) == ""


@pytest.mark.slow
def test_a_merge(tmp_path: Path, model: Path) -> None:
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows())
    settings = {"model_name_or_path": str(model), "datasets": str(rows), "device": "cpu", "max_steps": 1}
    settings |= {"output_dir": str(tmp_path / "run"), "use_peft": True, "lora_target_modules": "all-linear"}
    horizon_lm.train(settings, print_fn=lambda line: None)
    assert stderr_of("merge", tmp_path / "run" / "model", tmp_path / "merged") == ""


def test_a_run_from_python(tmp_path: Path, model: Path) -> None:
    """transformers' schedules import PEFT, and it bitsandbytes, in runs without adapters, too."""
    rows = tiny.write_jsonl(tmp_path / "rows.jsonl", tiny.alpaca_rows())
    settings = {"model_name_or_path": str(model), "datasets": str(rows), "output_dir": str(tmp_path / "run")}
    (tmp_path / "bitsandbytes.py").write_text(
        "import logging\nlogging.getLogger('bitsandbytes.cextension').error('bitsandbytes library load error')\n"
        "raise ImportError\n"
    )
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import horizon_lm\n"
        f"horizon_lm.train({settings!r}, device='cpu', max_steps=1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stderr) == (0, "")


def test_messages_of_bitsandbytes_during_a_command() -> None:
    """transformers imports it, too."""
    log = "logging.getLogger('bitsandbytes.backends.cpu.ops').error('Failed to load CPU gemm_4bit_forward')"
    program = f"import logging; from horizon_lm import cli; cli.app = lambda: {log}; cli.main()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=250)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_plan_of_a_model_with_kernels_of_other_packages() -> None:
    """transformers recommends packages that make its code faster. A plan runs none of it."""
    model = ("--model", "Qwen/Qwen3-Next-80B-A3B-Instruct", "--device", "h200", "--host-memory", "4TB")
    assert stderr_of("plan", *model, "--expert_tile", "64") == ""


def run_program(program: str, *options: str) -> str:
    done = subprocess.run([sys.executable, *options, "-c", program], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_warnings_of_a_command_are_lines_of_its_own(model: Path) -> None:
    """With another version of transformers than the one whose models were compared, every command that opens a model warns."""
    command = ["horizon-lm", "generate", str(model), "hello", "--max-new-tokens", "2", "--device", "cpu"]
    program = (
        f"import sys; from horizon_lm.model import proven; proven._table()['transformers'] = '1.0'; sys.argv = {command!r}\n"
        "from horizon_lm.cli import main; main()"
    )
    first, *others = run_program(program).splitlines()
    assert first.startswith("warning: models were compared with plain autograd in transformers 1.0, and ")
    assert all(line.startswith("key-value cache: ") for line in others)


EACH = (
    "import warnings; from horizon_lm import cli, errors; cli.show_warnings_as_lines()\n"
    "kinds = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, Warning)]\n"
    "for kind in (*kinds, UserWarning, RuntimeWarning, FutureWarning): warnings.warn(kind.__name__, kind)"
)


@pytest.mark.parametrize(("options", "shown"), [((), set()), (("-W", "default"), {"FutureWarning"})])
def test_warnings_of_all_kinds_and_of_libraries(options: tuple[str, ...], shown: set[str]) -> None:
    ours = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Warning)}
    expected = ours | {"UserWarning", "RuntimeWarning"} | shown
    assert sorted(run_program(EACH, *options).splitlines()) == sorted(f"warning: {name}" for name in expected)


def test_warnings_in_python_name_the_line_of_the_caller(tmp_path: Path) -> None:
    """A control: outside of commands they are Python's, at the line of other code that has led to them."""
    script = tmp_path / "script.py"
    script.write_text("import horizon_lm.errors\n\nhorizon_lm.errors.warn('look')\n")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=250)
    assert done.stderr.splitlines()[0] == f"{script}:3: UserWarning: look"


def test_a_command_that_fails() -> None:
    assert stderr_of("plan", "nowhere.yaml").splitlines() == [
        f"error: nowhere.yaml: No such file or directory; relative paths start in {Path.cwd()}"
    ]


@pytest.mark.parametrize(
    ("logger", "text"),
    [
        ("bitsandbytes.cextension", "bitsandbytes library load error"),  # without a library for this version of CUDA
        ("bitsandbytes.backends.cpu.ops", "Failed to load CPU gemm_4bit_forward"),  # on a CPU with AVX-512
    ],
)
def test_messages_of_bitsandbytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, logger: str, text: str
) -> None:
    (tmp_path / "peft.py").write_text(f"import logging\nlogging.getLogger({logger!r}).error({text!r})\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "peft", sys)  # so that what is there now is put back
    del sys.modules["peft"]
    adapters._peft()
    assert caplog.records == []
    logging.getLogger(logger).error("of the user's own import")
    assert len(caplog.records) == 1
