"""One case of gpu.py, in a process of its own: train a few steps and measure them."""

import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from gpu_cases import Case
from gpu_energy import open_meter
from gpu_kernels import profile_step
from gpu_memory import HostMemory
from gpu_plan import describe, plan_case
from gpu_products import Sensors
from gpu_systems import SYSTEMS, System

from horizon_lm.device.cuda import CudaDevice
from horizon_lm.model.block_template import StreamedBlock
from horizon_lm.planning.arithmetic.catalog import Hardware
from horizon_lm.schedule.trace import Trace, exposed_seconds

TRACED = 2


class Worker:
    """The steps of a case.

    Args:
        case: the case.
        hardware: rates of the machine, for the time of the plan; None if they are unknown.
        trace_file: file for the trace of our steps; None for no file.
    """

    def __init__(self, case: Case, hardware: Hardware | None, trace_file: str | None) -> None:
        self._case, self._hardware, self._trace_file = case, hardware, trace_file
        self._device = case.torch_device
        self._on_gpu = self._device.type == "cuda"
        self._generator = torch.Generator().manual_seed(0)
        self._losses: list[torch.Tensor] = []
        self._system: System = System(lambda ids: ids)

    def run(self) -> Iterator[dict[str, Any]]:
        """Yield the result, and again whenever more is known: times and memory first, then the rest, the longest last."""
        case, ours = self._case, self._case.is_ours
        free = torch.cuda.mem_get_info(self._device)[0] if self._on_gpu else None
        if self._on_gpu and case.device_bytes is not None:
            total = torch.cuda.get_device_properties(self._device).total_memory
            torch.cuda.set_per_process_memory_fraction(case.device_bytes / total, self._device)
        result: dict[str, Any] = {}
        with HostMemory() as memory:
            if ours:
                result["plan"] = describe(plan_case(case, self._hardware, free))
            self._system = SYSTEMS[case.system](case)
            result |= self._timed_steps(memory)
            result["memory"] = memory.breakdown()
            if ours:
                result |= self._of_engine()
            yield result
            if case.compares_tails:
                result["tails"] = self._compare_tails()
                yield result
            if ours:
                result["waited"] = self._trace()
                yield result
            result["profile"] = profile_step(self._whole_step, self._device)
            yield result
            self._system.finish()

    def _step(self) -> None:
        shape, vocabulary = (self._case.rows, self._case.length), self._case.model["vocab_size"]
        self._losses.append(self._system.step(torch.randint(0, vocabulary, shape, generator=self._generator)))

    def _whole_step(self) -> None:
        self._step()
        if self._case.is_ours:  # that of others ends their process group
            self._system.finish()

    def _seconds(self, count: int) -> list[float]:
        """Return the seconds of each of some steps."""
        found = []
        for _ in range(count):
            start = time.perf_counter()
            self._step()
            if self._on_gpu:
                torch.cuda.synchronize(self._device)
            found.append(time.perf_counter() - start)
        return found

    def _timed_steps(self, memory: HostMemory) -> dict[str, Any]:
        first = self._seconds(1)[0]
        if self._on_gpu:  # leave out memory of compilation and tuning
            torch.cuda.reset_peak_memory_stats(self._device)
        self._seconds(self._case.warmup - 1)
        meter, began = open_meter(self._device), time.perf_counter()
        with Sensors(self._device) as sensors:
            result: dict[str, Any] = {"seconds": self._seconds(self._case.steps), "first": first}
        energy = meter.read()
        result |= {"joules": (energy.host, energy.device), "joules_seconds": time.perf_counter() - began}
        result |= {"sensors": sensors.medians(), "host_peak": memory.peak}
        result["device_peak"] = torch.cuda.max_memory_allocated(self._device) if self._on_gpu else 0
        result["device_reserved"] = torch.cuda.max_memory_reserved(self._device) if self._on_gpu else 0
        result["losses"] = [loss.item() for loss in self._losses]
        return result

    def _of_engine(self) -> dict[str, Any]:
        """Return figures that only our engine has: its planned peak, its choices, and what it has allocated."""
        import horizon_lm

        streaming = self._system.model._horizon
        engine, plan = streaming.engine, streaming.planner.plan
        residency = engine.residency
        rows = engine.options.device_micro_batch_size or self._case.rows
        chosen = {
            "micro-batches": [min(rows, self._case.rows - start) for start in range(0, self._case.rows, rows)],
            "resident graphs": residency.graphs, "resident blocks": residency.weights, "activation checkpoints on the device": residency.boundaries,
            "tokens of logits at once": engine.options.head_chunk_tokens, "compiled": engine.options.compile,
        }  # fmt: skip
        return {
            "unregistered": engine.device.registration_error if isinstance(engine.device, CudaDevice) else None,
            "chosen": chosen,
            "planned": plan.peak if plan is not None else None,
            "counted": {name: num for name, num in horizon_lm.stats(self._system.model)["host_bytes_by_kind"].items() if num},
        }  # fmt: skip

    def _compare_tails(self) -> dict[str, list[float]]:
        """Return the seconds of steps whose recomputes leave out what nobody reads, and of those that compute it, in turns."""
        found: dict[str, list[float]] = {"left out": [], "computed": []}
        with whole_recompute():
            self._seconds(1)
        for turn in range(self._case.steps):
            for which in ("left out", "computed") if turn % 2 else ("computed", "left out"):
                if which == "computed":
                    with whole_recompute():
                        found[which] += self._seconds(1)
                else:
                    found[which] += self._seconds(1)
        return found

    def _trace(self) -> dict[str, float]:
        """Return the seconds of a step in which the device waited, by cause."""
        engine = self._system.model._horizon.engine
        self._system.finish()
        engine.device.trace = Trace()
        for _ in range(min(TRACED, self._case.steps)):
            self._step()
        self._system.finish()
        trace, engine.device.trace = engine.device.trace, None
        if self._trace_file:
            trace.write(Path(self._trace_file))
        return {cause: each / min(TRACED, self._case.steps) for cause, each in exposed_seconds(trace.spans).items()}


@contextmanager
def whole_recompute() -> Iterator[None]:
    """Context manager: let recomputes compute their outputs, which nobody reads."""
    forward = StreamedBlock.forward

    def whole(self: Any, *args: Any, unread: bool = False, **kwargs: Any) -> Any:
        return forward(self, *args, unread=False, **kwargs)

    StreamedBlock.forward = whole
    try:
        yield
    finally:
        StreamedBlock.forward = forward


def gain(tails: dict[str, list[float]]) -> str:
    """Return the medians of both kinds of steps, and by how much the shorter one is shorter, as text."""
    without, whole = (statistics.median(tails[which]) for which in ("left out", "computed"))
    return f"{without:.3f} s a step without what recomputes leave out, {whole:.3f} with it: {1 - without / whole:+.1%} ({len(tails['computed'])} of each, in turns)"
