"""Measure the ceilings of a machine: matrix products, copies between host and device, alone and under load, host memory.

    python3 benchmarks/gpu_ceilings.py [cuda] [--profile FILE.json]

prints the rates as JSON. gpu.py runs it in a process of its own, so that the page-locked memory is freed. With ``--profile``
it also measures and writes the machine's profile, as `horizon-lm doctor` does, and prints what the plan predicts with it for
the models of gpu.py. Neither needs more packages than the engine.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from gpu_models import MODELS, make_config, toy

from horizon_lm.cost.model_outline import outline_model
from horizon_lm.device.page_locks import PageLocks
from horizon_lm.doctor.profile import measure_machine
from horizon_lm.doctor.timing import Rounds
from horizon_lm.engine.opening.options import open_device
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.catalog import Hardware
from horizon_lm.planning.plan import make_plan
from horizon_lm.planning.request import Limit, Machine, Request
from horizon_lm.store.arena import Arena

_ROUNDS = 5
_PLANNED = ("qwen2.5-3b", "qwen2.5-7b")
_GIB = 2**30


def measure_ceilings(device: torch.device, small: bool = False) -> dict[str, float]:
    """Measure the rates of the current device, each the median of several rounds. ``small`` uses sizes for a CPU.

    Returns:
        ``matmul``: operations per second of a bf16 product. ``copy_in``, ``copy_out``: bytes per second of memory that CUDA
        allocated page-locked; ``copy_both``: of both directions together. With ``_registered``: of memory that was written
        and then registered with CUDA, as weights are, if that is possible. With ``_under_load``: while products run.
        ``matmul_under_load``: while copies run both ways. ``host``: bytes per second that an in-place operation of all
        cores reads and writes.
    """
    size, num_bytes, products = (256, 2**20, 2) if small else (8192, 2**30, 20)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    incoming, outgoing = (_Copy(device, _allocate(device, num_bytes), inward) for inward in (True, False))

    def multiply() -> None:
        for _ in range(products):
            torch.mm(a, b, out=out)

    work = 2.0 * products * size**3
    rates = {"matmul": work / _seconds(device, multiply)}
    copies = {"copy_in": [incoming], "copy_out": [outgoing], "copy_both": [incoming, outgoing]}
    locks = PageLocks(device)
    registered = [_Copy(device, _register(locks, num_bytes), inward) for inward in (True, False)]
    if locks.error is None:
        names = ("copy_in_registered", "copy_out_registered", "copy_both_registered")
        copies |= dict(zip(names, (registered[:1], registered[1:], registered), strict=True))
    for name, which in copies.items():
        rates[name] = len(which) * num_bytes / _seconds(device, *which)
    locks.unlock_all()
    if device.type == "cuda":  # a CPU has no streams
        # Enough copies to take about as long as the products.
        times = max(1, round(work / rates["matmul"] / (num_bytes / rates["copy_both"])))
        multiplying, copying = _overlapped(device, multiply, [incoming, outgoing], times)
        rates["matmul_under_load"] = work / multiplying
        rates["copy_both_under_load"] = 2 * times * num_bytes / copying
    numbers = torch.zeros(num_bytes // 4)
    rates["host"] = 2 * num_bytes / _seconds(torch.device("cpu"), lambda: numbers.mul_(1.5))
    return rates


class _Copy:
    """A copy on a stream of its own between host memory and device memory."""

    def __init__(self, device: torch.device, host: torch.Tensor, inward: bool) -> None:
        on_device = torch.zeros(host.numel(), dtype=torch.uint8, device=device)
        self._pair = (on_device, host) if inward else (host, on_device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self) -> None:
        destination, source = self._pair
        with torch.cuda.stream(self.stream):
            destination.copy_(source, non_blocking=True)


def _allocate(device: torch.device, num_bytes: int) -> torch.Tensor:
    """Return host memory that CUDA allocated page-locked."""
    return torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")


def _register(locks: PageLocks, num_bytes: int) -> torch.Tensor:
    """Return host memory as the engine has it: mapped, written, and registered with CUDA if that succeeds."""
    host = Arena(num_bytes).take(num_bytes, torch.uint8).fill_(1)
    if locks.device.type == "cuda":
        locks.lock(host)
    return host


def _seconds(device: torch.device, *functions: Callable[[], Any]) -> float:
    """Return the median seconds of all functions, enqueued together."""

    def run() -> float:
        _synchronize(device)
        start = time.perf_counter()
        for function in functions:
            function()
        _synchronize(device)
        return time.perf_counter() - start

    run()
    return statistics.median(run() for _ in range(_ROUNDS))


def _overlapped(
    device: torch.device, compute: Callable[[], Any], copies: list[_Copy], times: int
) -> tuple[float, float]:
    """Return the seconds of a computation and of concurrent copies, by events on their own streams."""
    rounds = []
    for _ in range(_ROUNDS + 1):
        _synchronize(device)
        streams = [torch.cuda.current_stream(device), *(copy.stream for copy in copies)]
        first, last = ([torch.cuda.Event(enable_timing=True) for _ in streams] for _ in range(2))
        for event, stream in zip(first, streams, strict=True):
            event.record(stream)
        for _ in range(times):
            for copy in copies:
                copy()
        compute()
        for event, stream in zip(last, streams, strict=True):
            event.record(stream)
        _synchronize(device)
        seconds = [1e-3 * start.elapsed_time(end) for start, end in zip(first, last, strict=True)]
        rounds.append((seconds[0], max(seconds[1:])))
    return tuple(map(statistics.median, zip(*rounds[1:], strict=True)))  # type: ignore[return-value]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def predictions(hardware: Hardware) -> Iterator[str]:
    """Yield a line for each model of the main cases of gpu.py: what the plan predicts for 16 rows of 4,096 tokens."""
    rows, length = (16, 4096) if not hardware.on_host else (4, 32)
    limits = [Limit("the device", hardware.device_memory - _GIB)] if hardware.device_memory else []  # less the context
    machine = Machine(hardware.name, hardware.on_host, hardware, device_limits=limits)
    for name in _PLANNED:
        config = make_config(toy(MODELS[name]) if hardware.on_host else MODELS[name], length)
        dtype = torch.float32 if hardware.on_host else torch.bfloat16
        outline = outline_model(
            ModelSource(config, name), length=length, dtype=dtype, masked=False, on_accelerator=not hardware.on_host
        )
        for moments in ("float32", "bfloat16"):
            request = Request(per_device_train_batch_size=rows, moments=moments, compiled=not hardware.on_host)
            plan = make_plan(outline, request, machine)
            assert plan.time is not None
            yield (
                f"{name}, {rows} x {length}, moments in {moments}: planned {plan.time.seconds:.3f} s a step, {plan.time.exposed_update_seconds:.3f} of "
                f"them waiting for updates; limited by {plan.time.limited_by}; device {plan.device.bytes / _GIB:.1f} GiB, "
                f"host {plan.host.bytes / _GIB:.1f} GiB"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", default="cuda")
    parser.add_argument("--profile", type=Path, help="JSON file for a profile of the machine")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    on_cpu = device.type == "cpu"
    print(json.dumps(measure_ceilings(device, small=on_cpu)), flush=True)
    if arguments.profile is not None:
        folder = arguments.profile.parent
        rounds = Rounds(0.01, 1, quick=True) if on_cpu else Rounds(0.4)
        hardware = measure_machine(
            lambda: open_device(arguments.device), folder, rounds, lambda line: print(line, flush=True)
        )
        hardware.save(arguments.profile)
        print("", *predictions(hardware), sep="\n")


if __name__ == "__main__":
    main()
