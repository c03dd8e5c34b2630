"""A run that is killed at random times, and started again by the same command, ends like a run that was not killed."""

import hashlib
import json
import random
import re
import signal
import time
from pathlib import Path

import pytest

from horizon_lm.common.run_folders import checkpoints_in
from tests.e2e import tiny
from tests.e2e.processes import RunProcess
from tests.e2e.resuming import untimed


class KilledRun:
    """A run with a checkpoint after each step, which is killed at random times.

    Args:
        folder: where its files go.
        model: the model to train.
        num_steps: steps of the run, more than are done between the kills.
    """

    def __init__(self, folder: Path, model: Path, num_steps: int) -> None:
        rows = tiny.write_jsonl(folder / "rows.jsonl", tiny.alpaca_rows(14))
        settings = {
            "model_name_or_path": str(model), "datasets": str(rows), "device": "cpu", "per_device_train_batch_size": 3,
            "learning_rate": 3e-3, "lr_scheduler_type": "cosine", "logging_steps": 1, "max_steps": num_steps, "moments": "8bit",
            "save_strategy": "steps", "save_steps": 1,
        }  # fmt: skip
        self.run_file, self.folder = folder / "run.yaml", folder / "run"
        self.run_file.write_text(json.dumps(settings))
        self.random, self.log = random.Random(num_steps), list[str]()

    def start(self) -> RunProcess:
        return RunProcess(self.run_file, "--output_dir", self.folder)

    def kill(self) -> None:
        """Start the run, and kill it some time after one of the lines that it prints."""
        begun = checkpoints_in(self.folder)
        first = int(begun[-1].name.removeprefix("checkpoint-")) if begun else 0
        line = self.random.choice(["training data:", "run folder:", *(f"step {first + n}/" for n in (1, 1, 2, 2, 3))])
        with self.start() as run:
            run.wait_for(line)
            time.sleep(self.random.uniform(0.0, 0.05))
            run.send(signal.SIGKILL)
            assert run.end() == -signal.SIGKILL
            self._note(run)

    def finish(self) -> str:
        """Start the run, let it end, and return the hash of the model."""
        with self.start() as run:
            assert run.end() == 0, run.stderr
        found = hash_of(self.folder)
        self.log.append(f"finished: model.safetensors has the sha256 {found}")
        return found

    def _note(self, run: RunProcess) -> None:
        begun = re.search(r"^resume: from .*/(checkpoint-\d+)", run.stdout, re.MULTILINE)
        steps = re.findall(r"^step (\d+)/", run.stdout, re.MULTILINE)
        parts = [path.name.split(".")[1] for path in self.folder.glob(".*.horizon-part")]
        self.log.append(
            f"kill {len(self.log) + 1:2}: began from {begun[1] if begun else 'nothing':14}  "
            f"{f'killed after step {steps[-1]}' if steps else 'killed before a step':24}"
            f"{f'  while {parts[0]} was written or deleted' if parts else ''}".rstrip()
        )


def hash_of(folder: Path) -> str:
    return hashlib.sha256((folder / "model" / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize(
    ("num_kills", "num_steps"), [(5, 60), pytest.param(50, 600, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_a_run_that_is_killed_ends_like_one_that_is_not(
    tmp_path: Path, model: Path, num_kills: int, num_steps: int
) -> None:
    """With -s, the log of the kills is printed."""
    killed = KilledRun(tmp_path, model, num_steps)
    for _ in range(num_kills):
        killed.kill()
    found = killed.finish()
    whole = tmp_path / "whole"
    with RunProcess(killed.run_file, "--output_dir", whole, "--save_strategy", "no") as run:
        assert run.end() == 0
    print("\n", *killed.log, f"never killed:  model.safetensors has the sha256 {hash_of(whole)}", sep="\n")
    assert found == hash_of(whole)
    lines = untimed(killed.folder / "metrics.jsonl")
    assert lines == untimed(whole / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, num_steps + 1))
    assert len([line for line in killed.log if "after step" in line]) > num_kills // 3
    assert not list(killed.folder.glob(".*"))
