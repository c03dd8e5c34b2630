"""Compare the step of a dense model in two source folders: losses and weights bit for bit, wall and CPU time in pairs.

Each folder has a process, and the two take turns step by step, so that a busy machine disturbs both alike.

    git worktree add ../before COMMIT
    python benchmarks/dense_step.py ../before/src src [--pairs 25] [--output FILE.md]

A step is a forward and backward pass and an update with clipping, in float32 with activation checkpoints in host memory.
"""

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from peers_cpu import processor, versions

COMPARED_STEPS = 5
CLOCKS = {"wall": time.perf_counter, "CPU": time.process_time, "calling thread": time.thread_time}


@dataclass(frozen=True)
class Case:
    """A llama, the device that it is streamed to, and its batch."""

    device: str
    hidden: int
    blocks: int
    vocabulary: int
    rows: int
    length: int


CASES = (
    Case("cpu", 768, 12, 16384, 2, 64),
    Case("simulated", 768, 12, 16384, 2, 64),
    Case("cpu", 64, 28, 256, 2, 16),
    Case("cpu", 576, 16, 8192, 4, 256),  # enough tokens for products to take most of the time
)


def serve(case: Case) -> None:
    """Run a step for each line of standard input, and print its loss, its seconds and, if the line says so, the hash of the weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import horizon_lm

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=case.hidden, intermediate_size=8 * case.hidden // 3, num_hidden_layers=case.blocks,
        num_attention_heads=case.hidden // 64, vocab_size=case.vocabulary,
    )  # fmt: skip
    model = horizon_lm.stream(
        LlamaForCausalLM(config).train(), case.device, precision="float32", activation_checkpoints="host", compile=False
    )
    optimizer = horizon_lm.AdamW(model, lr=1e-4, max_grad_norm=1.0)
    rows = torch.randint(case.vocabulary, (case.rows, case.length), generator=torch.Generator().manual_seed(1))
    print(
        json.dumps({"source": horizon_lm.__file__, "parameters": sum(p.numel() for p in model.parameters())}),
        flush=True,
    )
    for line in sys.stdin:
        began = [clock() for clock in CLOCKS.values()]
        loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        horizon_lm.synchronize(model)  # updates run on while the next forward pass begins
        seconds = [clock() - start for clock, start in zip(CLOCKS.values(), began, strict=True)]
        weights = hashlib.sha256()
        for param in model.parameters() if line.strip() == "hash" else ():
            weights.update(param.detach().numpy().tobytes())
        print(json.dumps({"loss": loss.item().hex(), "seconds": seconds, "weights": weights.hexdigest()}), flush=True)


class Subject:
    """A process that runs steps with the package of a source folder."""

    def __init__(self, source: Path, case: int) -> None:
        # A thread that spins after its work would take the time of the other process.
        environment = os.environ | {
            "PYTHONPATH": str(source.resolve()),
            "OMP_WAIT_POLICY": "PASSIVE",
            "KMP_BLOCKTIME": "0",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", str(case)], env=environment, stdin=-1, stdout=-1, text=True
        )
        self.about = self._read()
        assert Path(self.about["source"]).is_relative_to(source.resolve()), self.about

    def step(self, command: str = "") -> dict[str, Any]:
        """Run a step and return its loss, its seconds and the hash of the weights."""
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate()


def compare(case: int, folders: list[Path], pairs: int) -> str:
    """Return the row of the result for a case."""
    subjects = [Subject(folder, case) for folder in folders]
    for index in range(COMPARED_STEPS):  # which also warm up
        first, second = (each.step("hash" if index == COMPARED_STEPS - 1 else "") for each in subjects)
        assert (first["loss"], first["weights"]) == (second["loss"], second["weights"])
    times: list[list[list[float]]] = [[], []]
    for index in range(pairs):
        for which in (0, 1) if index % 2 else (1, 0):
            times[which].append(subjects[which].step()["seconds"])
    for each in subjects:
        each.close()
    ratios = [_ratio(*([step[clock] for step in side] for side in times)) for clock in range(len(CLOCKS))]
    seconds = [f"{statistics.median(step[0] for step in side):.3f}" for side in times]
    size, shape = subjects[0].about["parameters"], CASES[case]
    return f"| {size / 1e6:,.1f}M, {shape.blocks} blocks, {shape.device} | equal | {' | '.join([*seconds, *ratios])} |"


def _ratio(before: list[float], after: list[float]) -> str:
    """Return the ratio of the medians, and its 95% interval over resampled pairs."""
    draw, pairs = random.Random(0), list(zip(before, after, strict=True))
    resampled = sorted(_of_medians(draw.choices(pairs, k=len(pairs))) for _ in range(2000))
    return f"{_of_medians(pairs):.3f} ({resampled[50]:.3f} to {resampled[1949]:.3f})"


def _of_medians(pairs: list[tuple[float, float]]) -> float:
    before, after = (statistics.median(side) for side in zip(*pairs, strict=True))
    return after / before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="*", metavar="FOLDER", help="source folders: before, and after")
    parser.add_argument("--pairs", type=int, default=25)
    parser.add_argument("--cases", type=int, nargs="+", default=list(range(len(CASES))))
    parser.add_argument("--names", nargs=2, default=["before", "after"], help="names of the folders in the result")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve is not None:
        serve(CASES[args.serve])
        return
    if len(args.folders) != 2:
        parser.error("give two source folders")
    before, after = args.names
    lines = [
        "# The step of a dense model, before and after",
        "",
        f"{date.today().isoformat()}, {processor()}. {versions('torch', 'transformers')}. Before: {before}; after: {after}.",
        f"Losses of {COMPARED_STEPS} steps and all weights after them are compared bit for bit. Then {args.pairs} pairs of steps, in turns: medians in "
        "seconds, and ratios of medians (after / before) with their 95% interval over resampled pairs, of wall time and of the CPU time of the process and of "
        "the thread that calls.",
        "",
        f"| llama | losses and weights | s before | s after | {' | '.join(CLOCKS)} |",
        f"|---|---|---|---|{'---|' * len(CLOCKS)}",
        *(compare(case, args.folders, args.pairs) for case in args.cases),
    ]
    text = "\n".join(lines) + "\n"
    print(text)
    if args.output is not None:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
