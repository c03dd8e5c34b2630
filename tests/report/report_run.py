"""A synthetic run folder with 30 blocks on four streams, 3 traced steps and 200 logged steps; and helpers for small
files.
"""

import json
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from horizon_lm.common.units import EMBED
from horizon_lm.runs.config import SftConfig
from horizon_lm.runs.config.text import to_yaml
from horizon_lm.schedule.ops import Kind, Stream

NUM_BLOCKS, NUM_STEPS, TRACED = 30, 200, 3
GIB = 2**30
BLOCK, BOUNDARY, OUTER = 234_881_024, 67_108_864, 1_090_519_040  # bytes


@dataclass
class Pipeline:
    """A machine on which every operation takes a fixed time plus noise."""

    noise: float
    draw: random.Random = field(default_factory=lambda: random.Random(7))
    free: dict[Stream, float] = field(default_factory=lambda: dict.fromkeys(Stream, 0.0))
    events: list[dict[str, Any]] = field(default_factory=list)
    device: float = 3.1 * GIB
    host: float = 61 * GIB

    def run(self, kind: Kind, unit: str, stream: Stream, ms: float, *after: float) -> float:
        """Run an operation after the given times; return the time of its end, in ms."""
        start = max(self.free[stream], *after, 0.0) + 0.02
        took = ms * (1 + self.noise * self.draw.random())
        self.free[stream] = start + took
        tid = list(Stream).index(stream)
        span = {"ph": "X", "name": f"{kind} {unit}", "cat": str(kind), "pid": 0, "tid": tid}
        self.events.append(span | {"ts": start * 1e3, "dur": took * 1e3})
        return start + took

    def count(self, moment: float, device: float = 0.0, host: float = 0.0) -> None:
        """Allocate or free bytes at a time in ms."""
        self.device, self.host = self.device + device, self.host + host
        for name, taken in (("device bytes", self.device), ("host bytes", self.host)):
            counter = {"ph": "C", "name": name, "pid": 0, "ts": moment * 1e3, "args": {"bytes": int(taken)}}
            self.events.append(counter)


def trace(noise: float) -> dict[str, Any]:
    """Return three steps as a Chrome trace; noise makes them longer and different."""
    line, updated, steps = Pipeline(noise), [0.0] * NUM_BLOCKS, []
    for stream in Stream:
        names = {"ph": "M", "name": "thread_name", "pid": 0, "tid": list(Stream).index(stream)}
        line.events.append(names | {"args": {"name": str(stream)}})
    for step in range(1, TRACED + 1):
        start = max(line.free[Stream.COMPUTE], line.free[Stream.COPY_OUT])
        computed = [start, _forward(line, start, updated)]
        updated = _backward(line, computed[-1])
        steps.append({"step": step, "start": start * 1e3, "end": max(line.free[s] for s in list(Stream)[:3]) * 1e3})
    return {"traceEvents": line.events, "otherData": {"steps": steps}}


def _forward(line: Pipeline, start: float, updated: list[float]) -> float:
    rows = line.run(Kind.UPDATE_ROWS, EMBED, Stream.COPY_IN, 0.8, start)
    done = line.run(Kind.FORWARD, EMBED, Stream.COMPUTE, 0.6, rows)
    before = done
    for block in range(NUM_BLOCKS):
        arrived = line.run(Kind.STREAM_IN, f"block{block}", Stream.COPY_IN, 4.4, before, updated[block])
        line.count(arrived, device=BLOCK)
        before, done = done, line.run(Kind.FORWARD, f"block{block}", Stream.COMPUTE, 6.1, arrived)
        line.count(done, device=BOUNDARY - BLOCK)
        gone = line.run(Kind.OFFLOAD, f"block{block}", Stream.COPY_OUT, 1.3, done)
        line.count(gone, device=-BOUNDARY, host=BOUNDARY)
    return line.run(Kind.FORWARD, "head", Stream.COMPUTE, 9.0, done)


def _backward(line: Pipeline, done: float) -> list[float]:
    done = before = line.run(Kind.BACKWARD, "head", Stream.COMPUTE, 17.0, done)
    updated = [0.0] * NUM_BLOCKS
    for block in reversed(range(NUM_BLOCKS)):
        arrived = line.run(Kind.STREAM_IN, f"block{block}", Stream.COPY_IN, 4.4, before)
        fetched = line.run(Kind.FETCH, f"block{block}", Stream.COPY_IN, 1.3, arrived)
        line.count(fetched, device=BLOCK + BOUNDARY, host=-BOUNDARY)
        before, done = done, line.run(Kind.BACKWARD, f"block{block}", Stream.COMPUTE, 18.0, fetched)
        staged = line.run(Kind.STAGE, f"block{block}", Stream.COMPUTE, 0.4, done)
        landed = line.run(Kind.STREAM_OUT, f"block{block}", Stream.COPY_OUT, 4.6, staged)
        line.count(landed, device=-BLOCK - BOUNDARY)
        updated[block] = line.run(Kind.UPDATE, f"block{block}", Stream.HOST, 14.0, landed)
    line.run(Kind.STREAM_OUT, EMBED, Stream.COPY_OUT, 11.0, done)
    return updated


def plan(name: str = "Meadow-8B-Instruct") -> dict[str, Any]:
    """Return a plan of the run, on a machine where it fits."""
    return {
        "version": 1,
        "model": {
            "name": name, "parameters": 8_030_261_248, "active_parameters": 8_030_261_248, "num_blocks": NUM_BLOCKS,
            "hidden": 4096, "vocabulary": 128_256,
        },
        "run": {
            "rows": 8, "length": 1024, "tokens": 8192, "num_steps": NUM_STEPS, "precision": "fp32_master",
            "device": "cuda",
            "settings": {"activation_checkpoints": "host", "resident_blocks": 2, "device_micro_batch_size": 4},
            "reasons": [
                "Boundaries wait on the host: on the device there would be room for 11 of 30.",
                "Two resident blocks fit into the 6.2 GiB that are left, and save 0.9 GiB of copies a step.",
            ],
        },
        "host": _place(
            [
                ("weights", 15 * GIB, "bf16"),
                ("master bits", 15 * GIB, "16 more bits, which make an exact fp32 master"),
                ("gradients", 15 * GIB, "bf16, kept until the update"),
                ("moments", 60 * GIB, "float32, two for each parameter"),
                ("boundaries", 30 * BOUNDARY, "inputs of blocks, between forward and backward"),
                ("staging buffers of copies, pinned", 4 * BLOCK, "two slots in, two slots out"),
                ("Python, torch and the CUDA driver", int(3.4 * GIB), "measured on a run of an empty model"),
            ],
            180 * GIB,
            [("free memory", 181 * GIB), ("limit of the control group", 180 * GIB)],
        ),
        "device": _place(
            [
                ("two slots of weights", 2 * BLOCK, "a block that computes, and the next one"),
                ("two slots of gradients", 2 * BLOCK, ""),
                ("head and embedding", OUTER, "bf16"),
                ("resident blocks", 2 * BLOCK, "the last two"),
                ("activations of a block", int(1.9 * GIB), "one micro-batch, recomputed in the backward"),
                ("logits of a chunk", 64 * 2**20, "float32"),
            ],
            139 * GIB,
            [("device", 139 * GIB)],
        ),
        "disk": _place([("trained model", 15 * GIB, "bf16, safetensors")], None, []),
        "hardware": {"name": "NVIDIA H200, 64 cores", "device": "cuda"},
        "step": {
            "seconds": 0.801, "tokens_per_second": 10_225.0, "model_tflops": 492.0, "limited_by": "compute",
            "exposed_seconds": {"copy_in": 0.004, "update": 0.031, "copy_out": 0.006, "host": 0.0},
            "busy": {"copy_in": 0.42, "compute": 0.95, "copy_out": 0.25, "host": 0.55},
            "hidden_from_tokens": {"copy_in": 5900, "update": 7300}, "run_seconds": 168.0,
        },
        "memory": None,
    }  # fmt: skip


def _place(items: list[tuple[str, int, str]], available: int | None, limits: list[tuple[str, int]]) -> dict[str, Any]:
    return {
        "items": [{"name": name, "bytes": size, "note": note} for name, size, note in items],
        "bytes": sum(size for _, size, _ in items),
        "available": available,
        "limits": [{"name": name, "bytes": size} for name, size in limits],
    }


def metrics() -> list[dict[str, Any]]:
    """Return 200 lines of steps and 3 evaluations. The second step was skipped."""
    draw, lines, seconds = random.Random(11), [evaluation(0, 2.9312)], 0.0
    for step in range(1, NUM_STEPS + 1):
        took = 4.1 if step == 1 else 0.845 * (1 + 0.05 * draw.random())
        seconds += took
        warm = min(1.0, step / 20) * max(0.0, 1 - max(0, step - 20) / (NUM_STEPS - 20))
        lines.append({
            "step": step, "epoch": round(step / 100, 4),
            "loss": None if step == 2 else 1.62 + 1.25 * 0.975**step + 0.09 * draw.gauss(0, 1),
            "grad_norm": 1.0 + draw.random(), "steps_skipped": int(step > 1), "learning_rate": 2e-5 * warm,
            "tokens_trained": step * 5300, "tokens_total": step * 7900,
            "trained_tokens_per_second": round(5300 / took, 3), "tokens_per_second": round(7900 / took, 3),
            "device_bytes_peak": int(3.9 * GIB) + 30_000_000 * min(step, 12), "eta_seconds": 0.0,
            "host_bytes": int(96 * GIB + 14 * GIB * (1 - 0.7**step)), "seconds": round(seconds, 3),
        })  # fmt: skip
        if step == 100:
            lines.append(evaluation(step, 1.8044))
    return [*lines, evaluation(NUM_STEPS, 1.7215)]


def evaluation(step: int, loss: float) -> dict[str, Any]:
    return {"step": step, "eval_loss": loss, "eval_tokens": 24_500}


def write_run(folder: Path, name: str = "Meadow-8B-Instruct") -> Path:
    """Write all files of a run except the model."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = folder / "rows.jsonl"
    rows.write_text("")
    config = SftConfig(
        model_name_or_path=name, datasets=str(rows), eval_datasets=str(rows), output_dir="runs/meadow", max_steps=200
    )
    (folder / "config.yaml").write_text(to_yaml(config))
    write_lines(folder / "metrics.jsonl", metrics())
    contents = {"plan.json": plan(name), "predicted_trace.json": trace(0.0), "trace.json": trace(0.22)}
    for file, content in contents.items():
        (folder / file).write_text(json.dumps(content))
    return folder


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


# Small files


def training(step: int, **changes: Any) -> dict[str, Any]:
    line = {
        "step": step, "epoch": 0.1, "loss": 4.0 - step, "grad_norm": 1.0, "steps_skipped": 0, "learning_rate": step / 4,
        "tokens_trained": 10, "tokens_total": 400 * step, "trained_tokens_per_second": 100.0 + step,
        "tokens_per_second": 200.0 + step, "device_bytes_peak": step * GIB, "host_bytes": 10 * step * GIB,
        "seconds": 2.0 * step, "eta_seconds": 1.0,
    }  # fmt: skip
    return line | changes


def metrics_file(folder: Path, *lines: dict[str, Any]) -> Path:
    write_lines(folder / "metrics.jsonl", list(lines))
    return folder / "metrics.jsonl"


def trace_file(folder: Path, *events: dict[str, Any], **other: Any) -> Path:
    """Write a trace with two rows; times are in ms."""
    rows = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": tid, "args": {"name": name}}
        for tid, name in ((7, "copy_in"), (1, "compute"))
    ]
    path = folder / "trace.json"
    path.write_text(json.dumps({"traceEvents": rows + list(events), "otherData": other}))
    return path


def span(kind: str, unit: str, tid: int, start: float, ms: float) -> dict[str, Any]:
    span = {"ph": "X", "name": f"{kind} {unit}", "cat": kind, "pid": 0, "tid": tid}
    return span | {"ts": start * 1e3, "dur": ms * 1e3}


def taken(name: str, moment: float, size: int) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": 0, "ts": moment * 1e3, "args": {"bytes": size}}


def step(number: int, start: float, end: float) -> dict[str, Any]:
    return {"step": number, "start": start * 1e3, "end": end * 1e3}
