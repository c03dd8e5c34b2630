"""Time large matrix products for seconds, by events, with the clock and the power of the GPU beside them.

    python3 benchmarks/gpu_products.py [cuda] [--seconds 3]

prints a line of JSON for each product. A GPU that computes for long is at its power limit, where its clock falls: a product
that is timed for 30 ms is faster than any that training reaches. `gpu_ceilings.py` takes the faster of these products as the
basis of all shares.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

# Products (M, K) x (K, N): a square one, and the one of a feed-forward layer of Qwen2.5-7B with 65,536 tokens.
SHAPES = {"8192^3": (8192, 8192, 8192), "65,536 x 3,584 x 18,944": (65_536, 3_584, 18_944)}
TOYS = {"256^3": (256, 256, 256), "512 x 64 x 96": (512, 64, 96)}  # for a CPU
SECONDS = 3.0
_SENSORS = {
    "mhz": "clocks.sm",
    "watts": "power.draw",
    "celsius": "temperature.gpu",
}  # the names that nvidia-smi has for them
_WARM = 1 / 3  # of the seconds, in which the clock settles

# TFLOP/s of dense bf16 products in the data sheets, by part of the GPU's name; the first that matches.
_DATA_SHEETS = {
    "H100 PCIe": 756,
    "H100 NVL": 835,
    "H100": 989,
    "H200": 989,
    "GH200": 989,
    "B200": 2250,
    "A100": 312,
    "4090": 165,
}


def data_sheet(device: torch.device) -> float | None:
    """Return the operations per second of a GPU's data sheet, for dense bf16 products; None if it is not known here."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((1e12 * rate for part, rate in _DATA_SHEETS.items() if part in name), None)


def measure_products(device: torch.device, seconds: float = SECONDS) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name of each product, and what was measured during it.

    Yields:
        ``rate``: operations per second after the first third of the time. ``first``: the same of the first twentieth of a
        second. ``mhz``, ``watts``, ``celsius``: medians of the samples after the first third; missing where nothing reads them.
    """
    for name, shape in (SHAPES if device.type == "cuda" else TOYS).items():
        with Sensors(device) as sensors:
            marks = _multiply(device, shape, seconds)
        work = 2.0 * shape[0] * shape[1] * shape[2]
        end, warm = marks[-1][0], [mark for mark in marks if mark[0] >= _WARM * marks[-1][0]]
        settled = (
            (marks[-1][1] - warm[0][1]) * work / (end - warm[0][0]) if len(warm) > 1 else marks[-1][1] * work / end
        )
        yield (
            name,
            {"rate": settled, "first": marks[0][1] * work / marks[0][0], "seconds": end} | sensors.medians(_WARM),
        )


def _multiply(device: torch.device, shape: tuple[int, int, int], seconds: float) -> list[tuple[float, int]]:
    """Multiply for some seconds, and return how many products were done after how many seconds, from time to time."""
    (m, k, n), dtype = shape, torch.bfloat16
    a, b = torch.randn(m, k, device=device).to(dtype), torch.randn(k, n, device=device).to(dtype)
    out = torch.empty(m, n, dtype=dtype, device=device)
    torch.mm(a, b, out=out)
    clock = _Clock(device)
    began = time.perf_counter()
    torch.mm(a, b, out=out)
    clock.mark()
    clock.seconds()  # the library has chosen a kernel
    at_once = max(1, round(0.05 / max(1e-6, time.perf_counter() - began)))
    clock, done, marks = _Clock(device), 0, []
    while not marks or marks[-1][0] < seconds:
        for _ in range(at_once):
            torch.mm(a, b, out=out)
        done += at_once
        clock.mark()
        if len(clock.pending) > 2:  # so many that the device never waits for the host
            marks.append((clock.seconds(), done - 2 * at_once))
    while clock.pending:
        marks.append((clock.seconds(), done - len(clock.pending) * at_once))
    return marks


class _Clock:
    """Seconds since it was made, by events of the device, or by the host's clock on a CPU.

    Attributes:
        pending: marks whose time was not read.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._start, self.pending = self._now(), []

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def mark(self) -> None:
        self.pending.append(self._now())

    def seconds(self) -> float:
        """Return the time of the oldest pending mark, once the device has reached it."""
        mark = self.pending.pop(0)
        if not self._on_gpu:
            return mark - self._start
        mark.synchronize()
        return 1e-3 * self._start.elapsed_time(mark)


class Sensors:
    """A context manager that reads clock, power and temperature of a GPU about five times a second: through NVML if pynvml is there, or with
    nvidia-smi. On a CPU, or without both, it reads nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self._read = _reader(str(torch.cuda.get_device_properties(device).uuid)) if device.type == "cuda" else None
        self._over, self._rows = threading.Event(), []
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "Sensors":
        if self._read is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        if self._read is not None:
            self._thread.join(10)

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            try:
                self._rows.append(self._read())
            except Exception:  # a sensor that fails shall end no benchmark
                return

    def medians(self, skipped: float = 0.0) -> dict[str, float]:
        """Return the median of each sensor without the first part of the samples; empty if nothing was read."""
        return medians_of("\n".join(self._rows), list(_SENSORS), skipped)


def _reader(uuid: str) -> Callable[[], str] | None:
    """Return a function that reads the sensors of a GPU, separated by commas; None if nothing can."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    except Exception:  # pynvml is missing, or does not find the driver or the GPU
        command = ["nvidia-smi", "-i", f"GPU-{uuid}", f"--query-gpu={','.join(_SENSORS.values())}"]
        return partial(_ask, [*command, "--format=csv,noheader,nounits"]) if shutil.which("nvidia-smi") else None

    def read() -> str:
        clock = pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
        watts = 1e-3 * pynvml.nvmlDeviceGetPowerUsage(handle)
        return f"{clock}, {watts}, {pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU)}"

    return read


def _ask(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()


def medians_of(output: str, names: list[str], skipped: float) -> dict[str, float]:
    """Return the medians of the columns of a table without headings, as nvidia-smi prints it, without the first part of its rows."""
    rows = [line.split(",") for line in output.splitlines() if line.count(",") == len(names) - 1]
    rows = rows[int(skipped * len(rows)) :]
    found = {}
    for column, name in enumerate(names):
        numbers = [number for row in rows if (number := _number(row[column])) is not None]
        if numbers:
            found[name] = statistics.median(numbers)
    return found


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]", of a sensor that a virtual machine does not have
        return None


def describe(name: str, found: dict[str, Any], sheet: float | None) -> str:
    """Return what was measured of a product as text."""
    share = f", {found['rate'] / sheet:.0%} of the data sheet's {sheet / 1e12:.0f}" if sheet else ""
    sensors = {"mhz": "MHz", "watts": "W", "celsius": "°C"}
    beside = "".join(f", {found[key]:.0f} {unit}" for key, unit in sensors.items() if key in found)
    return f"{name}: {found['rate'] / 1e12:.3g} TFLOP/s over {found['seconds']:.1f} s (at first {found['first'] / 1e12:.3g}){share}{beside}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", default="cuda")
    parser.add_argument("--seconds", type=float, default=SECONDS)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    for name, found in measure_products(device, arguments.seconds):
        print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main()
