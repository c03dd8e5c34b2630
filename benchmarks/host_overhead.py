"""Measure the caller's thread: microseconds per block, and per step outside its blocks.

Models have toy width and several depths: time that grows with depth belongs to the blocks, the rest to the step's edges.
A plain model with gradient checkpointing dispatches the same kernels, so the difference is the engine's own Python. All
models live in one process and take turns. On a CPU the clock is that of the calling thread, which a busy machine does not
advance. On a GPU it is the wall clock, and no measurement waits for the device.

    python benchmarks/host_overhead.py [--device cpu] [--blocks 2 28 80] [--rounds 30] [--output FILE.md]
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from peers_cpu import processor, versions

import horizon_lm

PHASES = ("forward", "backward", "optimizer.step", "zero_grad")
Times = dict[str, list[float]]  # microseconds by phase


def build(blocks: int) -> Any:
    """Return a llama of toy width."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=blocks, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=128,
        )
    )  # fmt: skip


def plain(blocks: int, device: str) -> tuple[Any, Any]:
    """Return a transformers model that recomputes its blocks, and torch's optimizer."""
    model = build(blocks).to(device).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def streamed(blocks: int, device: str) -> tuple[Any, Any]:
    """Return the same model streamed, with activation checkpoints in host memory, and our optimizer with clipping."""
    model = horizon_lm.stream(
        build(blocks).train(), device, precision="float32", activation_checkpoints="host", compile=False
    )
    return model, horizon_lm.AdamW(model, lr=1e-4, max_grad_norm=1.0)


class Subject:
    """A model with its optimizer, whose steps are timed."""

    def __init__(self, make: Callable[[int, str], tuple[Any, Any]], blocks: int, device: str) -> None:
        self._model, self._optimizer = make(blocks, device)
        self._on_gpu = device != "cpu"
        self._ids = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))
        if make is plain:
            self._ids = self._ids.to(device)
        self.times: Times = {phase: [] for phase in PHASES}

    def step(self) -> None:
        """Run a step, and record the time of each phase."""
        clock = time.perf_counter_ns if self._on_gpu else time.thread_time_ns
        gc.collect()
        gc.disable()
        marks = [clock()]
        loss = self._model(input_ids=self._ids, labels=self._ids, use_cache=False).loss
        marks.append(clock())
        loss.backward()
        marks.append(clock())
        self._optimizer.step()
        marks.append(clock())
        self._optimizer.zero_grad()
        marks.append(clock())
        gc.enable()
        if self._on_gpu:
            torch.cuda.synchronize()
        for phase, begin, end in zip(PHASES, marks, marks[1:], strict=False):
            self.times[phase].append((end - begin) / 1000)

    def median(self, phase: str) -> float:
        """Return the median of a phase, without the warm-up steps."""
        return statistics.median(self.times[phase][5:])


def measure(device: str, depths: Sequence[int], rounds: int) -> dict[str, dict[int, Subject]]:
    """Run the steps of all models in turns."""
    subjects = {
        name: {blocks: Subject(make, blocks, device) for blocks in depths}
        for name, make in (("plain", plain), ("streamed", streamed))
    }
    for _ in range(rounds + 5):
        for by_depth in subjects.values():
            for subject in by_depth.values():
                subject.step()
    return subjects


def table(subjects: dict[str, dict[int, Subject]], depths: Sequence[int]) -> list[str]:
    """Return the lines of a table: medians at all depths, time per block, and time per step outside the blocks."""
    shallow, *_, deep = depths
    lines = [
        f"| phase | model | {' | '.join(f'{d} blocks' for d in depths)} | per block | edges |",
        "|---" * (len(depths) + 4) + "|",
    ]
    for phase in PHASES:
        for name, by_depth in subjects.items():
            medians = {depth: subject.median(phase) for depth, subject in by_depth.items()}
            slope = (medians[deep] - medians[shallow]) / (deep - shallow)
            figures = [*medians.values(), slope, medians[shallow] - shallow * slope]
            lines.append(f"| {phase} | {name} | {' | '.join(f'{figure:,.0f}' for figure in figures)} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--blocks", type=int, nargs="+", default=(2, 28, 80))
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    depths = sorted(args.blocks)
    lines = table(measure(args.device, depths, args.rounds), depths)
    where = processor() if args.device == "cpu" else torch.cuda.get_device_name()
    text = "\n".join(
        [
            "# Python on the caller's thread", "",
            f"{date.today()}, {where}. {versions()}.",
            f"Microseconds of llamas of width 32, by depth; medians of {args.rounds} steps.", "",
            *lines, "",
        ]
    )  # fmt: skip
    print(text)
    if args.output:
        args.output.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
