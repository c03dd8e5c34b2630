"""Measure a hardware profile of this machine, write it, and describe it as text."""

import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch

from horizon_lm.common.quantities import format_bytes
from horizon_lm.common.resources import usable_cores
from horizon_lm.device.base import Device
from horizon_lm.errors import ConfigError
from horizon_lm.planning.arithmetic.catalog import DTYPES, Hardware
from horizon_lm.tools.doctor.device_benchmarks import (
    attention_rate,
    elementwise_bandwidth,
    float8_rate,
    link_rates,
    matmul_rate,
    operation_seconds,
)
from horizon_lm.tools.doctor.host_benchmarks import disk_rates, host_bandwidth, update_time
from horizon_lm.tools.doctor.machine import available_memory, host_memory, processor
from horizon_lm.tools.doctor.timing import Rounds


def check_folder(folder: Path) -> None:
    """Raise ConfigError if the folder for the disk benchmark is not a folder."""
    if not folder.is_dir():
        raise ConfigError(f"--folder: {folder} is not a folder")


def check_writable(path: Path) -> None:
    """Raise ConfigError if a profile cannot be written to ``path``. Create its folder."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(0, "it is not writable")
        tempfile.TemporaryFile(dir=path.parent).close()
    except FileExistsError as error:
        raise _unwritable(path, NotADirectoryError(0, f"{error.filename} is not a folder")) from error
    except OSError as error:
        raise _unwritable(path, error) from error


def write_profile(hardware: Hardware, path: Path) -> None:
    """Write a profile; raise ConfigError if writing fails."""
    try:
        hardware.save(path)
    except OSError as error:
        raise _unwritable(path, error) from error


def _unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"--output: {path}: {error.strerror or error}; choose a writable file, or use --no-save")


_NAMES = {
    "matmul": "matrix products",
    "float8": "matrix products in FP8",
    "attention": "attention",
    "device_bandwidth": "elementwise operations",
    "op_seconds": "overhead per operation",
    "link_in": "link, host-to-device",
    "link_out": "link, device-to-host",
    "link_both": "link, both directions",
    "host_bandwidth": "host memory, threads:",
    "update_seconds": "AdamW update,",
    "unit_update_seconds": "AdamW update, of a unit beside,",
    "disk_write": "disk, write",
    "disk_read": "disk, read",
    "device_memory": "device memory",
    "host_memory": "host memory",
    "cores": "cores",
    "capability": "compute capability",
}


def describe_figure(field: str, value: Any) -> list[tuple[str, str]]:
    """Return the name and the text of each figure of a field."""
    if isinstance(value, Mapping):
        return [(f"{_NAMES[field]} {key}", _amount(field, each)) for key, each in value.items()]
    absent = "host memory" if field == "device_memory" else "unknown"
    return [(_NAMES[field], _amount(field, value) if value else absent)]


def table_of_machine(facts: Mapping[str, Mapping[str, str]], hardware: Hardware) -> Iterator[str]:
    """Yield the lines of a table of a machine: facts by section, and the figures of its profile."""
    figures = dict(line for field in _NAMES for line in describe_figure(field, getattr(hardware, field)))
    for title, texts in {**facts, hardware.name: figures}.items():
        width = max(map(len, texts), default=0)
        yield from (title, *(f"  {name:<{width}}  {text}" for name, text in texts.items()), "")


def _amount(field: str, value: float) -> str:
    """Return a figure of a profile as text with its unit."""
    if field in ("matmul", "float8", "attention"):
        return f"{value / 1e12:.1f} TFLOP/s" if value >= 1e13 else f"{value / 1e9:.0f} GFLOP/s"
    if field in ("device_memory", "host_memory"):
        return format_bytes(value)
    if field in ("op_seconds", "unit_update_seconds"):
        return f"{value * 1e6:.1f} us"
    if field == "update_seconds":
        return f"{value * 1e9:.2f} ns per parameter"
    if field in ("cores", "capability"):
        return str(value)
    return f"{value / 1e9:.1f} GB/s" if value >= 1e9 else f"{value / 1e6:.0f} MB/s"


PRECISIONS = ("fp32_master", "bf16", "float32")


def measure_machine(
    open_device: Callable[[], Device], folder: Path, rounds: Rounds, say: Callable[[str], None]
) -> Hardware:
    """Measure all figures of a profile.

    Args:
        open_device: function that opens the device. Each benchmark opens a new device, so that its memory is freed.
        folder: folder on the disk to measure.
        rounds: time budget of a benchmark.
        say: function that prints a line of progress.

    Raises:
        ConfigError: the folder is not writable.
    """
    where = open_device().torch_device
    measured = _Figures(say)
    _measure_disk(measured, folder, rounds)  # first, because it fails if the folder is not writable
    _measure_device(measured, open_device, where, rounds)
    _measure_host(measured, open_device, rounds)
    on_gpu = where.type == "cuda"
    name = torch.cuda.get_device_properties(where).name if on_gpu else processor()
    cores = int(measured.figures["cores"])
    return Hardware(
        name=f"{name}, {cores} {'core' if cores == 1 else 'cores'}",
        device=where.type,
        gpu=name if on_gpu else "",
        sources=measured.sources,
        **measured.figures,
    )


class _Figures:
    """The figures measured so far, with their sources."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self.figures: dict[str, Any] = {}
        self.sources: dict[str, str] = {}

    def add(self, field: str, value: Any, how: str) -> None:
        """Add a figure and print it; the value is 0 or an empty mapping, and not printed, if it could not be measured."""
        self.figures[field] = value
        if not value:
            return
        self.sources[field] = f"measured {date.today().isoformat()} by horizon-lm doctor, {how}"
        self._say("\n".join(f"{what}: {text}" for what, text in describe_figure(field, value)))


def _measure_disk(measured: _Figures, folder: Path, rounds: Rounds) -> None:
    write, read = disk_rates(folder, rounds)
    measured.add("disk_write", write, "a new file with fsync")
    measured.add("disk_read", read, "the same file after dropping its page cache")


def _measure_device(measured: _Figures, open_device: Callable[[], Device], where: torch.device, rounds: Rounds) -> None:
    """Measure the device and its link, and add the figures with their sources."""
    on_gpu = where.type == "cuda"
    measured.add(
        "device_memory", torch.cuda.get_device_properties(where).total_memory if on_gpu else 0, "reported by CUDA"
    )
    major, minor = torch.cuda.get_device_capability(where) if on_gpu else (0, 0)
    measured.add("capability", major + minor / 10, "reported by CUDA")
    products = {dtype: matmul_rate(where, getattr(torch, dtype), rounds) for dtype in DTYPES}
    measured.add("matmul", products, "a projection's forward and backward pass, mean over shapes")
    measured.add(
        "float8", float8_rate(where, rounds), "products in FP8 of a projection's output and of its input's gradient"
    )
    attention = {dtype: attention_rate(where, getattr(torch, dtype), rounds) for dtype in DTYPES}
    measured.add("attention", attention, "causal scaled_dot_product_attention, forward and backward pass")
    measured.add("device_bandwidth", elementwise_bandwidth(where, rounds), "eager mul, add and silu")
    measured.add("op_seconds", operation_seconds(where, rounds), "tiny products, forward and backward pass")
    link = link_rates(open_device(), rounds)
    source = "registered memory" if on_gpu else "bytes of bf16; {} inline"
    measured.add("link_in", link.copy_in, source.format("copies that widen"))
    measured.add("link_out", link.copy_out, source.format("landings that round and square"))
    measured.add("link_both", link.both, "both at once" if on_gpu else "one after the other")


def _measure_host(measured: _Figures, open_device: Callable[[], Device], rounds: Rounds) -> None:
    """Measure the memory and the updates of the host, and add the figures with their sources."""
    cores = usable_cores()
    measured.add("host_memory", host_memory(), "reported by the system, before any limit")
    measured.add("cores", cores, "affinity and quotas of this process")
    bandwidth = host_bandwidth(cores, available_memory(), rounds)
    measured.add("host_bandwidth", bandwidth, "an in-place pass of compiled threads, bytes read and written")
    times = {
        precision: update_time(precision, open_device(), cores, available_memory(), rounds)
        for precision in PRECISIONS
        if not rounds.quick  # compiling their kernels takes seconds
    }
    how = "horizon_lm.AdamW.step on random weights of two sizes, float32 moments"
    measured.add("update_seconds", {precision: time.parameter for precision, time in times.items()}, how)
    measured.add("unit_update_seconds", {precision: time.unit for precision, time in times.items()}, how)
