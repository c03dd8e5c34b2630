"""Trace all operations of real steps, and measure how much of the optimizer is overlapped.

    python benchmarks/trace_step.py --model FOLDER [--steps 6] [--output FILE.md] [--trace-dir DIR]

FOLDER is a Hugging Face folder (`make demo` leaves one in .cache/smollm2-135m-instruct). With --trace-dir every case writes
a file for chrome://tracing or Perfetto.
"""

import argparse
import os
from datetime import date
from pathlib import Path
from typing import Any

import torch
from peers_cpu import processor, versions

import horizon_lm
from horizon_lm.device.cpu import CpuDevice
from horizon_lm.schedule.ops import Kind
from horizon_lm.schedule.trace import Span, Trace, busy_seconds, select

ROWS, LENGTH = 4, 256
COMPUTE = (Kind.FORWARD, Kind.BACKWARD, Kind.STAGE)
CASES: dict[str, dict[str, Any]] = {
    "clipping: under the next forward": {"max_grad_norm": 1.0},
    "update_in_backward: under the backward": {"update_in_backward": True},
}


def run(folder: str, device: str, steps: int, options: dict[str, Any]) -> Trace:
    """Train a few steps and record the last ones."""
    opened = CpuDevice() if device == "cpu" else device
    model = horizon_lm.from_pretrained(folder, device=opened).train()
    optimizer = horizon_lm.AdamW(model, lr=1e-5, **options)
    ids = torch.randint(0, 40_000, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    trace = Trace()
    for step in range(steps):
        if step == 2:  # the first steps touch memory and compile
            horizon_lm.synchronize(model)
            model._horizon.engine.device.trace = trace
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    horizon_lm.synchronize(model)
    return trace


def _overlap_seconds(spans: list[Span], others: list[Span]) -> float:
    """Return the time in which at least one of ``spans`` and at least one of ``others`` were running."""
    return busy_seconds(spans) + busy_seconds(others) - busy_seconds([*spans, *others])


def describe(name: str, trace: Trace, steps: int) -> str:
    """Return a row of the table: seconds per step, of updates, and of the overlap with forward and backward."""
    spans = trace.spans
    updates, others = select(spans, Kind.UPDATE), [s for s in spans if s.op.kind != Kind.UPDATE]
    forward, backward = (_of_pass(others, *kinds) for kinds in ((Kind.FORWARD,), (Kind.BACKWARD, Kind.STREAM_OUT)))
    length = max(s.end for s in spans) - min(s.start for s in spans)
    busy = busy_seconds(updates)
    exposed = busy - _overlap_seconds(updates, others)
    return (
        f"| {name} | {length / steps:.2f} | {busy / steps:.3f} | {_overlap_seconds(updates, forward) / busy:.0%} "
        f"| {_overlap_seconds(updates, backward) / busy:.0%} | {exposed / steps:.3f} ({exposed / length:.1%}) |"
    )


def _of_pass(spans: list[Span], *kinds: Kind) -> list[Span]:
    """Return the spans of the passes with these kinds; a copy in belongs to the pass that computes next."""
    found, waiting = [], []
    for span in sorted(spans, key=lambda s: s.start):
        waiting.append(span)
        if span.op.kind in COMPUTE:
            found += waiting if span.op.kind in kinds else []
            waiting = []
        elif span.op.kind in kinds:
            found.append(waiting.pop())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=6, help="number of steps; the first two are not recorded")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--trace-dir", type=Path)
    arguments = parser.parse_args()
    recorded = arguments.steps - 2
    lines = [
        "# Overlap of updates in real steps",
        "",
        f"{date.today().isoformat()}, {processor()}, {os.cpu_count()} cores, device {arguments.device}. "
        f"{versions('torch', 'transformers', 'numba')}.",
        f"Model: {Path(arguments.model).name}, fp32_master; {ROWS} x {LENGTH} tokens a step, {recorded} steps recorded.",
        "The device is the same two cores, so this shows the order and no gain: while it computes, one thread updates. "
        "Exposed is the time in which updates run without a computation or a copy.",
        "",
        f"Command: `python benchmarks/trace_step.py --model {Path(arguments.model).name} --steps {arguments.steps}`",
        "",
        "| case | s/step | updates running, s/step | overlapped with a forward | with a backward | exposed, s/step |",
        "|---|---|---|---|---|---|",
    ]
    for name, options in CASES.items():
        trace = run(arguments.model, arguments.device, arguments.steps, options)
        lines.append(describe(name, trace, recorded))
        if arguments.trace_dir:
            arguments.trace_dir.mkdir(parents=True, exist_ok=True)
            trace.write(arguments.trace_dir / f"{name.partition(':')[0]}.json")
    text = "\n".join(lines) + "\n"
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
