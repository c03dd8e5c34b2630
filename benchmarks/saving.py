"""Measure checkpoints of a model of SmolLM2-135M's shape: written at once, and while training goes on.

    python benchmarks/saving.py --folder FOLDER [--rounds 7] [--rows 4] [--output FILE.md]

Checkpoints are written into FOLDER, on the disk to measure. Within a round, `dd` with fsync, a checkpoint that is waited for,
a step alone, and steps during a checkpoint take turns. The 70B row is simulated with the rates of a published machine and a
disk of 1, 3 and 6 GB/s.
"""

import argparse
import os
import shutil
import statistics
import subprocess
import time
from collections import defaultdict
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from optimizer import model_config
from peers_cpu import processor, versions

import horizon_lm
from horizon_lm.common.resources import resident_bytes
from horizon_lm.device.cpu import CpuDevice
from horizon_lm.planning.arithmetic.catalog import find_profile
from horizon_lm.planning.arithmetic.request import Saves
from horizon_lm.runs.admission.inputs import open_source
from horizon_lm.runs.admission.run_plan import plan_run
from horizon_lm.runs.admission.this_machine import other_machine
from horizon_lm.runs.config import plan_config
from horizon_lm.schedule.ops import UPDATES, Kind
from horizon_lm.schedule.trace import Trace

LENGTH, LAYERS = 256, 30
MODES: dict[str, dict[str, Any]] = {
    "fp32_master, clipping": {"max_grad_norm": 1.0},
    "fp32_master, update_in_backward": {"update_in_backward": True},
}


@dataclass
class Saved:
    """A checkpoint during which steps have run.

    Attributes:
        call: seconds in the call, in which the training stands.
        steps: seconds of each step that began before the checkpoint was on disk.
        seconds: seconds until it was on disk.
        waited: units whose update waited for their file.
        extra_bytes: growth of the process.
    """

    call: float
    steps: list[float]
    seconds: float
    waited: int
    extra_bytes: int


class Run:
    """A model in training."""

    def __init__(self, options: dict[str, Any], rows: int) -> None:
        self.device = CpuDevice()
        self.model = horizon_lm.from_config(model_config(LAYERS), device=self.device, precision="fp32_master").train()
        self.optimizer = horizon_lm.AdamW(self.model, lr=1e-5, **options)
        self.ids = torch.randint(0, 40_000, (rows, LENGTH), generator=torch.Generator().manual_seed(0))

    def step(self) -> float:
        """Run a step, and return its seconds; its updates may still run under the next one, as in training."""
        began = time.perf_counter()
        self.model(input_ids=self.ids, labels=self.ids).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - began

    def save(self, folder: Path, wait: bool) -> Any:
        """Write a checkpoint into a new folder."""
        return horizon_lm.save_checkpoint(folder / "checkpoint", self.model, self.optimizer, wait=wait)

    def save_during_steps(self, folder: Path) -> Saved:
        """Write a checkpoint while steps run."""
        trace = self.device.trace = Trace()
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        before, began = resident_bytes(), time.perf_counter()
        saving = self.save(folder, wait=False)
        call, steps, peak = time.perf_counter() - began, [], before
        while not saving.done:
            steps.append(self.step())
            peak = max(peak, resident_bytes())
        saving.wait()
        horizon_lm.synchronize(self.model)
        self.device.trace = None
        return Saved(call, steps, saving.seconds, waited(trace), peak - before)


def waited(trace: Trace) -> int:
    """Return the number of units whose update was reached before their file was written."""
    written = {span.op.unit: span.end for span in trace.spans if span.op.kind == Kind.SAVE}
    return len(
        {s.op.unit for s in trace.spans if s.op.kind in UPDATES and s.reached < written.get(s.op.unit, 0) <= s.start}
    )


def dd(folder: Path, num_bytes: int) -> float:
    """Return the seconds in which dd writes zeros and makes them durable."""
    target, block = folder / "dd", 8 << 20
    began = time.perf_counter()
    command = [
        "dd",
        "if=/dev/zero",
        f"of={target}",
        f"bs={block}",
        f"count={num_bytes // block}",
        "conv=fsync",
        "oflag=direct",
    ]
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - began
    target.unlink()
    return seconds * num_bytes / (num_bytes // block * block)


def measure(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a mode by round."""
    run, folder = Run(MODES[name], arguments.rows), arguments.folder
    found: dict[str, list[Any]] = defaultdict(list)
    for number in range(arguments.rounds + 1):  # the first touches memory and compiles
        alone = [run.step(), run.step()][1:]
        horizon_lm.synchronize(run.model)
        shutil.rmtree(folder / "checkpoint", ignore_errors=True)
        began = time.perf_counter()
        saving = run.save(folder, wait=True)
        whole = time.perf_counter() - began
        run.step()
        during = run.save_during_steps(folder)
        run.step()
        plain = dd(folder, saving.num_bytes)
        line = f"round {number}: step {alone[0]:.2f} s, whole save {whole:.2f} s, dd {plain:.2f} s, {during}"
        print(line, flush=True)
        if number:
            for key, value in (("alone", alone[0]), ("whole", whole), ("dd", plain), ("during", during)):
                found[key].append(value)
    return {**found, "bytes": saving.num_bytes}


def row(name: str, found: dict[str, Any]) -> str:
    """Return a row of the table."""
    alone = statistics.median(found["alone"])
    during = [each for each in found["during"] if each.steps]
    step = statistics.median([statistics.mean(each.steps) for each in during])
    call = statistics.median([each.call for each in during])
    blocked = statistics.median([each.call + sum(each.steps) - alone * len(each.steps) for each in during])
    rates = [plain / whole for plain, whole in zip(found["dd"], found["whole"], strict=True)]
    units = sorted({each.waited for each in during})
    return (
        f"| {name} | {found['bytes'] / 1e9:.2f} GB | {statistics.median(found['whole']):.2f} | {statistics.median(found['dd']):.2f} "
        f"| {statistics.median(rates):.0%} | {alone:.2f} | {step:.2f} ({step / alone:.2f} times) | {call * 1e3:.0f} ms ({call / alone:.1%}) "
        f"| {blocked:+.2f} | {units[0]} to {units[-1]} of {LAYERS + 2} | {max(each.extra_bytes for each in during) / 2**20:.0f} MiB |"
    )


def simulated() -> list[str]:
    """Return rows of simulated saves of a 70B model."""
    lines = []
    for rate in (1e9, 3e9, 6e9):
        run = plan_config(
            model_name_or_path="meta-llama/Llama-3.1-70B", per_device_train_batch_size=64, max_length=4096
        )
        hardware = replace(find_profile("h200"), disk_write=rate)
        plan = plan_run(run, open_source(run), other_machine(hardware, 1500 * 10**9), saves=Saves(1, 2))
        save, seconds = plan.save, plan.time.seconds
        lines.append(
            f"| {rate / 1e9:.0f} GB/s | {save.num_bytes / 1e9:.0f} GB | {save.seconds:.0f} | {seconds:.1f} "
            f"| {save.stall_seconds:.1f} | {save.stall_seconds / seconds:.1%} |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="where checkpoints are written")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    lines = [
        "# Checkpoints, whole and during steps", "",
        f"{date.today().isoformat()}, {processor()}, {os.cpu_count()} cores, device cpu. {versions('torch', 'numba')}.",
        f"SmolLM2-135M's shape, random weights; {arguments.rows} x {LENGTH} tokens a step; medians of {arguments.rounds} rounds.", "",
        f"Command: `python benchmarks/saving.py --folder FOLDER --rounds {arguments.rounds} --rows {arguments.rows}`", "",
        "| mode | checkpoint | waited for, s | dd with fsync, s | dd / ours | step alone, s | step during a checkpoint, s | the call blocks "
        "| all that steps lose, s | units that waited | more memory |",
        "|" + "---|" * 11,
    ]  # fmt: skip
    for name in MODES:
        lines.append(row(name, measure(name, arguments)))
        print(lines[-1], flush=True)
    shutil.rmtree(arguments.folder / "checkpoint")
    lines += [
        "", "Llama-3.1-70B, fp32_master, 64 x 4096 tokens a step on one H200 with 1.5 TB, simulated:", "",
        "| disk | checkpoint | written in, s | step, s | steps lose, s | of a step |", "|" + "---|" * 6, *simulated(),
    ]  # fmt: skip
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
