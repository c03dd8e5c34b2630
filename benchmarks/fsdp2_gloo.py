"""Compare torch's FSDP2 with Horizon-LM on several processes of one CPU, connected by gloo: losses, seconds and memory.

    python benchmarks/fsdp2_gloo.py [--ranks 2] [--rounds 3] [--output FILE.md]

Both train one small random model in float32, from the same weights on the same rows, different ones on each rank. Plain Hugging
Face in one process, on the rows of all ranks, is the reference.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import transformers
from peers_cpu import processor, versions
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, Qwen3Config

import horizon_lm

LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 1e-3, 0.01, 1.0
VOCABULARY, IGNORE = 8192, -100
ROWS, LENGTH = 2, 128  # of each rank and step
SKIPPED, TIMED = 3, 8  # steps of a round
PLAIN, FSDP2, HORIZON, EXACT = "Hugging Face, one process", "FSDP2", "Horizon-LM", ", float64 norm"
FREED_AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}  # glibc keeps no freed memory

Batch = dict[str, Any]
Step = Callable[[Batch], tuple[float, float]]  # returns this rank's part of the loss, and the norm of all gradients


@dataclass
class Run:
    """The results of a training, of all ranks.

    Attributes:
        losses: mean over the targets of all ranks, by step.
        norms: of the gradients before clipping, by step.
        seconds: of each step but the last, on the slowest rank.
        busy: seconds of cores that a rank uses in each of these steps, on the busiest one.
        parameters: of the whole model.
        peak: most anonymous memory of a rank, in bytes above that after imports; 0 if it was not watched.
    """

    losses: list[float]
    norms: list[float]
    seconds: list[float]
    busy: list[float]
    parameters: int
    peak: int


def save_model(folder: str, tied: bool, hidden: int) -> str:
    """Write a model of random weights to a folder, and return the folder."""
    config = Qwen3Config(
        hidden_size=hidden, intermediate_size=3 * hidden, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=4,
        head_dim=hidden // 8, vocab_size=VOCABULARY, tie_word_embeddings=tied,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def batches(ranks: int, step: int) -> list[Batch]:
    """Return the batch of each rank. Some tokens are frequent, and the ranks have different numbers of targets."""
    made = []
    for rank in range(ranks):
        draw = torch.rand(ROWS, LENGTH, generator=torch.Generator().manual_seed(1000 * step + rank))
        ids = (VOCABULARY * draw**4).long()
        labels = ids.clone()
        labels[:, : LENGTH * (rank + 1) // (2 * ranks)] = IGNORE
        made.append({"input_ids": ids, "labels": labels})
    targets = sum(int((batch["labels"][:, 1:] != IGNORE).sum()) for batch in made)
    return [batch | {"num_items_in_batch": targets} for batch in made]


def hugging_face(folder: str, sharded: bool, exact: bool) -> tuple[Step, int]:
    """Create a model of Hugging Face with gradient checkpointing and fused AdamW. Return its step and number of parameters.

    ``exact``: it clips by a norm that is summed in float64, and not by clip_grad_norm_.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    if sharded:
        for module in (*model.model.layers, model):
            fully_shard(module)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # the default is the mean over the ranks
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale while it sums
    parameters: list[Any] = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, fused=True)

    def clip() -> float:
        if not exact:
            norm: Any = torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
            return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        grads = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters]
        square = torch.stack([grad.double().square().sum() for grad in grads]).sum()
        dist.all_reduce(square)
        torch.nn.utils.clip_grads_with_norm_(parameters, MAX_GRAD_NORM, square.sqrt().float())
        return float(square.sqrt())

    def step(batch: Batch) -> tuple[float, float]:
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        norm = clip()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), norm

    return step, sum(parameter.numel() for parameter in parameters)


def horizon(folder: str) -> tuple[Step, int]:
    """Create the model of Horizon-LM, with its default mesh. Return its step and number of parameters."""
    model = horizon_lm.from_pretrained(folder, device="cpu", precision="float32").train()
    optimizer = horizon_lm.AdamW(model, lr=LEARNING_RATE, weight_decay=WEIGHT_DECAY, max_grad_norm=MAX_GRAD_NORM)

    def step(batch: Batch) -> tuple[float, float]:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item(), float(optimizer.grad_norm or 0.0)

    return step, sum(parameter.numel() for parameter in model.parameters())


SYSTEMS: dict[str, Callable[[str], tuple[Step, int]]] = {
    PLAIN: lambda folder: hugging_face(folder, sharded=False, exact=False),
    FSDP2: lambda folder: hugging_face(folder, sharded=True, exact=False),
    PLAIN + EXACT: lambda folder: hugging_face(folder, sharded=False, exact=True),
    FSDP2 + EXACT: lambda folder: hugging_face(folder, sharded=True, exact=True),
    HORIZON: horizon,
}


class Memory(threading.Thread):
    """A thread that watches the anonymous memory of this process, in bytes above that at its start."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.first, self.peak = self._now(), 0

    def run(self) -> None:
        while True:
            self.peak = max(self.peak, self._now() - self.first)
            time.sleep(0.001)

    @staticmethod
    def _now() -> int:
        return 1024 * int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])


def work(name: str, folder: str, ranks: int, steps: int, watched: bool) -> None:
    """Train as one of the ranks, or on the rows of all in one process. The first prints what all have seen."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    _ = horizon_lm.AdamW, horizon_lm.from_pretrained  # which imports them
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    made = [batches(ranks, step) for step in range(steps)]
    if world == 1:
        made = [[each[0] | {k: torch.cat([b[k] for b in each]) for k in ("input_ids", "labels")}] for each in made]
    memory = Memory()
    if watched:
        memory.start()
    step, parameters = SYSTEMS[name](folder)
    seen, clocks = [], []
    for each in made:
        clocks.append((time.perf_counter(), time.process_time()))
        seen.append(step(each[rank]))
    passed = [(stop[0] - start[0], stop[1] - start[1]) for start, stop in pairwise(clocks)]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (seen, passed, memory.peak))
    dist.destroy_process_group()
    if rank == 0:
        seen_by, passed_by, peaks = zip(*everyone, strict=True)
        losses = [sum(part for part, _ in column) for column in zip(*seen_by, strict=True)]
        seconds, busy = (
            [max(each[kind] for each in column) for column in zip(*passed_by, strict=True)] for kind in (0, 1)
        )
        print(
            json.dumps(asdict(Run(losses, [norm for _, norm in seen], seconds, busy, parameters, max(peaks)))),
            flush=True,
        )


def train(name: str, folder: str, ranks: int, steps: int, watched: bool = False, **environment: str) -> Run:
    """Train with a system in processes of its own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = [*torchrun, str(1 if name.startswith(PLAIN) else ranks), __file__]
    worker = ["--worker", json.dumps([name, folder, ranks, steps, watched])]
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | environment
    result = subprocess.run([*command, *worker], capture_output=True, text=True, check=False, env=environment)
    if result.returncode:
        sys.exit(f"{name} failed:\n{result.stderr[-5000:]}")
    run = Run(**json.loads(next(line for line in result.stdout.splitlines() if line.startswith("{"))))
    print(f"{name}: {median(run.seconds):.2f} s/step, loss {run.losses[-1]:.6f}", file=sys.stderr, flush=True)
    return run


def difference(runs: dict[str, Run], name: str, to: str) -> str:
    """Return the line of the table for two systems."""
    pairs = list(zip(runs[name].losses, runs[to].losses, strict=True))
    norms = [abs(a - b) / b for a, b in zip(runs[name].norms, runs[to].norms, strict=True)]
    absolute, relative = max(abs(a - b) for a, b in pairs), max(abs(a - b) / b for a, b in pairs)
    return f"| {name} | {to} | {absolute:.1e} | {relative:.1e} | {norms[0]:.1e} | {max(norms):.1e} |"


def speed(name: str, rounds: dict[str, list[Run]]) -> str:
    """Return a system's line of the table."""
    timed = {system: [run.seconds[SKIPPED:] for run in each] for system, each in rounds.items()}
    every = [second for seconds in timed[name] for second in seconds]
    ratios = [median(own) / median(other) for own, other in zip(timed[name], timed[FSDP2], strict=True)]
    busy = [second for run in rounds[name] for second in run.busy[SKIPPED:]]
    texts = [f"{median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in (every, ratios, busy)]
    return f"| {name} | {' | '.join(texts)} |"


def report(runs: dict[str, Run], rounds: dict[str, list[Run]], memory: dict[str, list[Run]], args: argparse.Namespace) -> str:  # fmt: skip
    """Return the text of the result file.

    ``memory`` has the runs of each system as usual, with freed memory returned, and with a tiny model likewise.
    """
    pairs = [(FSDP2, PLAIN), (FSDP2 + EXACT, PLAIN + EXACT), *((HORIZON, name) for name in runs if name != HORIZON)]
    size, state = runs[HORIZON].parameters / 1e6, 16 * runs[HORIZON].parameters / 1e6 / args.ranks
    peaks = {name: [run.peak / 1e6 for run in each] for name, each in memory.items()}
    return "\n".join([
        "# FSDP2 and Horizon-LM on a CPU, over gloo", "",
        f"{date.today().isoformat()}, {processor()}, {os.cpu_count()} cores. {versions('torch', 'transformers', 'numba')}.",
        f"Qwen3 of {size:.1f}M random parameters{', tied' * args.tied}, float32; {args.ranks} processes with one torch thread each, {ROWS} x "
        f"{LENGTH} tokens of each process a step, blocks recomputed, AdamW, learning rate {LEARNING_RATE}, clipping at {MAX_GRAD_NORM}. "
        "FSDP2 shards each block and the root.", "",
        f"Command: `python benchmarks/fsdp2_gloo.py --ranks {args.ranks} --rounds {args.rounds} --steps {args.steps}{' --tied' * args.tied}`", "",
        "## Losses", "",
        "Means over the targets of all processes. `clip_grad_norm_` sums the squares of a tensor in float32, which loses digits on a CPU; with "
        f"\"{EXACT[2:]}\" torch's gradients are clipped by a norm that is summed in float64. Sums have other orders, so bits differ.", "",
        f"| step | {' | '.join(runs)} |", "|" + "---|" * (1 + len(runs)),
        *(f"| {step + 1} | {' | '.join(f'{run.losses[step]:.6f}' for run in runs.values())} |" for step in range(args.steps)),
        f"| gradient norm, step 1 | {' | '.join(f'{run.norms[0]:.6f}' for run in runs.values())} |", "",
        "| system | compared with | losses differ by at most | relative | gradient norm of step 1, relative | of all steps, at most |",
        "|" + "---|" * 6, *(difference(runs, name, to) for name, to in pairs), "",
        "## Seconds", "",
        f"Rounds of new processes, in which the systems take turns: {args.rounds}, with {TIMED} steps each after the first {SKIPPED}. A step ends "
        "when the next begins, on the slowest process. Core seconds are those of the busiest, without waits. Processes are not pinned to cores; "
        "Horizon-LM updates in threads of its own.", "",
        "| system | s/step, median (min to max) | times FSDP2's, median of rounds (min to max) | core seconds of a process, a step |",
        "|" + "---|" * 4,
        *(speed(name, rounds) for name in rounds), "",
        "## Memory", "",
        "Most anonymous memory of a process above that after imports and `init_process_group`, read each millisecond. glibc keeps freed memory; "
        f"with \"returned\" it does not ({', '.join(f'`{key}={value}`' for key, value in FREED_AT_ONCE.items())}). The tiny model has "
        f"{memory[HORIZON][2].parameters / 1e6:.1f}M parameters. Horizon-LM's device is the CPU, so its device buffers count.", "",
        "| system | weights, gradients, moments by arithmetic | peak | peak, returned | above the arithmetic | peak, returned, tiny model |",
        "|" + "---|" * 6,
        *(f"| {name} | {state:.0f} MB | {a:.0f} MB | {b:.0f} MB | {b - state:.0f} MB | {c:.0f} MB |" for name, (a, b, c) in peaks.items()), "",
    ])  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="of timed steps")
    parser.add_argument("--steps", type=int, default=20, help="whose losses are compared")
    parser.add_argument("--tied", action="store_true", help="tie the embedding to the head")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        work(*args.worker)
        return
    memory: dict[str, list[Run]] = {}
    rounds: dict[str, list[Run]] = {FSDP2: [], HORIZON: []}
    with tempfile.TemporaryDirectory() as folder:
        model, tiny = (save_model(f"{folder}/{hidden}", args.tied, hidden) for hidden in (512, 64))
        runs = {name: train(name, model, args.ranks, args.steps, watched=True) for name in SYSTEMS}
        for name in rounds:
            returned = [train(name, each, args.ranks, 4, watched=True, **FREED_AT_ONCE) for each in (model, tiny)]
            memory[name] = [runs[name], *returned]
        for _ in range(args.rounds):
            for name, timed in rounds.items():
                timed.append(train(name, model, args.ranks, SKIPPED + TIMED + 1))
    text = report(runs, rounds, memory, args)
    print(text)
    if args.output:
        args.output.write_text(text)


if __name__ == "__main__":
    main()
