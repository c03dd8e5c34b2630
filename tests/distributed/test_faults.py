"""A rank that dies, fails or hangs ends the others, which name it; the run then goes on from its last checkpoint."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

import horizon_lm
from tests.distributed.runs import assert_same, environment_of, free_port, lines_of, outputs_of
from tests.e2e import resuming, tiny
from tests.e2e.processes import RunProcess
from tests.support import tiny_models

SECONDS = 30.0  # until the other ranks have ended
SETUP = """
import os, signal, time
from horizon_lm.runs.checkpoints.saving import CheckpointWriter
from horizon_lm.engine.units.block_autograd import BlockAutograd
from horizon_lm.engine.units.blocks import Blocks
from horizon_lm.engine.units.expert_call import ExpertCall
from horizon_lm.engine.units.tiled_backward import TiledBackward
from horizon_lm.optim.update_tasks import Pieces
from horizon_lm.runs.training.loop import Loop

PLACES = {
    "forward": (Blocks, "forward"), "backward": (BlockAutograd, "backward"), "update": (Pieces, "run"),
    "save": (CheckpointWriter, "_write_file"), "tile": (ExpertCall, "compute"),
    "tile's gradients": (TiledBackward, "_differentiate_tile"),
}
dying, _, place = os.environ.get("DIE", "").partition(":")
once = os.environ.get("ONCE")
at_step = 0

def dies(original):
    def method(self, *args, **kwargs):
        if at_step == 4 and dying == os.environ["RANK"] and not (once and os.path.exists(once)):
            if once:
                open(once, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, *args, **kwargs)
    return method

if place:
    owner, name = PLACES[place]
    setattr(owner, name, dies(getattr(owner, name)))

train_step = Loop.train_step
def slow(self, batch, step):
    global at_step
    at_step = step
    if step == 4 and os.environ.get("HANG") == str(self.ranks.rank):
        time.sleep(1000)
    train_step(self, batch, step)
    time.sleep(0.2)
Loop.train_step = slow
"""
MAIN = """
from horizon_lm.cli import main
main()
"""


class Ranks:
    """Processes of a run, each with the environment that torchrun would give it."""

    def __init__(self, run_file: Path, count: int, **environment: str) -> None:
        port = free_port()
        self.processes = [
            RunProcess(run_file, setup=SETUP, environment=environment_of(rank, count, port) | environment)
            for rank in range(count)
        ]

    def wait_for_step(self, folder: Path, step: int) -> None:
        limit = time.monotonic() + 120
        while time.monotonic() < limit:
            if (folder / "metrics.jsonl").is_file() and any(line["step"] >= step for line in lines_of(folder)):
                return
            time.sleep(0.05)
        raise AssertionError(f"step {step} was not reached: {[each.stderr for each in self.processes]}")

    def end(self, timeout: float) -> list[tuple[int, str]]:
        """Return the exit codes and the errors."""
        limit = time.monotonic() + timeout
        try:
            return [(each.end(max(1.0, limit - time.monotonic())), each.stderr) for each in self.processes]
        finally:
            for each in self.processes:
                each.close()


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    made = resuming.settings(tmp_path, Path(tiny.save_model(tmp_path / "model")))
    made |= {"per_device_train_batch_size": 2, "max_steps": 12, "precision": "float32", "logging_steps": 1}
    return made | {"save_steps": 1, "output_dir": str(tmp_path / "run"), "sample_steps": 100}


def write(settings: dict[str, Any], path: Path) -> Path:
    path.write_text(yaml.safe_dump(settings))
    return path


def mixture(folder: Path) -> Path:
    """Write a model with experts, and its tokenizer."""
    tokenizer = tiny.build_tokenizer()
    tiny_models.build("qwen3_moe", vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("killed", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_rank_ends_the_others(settings: dict[str, Any], tmp_path: Path, killed: int) -> None:
    run_file, folder = write(settings, tmp_path / "run.yaml"), Path(settings["output_dir"])
    ranks = Ranks(run_file, 2)
    ranks.wait_for_step(folder, 4)
    ranks.processes[killed].send(signal.SIGKILL)
    code, errors = ranks.end(SECONDS)[1 - killed]
    assert code == 75
    assert f"rank {killed} has" in errors
    found = Ranks(run_file, 2).end(120)
    assert [code for code, _ in found] == [0, 0], found
    alone = settings | {"output_dir": str(tmp_path / "one"), "per_device_train_batch_size": 4}
    horizon_lm.train(alone, print_fn=lambda line: None)
    assert_same(folder, tmp_path / "one")


@pytest.mark.slow
@pytest.mark.parametrize("place", ["forward", "backward", "update", "save", "tile", "tile's gradients"])
def test_a_rank_that_is_killed_anywhere(settings: dict[str, Any], tmp_path: Path, place: str) -> None:
    """The run goes on from its last checkpoint, with the bits of one that was not interrupted."""
    if "tile" in place:
        settings |= {"model_name_or_path": str(mixture(tmp_path / "mixture")), "expert_tile": 1}
    run_file, folder = write(settings, tmp_path / "run.yaml"), Path(settings["output_dir"])
    died = tmp_path / "died"
    code, errors = Ranks(run_file, 2, DIE=f"1:{place}", ONCE=str(died)).end(120)[0]
    assert time.time() - died.stat().st_mtime < SECONDS
    assert code == 75
    assert "rank 1 has died" in errors
    assert (folder / "checkpoint-2").is_dir()
    assert not (folder / "checkpoint-5").is_dir()
    found = Ranks(run_file, 2).end(120)
    assert [code for code, _ in found] == [0, 0], found
    whole = write(settings | {"output_dir": str(tmp_path / "whole")}, tmp_path / "whole.yaml")
    assert [code for code, _ in Ranks(whole, 2).end(120)] == [0, 0]
    assert resuming.untimed(folder / "metrics.jsonl") == resuming.untimed(tmp_path / "whole" / "metrics.jsonl")
    models = [path / "model" / "model.safetensors" for path in (folder, tmp_path / "whole")]
    assert models[0].read_bytes() == models[1].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("machines", [1, 2])
def test_torchrun_restarts_a_killed_rank(settings: dict[str, Any], tmp_path: Path, machines: int) -> None:
    """Of two agents one counts a restart, and the other one follows it."""
    run_file, folder = write(settings | {"dp_shard_size": 2}, tmp_path / "run.yaml"), Path(settings["output_dir"])
    (tmp_path / "program.py").write_text(SETUP + MAIN)
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nnodes={machines}", f"--nproc-per-node={2 // machines}",
        "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}", "--max-restarts=1", str(tmp_path / "program.py"), "train", str(run_file),
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DIE": "1:backward", "ONCE": str(tmp_path / "died")}
    agents = [
        subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(machines)
    ]
    done = outputs_of(agents, 200)
    assert [agent.returncode for agent in agents] == [0] * machines, done[0][1][-3000:]
    assert (tmp_path / "died").exists()
    assert sum("resume: from" in output for output, _ in done) == 1
    alone = settings | {"output_dir": str(tmp_path / "one"), "per_device_train_batch_size": 4}
    horizon_lm.train(alone, print_fn=lambda line: None)
    assert_same(folder, tmp_path / "one")


@pytest.mark.slow
def test_a_hanging_rank_ends_the_others(settings: dict[str, Any], tmp_path: Path) -> None:
    ranks = Ranks(write(settings | {"rank_timeout": 3.0}, tmp_path / "run.yaml"), 2, HANG="1")
    ranks.wait_for_step(Path(settings["output_dir"]), 3)
    code, errors = ranks.end(SECONDS)[0]
    assert code == 75
    assert "rank 1 hangs" in errors


@pytest.mark.slow
def test_a_stopped_rank_ends_the_others(settings: dict[str, Any], tmp_path: Path) -> None:
    ranks = Ranks(write(settings, tmp_path / "run.yaml"), 2)
    ranks.wait_for_step(Path(settings["output_dir"]), 3)
    ranks.processes[1].send(signal.SIGSTOP)
    stopped = ranks.processes.pop()
    try:
        ((code, errors),) = ranks.end(SECONDS)
    finally:
        stopped.close()
    assert code == 75
    assert "rank 1 has died" in errors


@pytest.mark.slow
def test_a_failing_rank_is_named(settings: dict[str, Any], tmp_path: Path) -> None:
    """Only the first rank sees the folder of a finished run. The second one reports it if it is the first of another machine."""
    run_file = write(settings | {"max_steps": 1}, tmp_path / "run.yaml")
    assert [code for code, _ in Ranks(run_file, 2).end(120)] == [0, 0]
    (first, why), (second, message) = Ranks(run_file, 2, LOCAL_RANK="0", LOCAL_WORLD_SIZE="1").end(60)
    assert first == 2
    assert "holds a finished run" in why
    assert second != 0
    assert "rank 0 has failed" in message
    assert "holds a finished run" in message
