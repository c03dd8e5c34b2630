"""Measure the ceilings of a machine: matrix products, copies between host and device, alone and under load, host memory.

    python3 benchmarks/gpu_ceilings.py [cuda] [--output FILE.json] [--profile FILE.json]

prints the rates, the last line but predictions as JSON. gpu.py runs it in a process of its own, so that the page-locked memory is
freed, or reads ``--output``. Large products are timed for seconds (`gpu_products.py`). With ``--profile`` it also measures and writes the machine's profile, as `horizon-lm doctor` does, and prints what the plan predicts with it for
the models of gpu.py. Neither needs more packages than the engine.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_plan import predictions
from gpu_products import SECONDS, data_sheet, describe, measure_products

from horizon_lm.device.page_locks import PageLocks
from horizon_lm.engine.opening.options import open_device
from horizon_lm.memory.arena import Arena
from horizon_lm.tools.doctor.profile import measure_machine
from horizon_lm.tools.doctor.timing import Rounds

_ROUNDS = 5
_EXPERTS_PER_TOKEN = 8


def measure_ceilings(device: torch.device, small: bool = False) -> dict[str, float]:
    """Measure the rates of the current device, each the median of several rounds. ``small`` uses sizes for a CPU.

    Returns:
        ``copy_in``, ``copy_out``: bytes per second of memory that CUDA
        allocated page-locked; ``copy_both``: of both directions together. With ``_registered``: of memory that was written
        and then registered with CUDA, as weights are, if that is possible. With ``_under_load``: while products run.
        ``matmul_under_load``: operations per second of a bf16 product while copies run both ways. ``host``: bytes per second that an in-place operation of all
        cores reads and writes. ``rows_put`` and ``rows_added`` as in `_rates_of_rows`.
    """
    size, num_bytes, products = (256, 2**20, 2) if small else (8192, 2**30, 20)
    a, b = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(a)
    incoming, outgoing = (_Copy(device, _allocate(device, num_bytes), inward) for inward in (True, False))

    def multiply() -> None:
        for _ in range(products):
            torch.mm(a, b, out=out)

    work = 2.0 * products * size**3
    rates: dict[str, float] = {}
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
        times = max(1, round(_seconds(device, multiply) / (num_bytes / rates["copy_both"])))
        multiplying, copying = _overlapped(device, multiply, [incoming, outgoing], times)
        rates["matmul_under_load"] = work / multiplying
        rates["copy_both_under_load"] = 2 * times * num_bytes / copying
    numbers = torch.zeros(num_bytes // 4)
    rates["host"] = 2 * num_bytes / _seconds(torch.device("cpu"), lambda: numbers.mul_(1.5))
    return rates | _rates_of_rows(device, 256 if small else 65536, 64 if small else 2048)


def _rates_of_rows(device: torch.device, tokens: int, width: int) -> dict[str, float]:
    """Return the bytes per second of adding the bf16 rows of experts to those of their tokens: reproducibly, as routed experts do with
    ``index_put_``, and by atomic operations.
    """
    total = torch.zeros((tokens, width), dtype=torch.bfloat16, device=device)
    positions = torch.randint(tokens, (tokens * _EXPERTS_PER_TOKEN,), device=device)
    rows = torch.ones((len(positions), width), dtype=torch.bfloat16, device=device)
    ways: dict[str, Callable[[], Any]] = {
        "rows_put": lambda: total.index_put_((positions,), rows, accumulate=True),
        "rows_added": lambda: total.index_add_(0, positions, rows),
    }
    return {name: rows.numel() * rows.element_size() / _seconds(device, way) for name, way in ways.items()}


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", default="cuda")
    parser.add_argument(
        "--output", type=Path, help="JSON file for the rates, which gpu.py reads instead of measuring them"
    )
    parser.add_argument("--profile", type=Path, help="JSON file for a profile of the machine")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    on_cpu = device.type == "cpu"
    products = {}
    for name, found in measure_products(device, 0.05 if on_cpu else SECONDS):
        products[name] = found
        print(describe(name, found, data_sheet(device)), flush=True)
    rates = {
        "matmul": max(found["rate"] for found in products.values()),
        "products": products,
        "data_sheet": data_sheet(device),
    }
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(rates))
    rates |= measure_ceilings(device, small=on_cpu)
    print(json.dumps(rates), flush=True)
    if arguments.output is not None:
        arguments.output.write_text(json.dumps(rates))
    if arguments.profile is not None:
        folder = arguments.profile.parent
        rounds = Rounds(0.01, 1, quick=True) if on_cpu else Rounds(0.4)
        hardware = measure_machine(
            lambda: open_device(arguments.device), folder, rounds, lambda line: print(line, flush=True)
        )
        hardware.save(arguments.profile)
        print("", *predictions(hardware, arguments.device), sep="\n")


if __name__ == "__main__":
    main()
