"""Compare measured steps of a real model with the plan's prediction, at rates that doctor measures in the same run.

    python benchmarks/predicted_step.py --model FOLDER [--steps 3] [--rounds 3] [--output FILE.md]

FOLDER is a Hugging Face folder (`make demo` leaves one in .cache/smollm2-135m-instruct). Batch shapes take turns.
Exposed is the time in which updates run without a computation or a copy, in the prediction as in a trace.
"""

import argparse
import os
import statistics
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
from peers_cpu import processor, versions

import horizon_lm
from horizon_lm.engine.opening.options import open_device
from horizon_lm.planning.arithmetic.catalog import Hardware
from horizon_lm.planning.arithmetic.plan import Plan
from horizon_lm.runs.admission.inputs import RowShape, open_source
from horizon_lm.runs.admission.run_plan import plan_run
from horizon_lm.runs.admission.this_machine import this_machine
from horizon_lm.runs.config import plan_config
from horizon_lm.schedule.ops import UPDATES
from horizon_lm.schedule.trace import Span, Trace, busy_seconds
from horizon_lm.tools.doctor.profile import measure_machine
from horizon_lm.tools.doctor.timing import Rounds

SHAPES = ((4, 256), (8, 128), (2, 512))


def exposed_updates(spans: Sequence[Span]) -> float:
    """Return the seconds in which only updates run."""
    others = [span for span in spans if span.op.kind not in UPDATES]
    return busy_seconds(spans) - busy_seconds(others)


class Run:
    """A model that trains on random tokens of any shape."""

    def __init__(self, folder: str) -> None:
        self._device = open_device("cpu")
        self._model = horizon_lm.from_pretrained(folder, device=self._device).train()
        self._optimizer = horizon_lm.AdamW(self._model, lr=1e-6, max_grad_norm=1.0)

    def steps(self, shape: tuple[int, int], count: int) -> tuple[float, float]:
        """Return the mean seconds of a step and of its exposed updates, after one step that is not counted."""
        ids = torch.randint(0, 40_000, shape, generator=torch.Generator().manual_seed(0))
        self._step(ids)
        horizon_lm.synchronize(self._model)
        trace = self._device.trace = Trace()
        for _ in range(count):
            self._step(ids)
        horizon_lm.synchronize(self._model)
        self._device.trace = None
        length = max(s.end for s in trace.spans) - min(s.start for s in trace.spans)
        return length / count, exposed_updates(trace.spans) / count

    def _step(self, ids: torch.Tensor) -> None:
        self._model(input_ids=ids, labels=ids).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def predict(folder: str, shape: tuple[int, int], hardware: Hardware) -> Plan:
    """Plan steps with rows of one length, all of whose tokens are trained on."""
    rows, length = shape
    run = plan_config(
        model_name_or_path=folder, device="cpu", per_device_train_batch_size=rows, max_length=length, max_grad_norm=1.0
    )
    return plan_run(run, open_source(run), this_machine(run, hardware), rows=RowShape(length, length, masked=False))


def measure(folder: str, arguments: argparse.Namespace) -> tuple[Hardware, dict[Any, list[tuple[float, float]]]]:
    """Return the rates of this machine, and the seconds of each shape's rounds."""
    hardware = measure_machine(lambda: open_device("cpu"), Path(), Rounds(), print)
    run = Run(folder)
    found: dict[Any, list[tuple[float, float]]] = {shape: [] for shape in SHAPES}
    for number in range(arguments.rounds + 1):  # the first touches memory and compiles
        for shape in SHAPES:
            measured = run.steps(shape, arguments.steps)
            print(f"round {number}: {shape[0]} x {shape[1]}: {measured[0]:.2f} s a step", flush=True)
            if number:
                found[shape].append(measured)
    return hardware, found


def report(folder: str, hardware: Hardware, found: dict[Any, list[tuple[float, float]]], command: str) -> str:
    """Return the text of the result file."""
    lines = [
        "# Steps predicted and measured",
        "",
        f"{date.today().isoformat()}, {processor()}, {os.cpu_count()} cores, device cpu. "
        f"{versions('torch', 'transformers', 'numba')}.",
        f"Model: {Path(folder).name}, fp32_master, clipping. Rates by horizon-lm doctor in the same run: "
        f"{hardware.matmul['float32'] / 1e9:.0f} GFLOP/s in fp32 products, {hardware.attention['float32'] / 1e9:.0f} in "
        f"attention, elementwise {hardware.device_bandwidth / 1e9:.0f} GB/s, host memory {hardware.host_rate / 1e9:.0f} GB/s, "
        f"updates {1e9 * hardware.update_seconds['fp32_master']:.2f} ns per parameter.",
        "Medians over rounds that take turns (min to max). Exposed: only updates run.",
        "",
        f"Command: `{command}`",
        "",
        "| rows x tokens | measured, s/step | predicted, s/step | predicted / measured | exposed updates, measured, s "
        "| exposed updates, predicted, s |",
        "|---|---|---|---|---|---|",
    ]
    for shape, rounds in found.items():
        seconds = [each[0] for each in rounds]
        exposed = statistics.median(each[1] for each in rounds)
        plan = predict(folder, shape, hardware)
        assert plan.time is not None
        middle = statistics.median(seconds)
        lines.append(
            f"| {shape[0]} x {shape[1]} | {middle:.2f} ({min(seconds):.2f} to {max(seconds):.2f}) "
            f"| {plan.time.seconds:.2f} | {plan.time.seconds / middle:.2f} | {exposed:.3f} "
            f"| {exposed_updates(plan.time.spans):.3f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--steps", type=int, default=3, help="steps per round, after one that is not counted")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    hardware, found = measure(arguments.model, arguments)
    command = (
        f"python benchmarks/predicted_step.py --model {Path(arguments.model).name} --steps {arguments.steps} "
        f"--rounds {arguments.rounds}"
    )
    text = report(arguments.model, hardware, found, command)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
