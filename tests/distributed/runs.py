"""Ports, environments and outputs of runs on several ranks, and their comparison with a run in one process."""

import json
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file


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
