"""Ports, environments and outputs of runs on several ranks, and their comparison with a run in one process."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

import horizon_lm
from horizon_lm.errors import InterruptedRunError


def environment_of(rank: int, world: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set for a process on a machine that has all of them."""
    ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    return ranks | {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("", 0))
        return int(free.getsockname()[1])


def outputs_of(processes: Sequence[subprocess.Popen[str]], seconds: float) -> list[tuple[str, str]]:
    """Wait for the end of all processes, and return what each has written to standard output and error. Kill what is left."""
    try:
        return [process.communicate(timeout=seconds) for process in processes]
    finally:
        for process in processes:
            process.kill()


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same(ranks: Path, one: Path, tolerance: float = 1e-5, micro_batches: bool = True) -> None:
    """Compare all losses, token counts and metrics, and the trained weights.

    ``micro_batches``: compare also metrics that are means over micro-batches, which are the same.
    """
    found, expected = lines_of(ranks), lines_of(one)
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for name in (
            "loss",
            "grad_norm",
            "eval_loss",
            "rewards/margins",
            "mean_token_accuracy",
            "entropy",
            "rows_seen",
            "tokens_trained",
            "tokens_total",
        ):
            if name in theirs and (micro_batches or name not in ("mean_token_accuracy", "entropy")):
                assert ours[name] == pytest.approx(theirs[name], rel=tolerance, abs=tolerance), (ours["step"], name)
    name = "adapter_model.safetensors" if (one / "model" / "adapter_config.json").is_file() else "model.safetensors"
    weights = [load_file(folder / "model" / name) for folder in (ranks, one)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[1].items():
        assert torch.allclose(weights[0][name], value, atol=3e-4), name


def run_as_rank(
    rank: int, world: int, settings: dict[str, Any], callbacks: Sequence[Any] = (), objective: Any = None
) -> str:
    """Train as one rank, and return the folder of the run."""
    os.environ |= {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
    }  # fmt: skip
    try:
        return str(horizon_lm.train(settings, objective=objective, callbacks=callbacks).output_dir)
    finally:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            del os.environ[name]


def interrupted(rank: int, world: int, settings: dict[str, Any], stop_after: int) -> str:
    """Train until a signal reaches one of the ranks during a step."""

    class Signal(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if rank == world - 1 and state.global_step == stop_after:
                os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(InterruptedRunError) as error:
        run_as_rank(rank, world, settings, [Signal()])
    return str(error.value)
