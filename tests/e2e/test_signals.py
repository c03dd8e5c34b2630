"""Real signals to real processes: a run ends in one way, promptly, and leaves nothing behind."""

import contextlib
import itertools
import json
import signal
import time
from pathlib import Path

import psutil
import pytest

from horizon_lm.runs.checkpoints.manifest import read_manifest, verify
from tests.e2e import tiny
from tests.e2e.processes import SECONDS, RunProcess
from tests.support.thinned_cases import thinned

# Prints when a row is tokenized, and then takes forever.
SLOW_TOKENIZING = """
import time, sys
from horizon_lm.runs.data.tokenize import ExampleTokenizer
def slow(self, example):
    print("tokenizing", file=sys.stderr, flush=True)
    time.sleep(1000)
ExampleTokenizer.tokenize = slow
"""
# Does so in one of two processes only. The other one is idle soon.
IDLE_WORKER = """
import time, sys
from horizon_lm.runs.data.tokenize import ExampleTokenizer
tokenize = ExampleTokenizer.tokenize
def slow(self, example):
    if "night 0?" in str(example):
        time.sleep(1000)
    if "night 11?" in str(example):
        print("tokenizing", file=sys.stderr, flush=True)
    return tokenize(self, example)
ExampleTokenizer.tokenize = slow
"""
# Prints when the weights are loaded, which then takes forever.
SLOW_LOADING = """
import time
import horizon_lm.runs.training.setup as setup
load = setup.load_model
def slow(*args, **kwargs):
    print("loading", flush=True)
    time.sleep(1000)
    return load(*args, **kwargs)
setup.load_model = slow
"""
# Prints before the run has its folder, and goes on forever. Whoever started the tests may ignore SIGHUP, as nohup does.
SLOW_START = """
import signal, time
signal.signal(signal.SIGHUP, signal.SIG_DFL)
import horizon_lm.runs.training.ranks as ranks
def slow(config):
    print("starting", flush=True)
    time.sleep(1000)
ranks.Ranks.start = slow
"""
# Prints when a unit is written into a checkpoint, and goes on once a signal has arrived.
SLOW_SAVING = """
import time
import horizon_lm.common.disk as disk
from horizon_lm.runs.training.interrupts import Interrupts
arrived, handle, create, write = [], Interrupts._handle, disk.OutputFile.__init__, disk.OutputFile.write
def note(self, *arguments):
    arrived.append(True)
    handle(self, *arguments)
def noted(self, path, direct):
    create(self, path, direct)
    self.is_unit = path.parent.name == "units"
def slow(self, data):
    if self.is_unit:
        print("saving", flush=True)
        while not arrived:
            time.sleep(0.01)
    write(self, data)
Interrupts._handle, disk.OutputFile.__init__, disk.OutputFile.write = note, noted, slow
"""
# Prints before the second batch of an evaluation, and goes on once a signal has arrived.
SLOW_EVALUATION = """
import time
import horizon_lm.runs.training.evaluation as evaluation
from horizon_lm.runs.training.interrupts import Interrupts
arrived, handle, batch_from, made = [], Interrupts._handle, evaluation.batch_from, []
def note(self, *arguments):
    arrived.append(True)
    handle(self, *arguments)
def slow(rows, start, size):
    made.append(start)
    if len(made) == 2:
        print("evaluating", flush=True)
        while not arrived:
            time.sleep(0.01)
    return batch_from(rows, start, size)
Interrupts._handle, evaluation.batch_from = note, slow
"""
SLOW_EXPORT = """
import os, signal
from horizon_lm.runs.training import keeping
write = keeping.write_model
def interrupted(*args):
    os.kill(os.getpid(), signal.SIGTERM)
    return write(*args)
keeping.write_model = interrupted
"""

# Sends seven more signals when the last message is printed.
MORE_AT_THE_END = """
import os, signal
import horizon_lm.cli.common as common
print_line = common._print_line
def pressed(text):
    for _ in range(7):
        os.kill(os.getpid(), signal.SIGINT)
    print_line(text)
common._print_line = pressed
"""


@pytest.fixture
def run_file(tmp_path: Path, model: Path) -> Path:
    train = tiny.write_jsonl(tmp_path / "train.jsonl", tiny.alpaca_rows(12))
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model_name_or_path: {model}\ndatasets: {train}\noutput_dir: {tmp_path / 'run'}\ndevice: cpu\n"
        "per_device_train_batch_size: 4\nlogging_steps: 1\nmax_steps: 100000\n"
    )
    return path


def children(process: RunProcess) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def all_end(processes: list[psutil.Process]) -> bool:
    return not psutil.wait_procs(processes, timeout=SECONDS)[1]


@pytest.mark.parametrize(
    "name", thinned(["SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU"], every=5, keep=["SIGTERM"])
)
def test_a_signal_ends_a_run_after_the_step(tmp_path: Path, run_file: Path, name: str) -> None:
    with RunProcess(run_file) as run:
        run.wait_for("step 2/")
        run.send(signal.Signals[name])
        assert run.end() == 75
    assert f"{name}: stopping after this step" in run.stderr
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert any(
        line.startswith(f"interrupted after step {steps[-1]} of 100000 by {name}. Kept: ")
        for line in run.stderr.splitlines()
    )
    assert "Traceback" not in run.stderr
    assert not (tmp_path / "run" / ".horizon-lock").exists()


def test_a_closing_terminal_sends_its_signal_twice(run_file: Path) -> None:
    """The shell and the system both send SIGHUP; the run still finishes its step."""
    default = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # also if the tests run under nohup
    with RunProcess(run_file, setup=default) as run:
        run.wait_for("step 2/")
        run.send(signal.SIGHUP)
        run.send(signal.SIGHUP)
        assert run.end() == 75
    assert "interrupted after step" in run.stderr


def test_nohup_is_respected(run_file: Path) -> None:
    ignore = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"
    with RunProcess(run_file, setup=ignore) as run:
        run.wait_for("step 2/")
        run.send(signal.SIGHUP)
        run.wait_for("step 9/")
        run.send(signal.SIGTERM)
        assert run.end() == 75
    assert "SIGHUP" not in run.stderr


def test_a_second_signal_ends_a_step_that_hangs(run_file: Path) -> None:
    """Also if what it waits for never comes: the cleaning up of the engine waits for it, too."""
    hang = """
import threading
import horizon_lm.runs.training.interrupts as interrupts
from horizon_lm.runs.training.non_finite import NonFinite
interrupts._EXIT_SECONDS = 0.1
def hang(*args):
    print("hanging", flush=True)
    try:
        threading.Event().wait()
    finally:
        threading.Event().wait()
NonFinite.check_loss = hang
"""
    with RunProcess(run_file, "--step_timeout", 0.01, setup=hang) as run:
        run.wait_for("hanging")
        run.wait_for("warning: step 1 has taken more than 0 s (step_timeout); the run goes on waiting")
        run.send(signal.SIGTERM)
        run.wait_for("stopping after this step")
        run.send(signal.SIGTERM)
        assert run.end() == 75


@pytest.mark.parametrize("group", thinned([True, False], every=2))
def test_a_signal_ends_an_evaluation(tmp_path: Path, run_file: Path, group: bool) -> None:
    held_out = tiny.write_jsonl(tmp_path / "held_out.jsonl", tiny.alpaca_rows(3))
    with RunProcess(
        run_file, "--eval_datasets", held_out, "--per_device_eval_batch_size", 1, setup=SLOW_EVALUATION
    ) as run:
        run.wait_for("evaluating")
        run.send(signal.SIGTERM, group=group)
        assert run.end() == 75
    assert "interrupted after step 0 of 100000 by SIGTERM" in run.stderr


def test_a_signal_lets_the_export_finish(tmp_path: Path, run_file: Path) -> None:
    held_out = tiny.write_jsonl(tmp_path / "held_out.jsonl", tiny.alpaca_rows(3))
    arguments = ["--max_steps", 2, "--eval_datasets", held_out, "--per_device_eval_batch_size", 1]
    with RunProcess(run_file, *arguments, setup=SLOW_EXPORT) as run:
        assert run.end() == 0
    assert "SIGTERM: the exported model is not evaluated" in run.stdout
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    ("number", "setup"),
    thinned(itertools.product((signal.SIGTERM, signal.SIGINT), (SLOW_TOKENIZING, IDLE_WORKER)), every=4),
    ids=lambda each: {SLOW_TOKENIZING: "busy", IDLE_WORKER: "idle"}.get(each),
)
def test_a_signal_to_the_group_while_tokenizing(run_file: Path, number: signal.Signals, setup: str) -> None:
    with RunProcess(run_file, "--dataset_num_proc", 2, setup=setup) as run:
        run.wait_for("tokenizing")
        workers = children(run)
        assert len(workers) >= 2
        run.send(number, group=True)
        assert run.end() == 75
    assert all_end(workers)
    assert any(
        line.startswith(f"interrupted by {number.name}. Nothing was trained yet.") for line in run.stderr.splitlines()
    )
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize(
    ("moment", "setup"),
    [("step 2/", ""), pytest.param("loading", SLOW_LOADING, marks=pytest.mark.slow)],
    ids=["step", "loading"],
)
def test_nine_interrupts(run_file: Path, moment: str, setup: str) -> None:
    """Somebody who leans on Ctrl-C gets the same end as with two."""
    with RunProcess(run_file, setup=setup + MORE_AT_THE_END) as run:
        run.wait_for(moment)
        for _ in range(2):
            with contextlib.suppress(ProcessLookupError):  # a quick end may come before the second
                run.send(signal.SIGINT)
            time.sleep(0.1)
        assert run.end() == 75
    assert "Traceback" not in run.stderr
    assert "KeyboardInterrupt" not in run.stderr
    assert "interrupted" in run.stderr


def test_a_signal_to_the_group_while_loading(run_file: Path) -> None:
    with RunProcess(run_file, setup=SLOW_LOADING) as run:
        run.wait_for("loading")
        run.send(signal.SIGTERM, group=True)
        assert run.end() == 75
    assert any(line.startswith("interrupted by SIGTERM. Nothing was trained yet.") for line in run.stderr.splitlines())
    assert "Traceback" not in run.stderr


def test_a_signal_to_the_group_in_a_step(run_file: Path) -> None:
    with RunProcess(run_file, "--dataset_num_proc", 2) as run:
        run.wait_for("step 2/")
        run.send(signal.SIGTERM, group=True)
        assert run.end() == 75
    assert "interrupted after step" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_signal_to_the_group_during_a_save(tmp_path: Path, run_file: Path) -> None:
    """The checkpoint that is being written is completed, and the next run goes on from the newest one."""
    folder, saving = tmp_path / "run", ("--save_strategy", "steps", "--save_steps", 2)
    with RunProcess(run_file, *saving, setup=SLOW_SAVING) as run:
        run.wait_for("saving")
        assert not (folder / "checkpoint-2").exists()
        run.send(signal.SIGTERM, group=True)
        assert run.end() == 75
    assert "Traceback" not in run.stderr
    kept = sorted(path.name for path in folder.glob("*checkpoint*"))
    # Updates wait until the checkpoint is written, so the signal came in step 4 at the latest.
    assert kept in (["checkpoint-2"], ["checkpoint-2", "checkpoint-3"], ["checkpoint-2", "checkpoint-4"]), kept
    for name in kept:
        verify(folder / name, read_manifest(folder / name))
    last = kept[-1].removeprefix("checkpoint-")
    with RunProcess(run_file, "--max_steps", 5, "--resume_with_changes") as run:
        assert run.end() == 0, run.stderr
    assert f"resume: from {folder / kept[-1]} (step {last} of 100000)" in run.stdout


@pytest.mark.parametrize("setup", [SLOW_TOKENIZING, IDLE_WORKER], ids=["busy", "idle"])
def test_a_signal_to_the_process_while_tokenizing(run_file: Path, setup: str) -> None:
    with RunProcess(run_file, "--dataset_num_proc", 2, setup=setup) as run:
        run.wait_for("tokenizing")
        workers = children(run)
        run.send(signal.SIGTERM)
        assert run.end() == 75
    assert all_end(workers)


def test_a_signal_that_python_drops_is_repeated(run_file: Path) -> None:
    """In a destructor, an exception is printed and forgotten."""
    dropped = """
import os, signal, time
import horizon_lm.runs.training.interrupts as interrupts
import horizon_lm.runs.training.setup as setup
interrupts._REPEAT_SECONDS = 0.1
class Dropping:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)
def hang(*args):
    Dropping()
    print("dropped", flush=True)
    while True:
        time.sleep(0.01)
setup.load_tokenizer = hang
"""
    with RunProcess(run_file, setup=dropped) as run:
        run.wait_for("dropped")
        assert run.end() == 75
    assert any(line.startswith("interrupted by SIGTERM. Nothing was trained yet.") for line in run.stderr.splitlines())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_before_the_run_has_a_folder(run_file: Path, number: signal.Signals) -> None:
    with RunProcess(run_file, setup=SLOW_START) as run:
        run.wait_for("starting")
        run.send(number)
        assert run.end() == 75
    assert run.stderr.strip() == f"interrupted by {number.name}; files written before are intact"


def test_an_import_that_turns_a_signal_into_an_error(run_file: Path) -> None:
    """The extension modules of numpy do so: they cannot be imported again."""
    importing = """
import signal
import horizon_lm.cli as cli
def interrupted(name):
    try:
        signal.raise_signal(signal.SIGINT)
    except KeyboardInterrupt:
        raise ImportError("cannot load module more than once per process")
cli.import_module = interrupted
"""
    with RunProcess(run_file, setup=importing) as run:
        assert run.end() == 75
    assert run.stderr.strip() == "interrupted by SIGINT; files written before are intact"


def test_workers_do_not_outlive_a_killed_run(run_file: Path) -> None:
    with RunProcess(run_file, "--dataset_num_proc", 2, setup=SLOW_TOKENIZING) as run:
        run.wait_for("tokenizing")
        workers = children(run)
        assert len(workers) >= 2
        run.send(signal.SIGKILL)
        assert all_end(workers)


def test_another_run_in_the_same_folder_is_rejected(run_file: Path) -> None:
    with RunProcess(run_file) as first:
        first.wait_for("step 2/")
        with RunProcess(run_file) as second:
            assert second.end() == 2
        assert f"another run is writing into {run_file.parent / 'run'} (process {first.pid} on " in second.stderr
        first.send(signal.SIGKILL)
        first.end()
        with RunProcess(run_file, "--max_steps", 1) as third:  # the lock of a dead process is no obstacle
            assert third.end() == 0, third.stderr
