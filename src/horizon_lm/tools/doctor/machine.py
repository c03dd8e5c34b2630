"""Describe a machine for a bug report: versions, limits, processor and GPU."""

import os
import platform
import re
import resource
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import horizon_lm
from horizon_lm.common.quantities import format_bytes
from horizon_lm.common.resources import memlock_limit, memory_limits, resident_bytes, usable_cores
from horizon_lm.device.base import Device

Facts = dict[str, str]

_TRIAL_BYTES = 64 * 2**20
_LARGEST_TRIAL = 2**30


def describe_machine(device: Device, folder: Path) -> dict[str, Facts]:
    """Return facts about the machine as text, by section. ``folder``: folder on the disk to describe."""
    sections: dict[str, Facts] = {"versions": _versions(), "machine": _machine(folder), "limits": _limits()}
    if device.torch_device.type == "cuda":
        sections["gpu"] = _gpu(device.torch_device) | {"page-locking": _page_locking(device)}
    return sections


def processor() -> str:
    """Return the name of the processor."""
    name = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return name[1].strip() if name else platform.processor() or platform.machine()


def host_memory() -> int:
    """Return the memory of the machine in bytes, before any limit."""
    import psutil

    return int(psutil.virtual_memory().total)


def available_memory() -> int:
    """Return the number of bytes that this process may still allocate."""
    import psutil

    rooms = [limit.room - resident_bytes() for limit in memory_limits()]
    return max(0, min([*rooms, int(psutil.virtual_memory().available)]))


def _versions() -> Facts:
    facts = {"horizon-lm": horizon_lm.__version__, "python": f"{platform.python_version()} ({platform.machine()})"}
    for name in ("torch", "transformers", "numba"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = "not installed"
    facts["torch's CUDA"] = torch.version.cuda or "none"
    driver = re.search(r"Kernel Module.*?\s(\d+\.\d+\S*)", _read("/proc/driver/nvidia/version"))
    facts["NVIDIA driver"] = driver[1] if driver else "none found"
    return facts


def _machine(folder: Path) -> Facts:
    import psutil

    memory = psutil.virtual_memory()
    tightest = min(memory_limits(), key=lambda limit: limit.room, default=None)
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": f"{usable_cores()} of {os.cpu_count()} usable, {torch.get_num_threads()} torch threads",
        "memory": f"{format_bytes(memory.total)}, {format_bytes(memory.available)} available",
        "limited by": f"{tightest.name}: {format_bytes(tightest.room)} in total" if tightest else "unknown",
        "huge pages": _chosen(_read("/sys/kernel/mm/transparent_hugepage/enabled")),
        "disk free": f"{format_bytes(shutil.disk_usage(folder).free)} in {folder.resolve()}",
    }


def _limits() -> Facts:
    locked = memlock_limit()
    return {
        "RLIMIT_MEMLOCK": "unlimited" if locked is None else format_bytes(locked),
        "RLIMIT_AS": _limit(resource.RLIMIT_AS),
        "RLIMIT_NOFILE": str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    }


def _limit(kind: int) -> str:
    """Return the soft limit on a resource as text."""
    soft, _ = resource.getrlimit(kind)
    return "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)


def _gpu(device: torch.device) -> Facts:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory": format_bytes(properties.total_memory),
        "compute capability": f"{properties.major}.{properties.minor}",
        "link": _pci_link(str(properties.uuid)) or "unknown",
        "packed rows": _segment_kernel((properties.major, properties.minor)),
    }


def _segment_kernel(capability: tuple[int, int]) -> str:
    """Return the kernel of packed and padded rows in bfloat16, with the most common width of heads."""
    from transformers import LlamaConfig

    from horizon_lm.model.attention_kernels import kernel_of_segments

    config = LlamaConfig(head_dim=128)
    return kernel_of_segments(config, "varlen", torch.bfloat16, compiled=True, capability=capability)


def _pci_link(uuid: str) -> str:
    """Return the current and maximum speed and width of a GPU's PCIe link; an idle GPU slows it down."""
    for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        if uuid and uuid in _read(file):
            folder = Path("/sys/bus/pci/devices") / file.parent.name
            speed, width, max_speed, max_width = (
                _read(folder / name).strip()
                for name in ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
            )
            return f"{speed} x{width} now, {max_speed} x{max_width} at most"
    return ""


def _page_locking(device: Device) -> str:
    """Return whether memory can be page-locked in place, even beyond RLIMIT_MEMLOCK, which some drivers ignore."""
    from horizon_lm.device.cuda import CudaDevice

    assert isinstance(device, CudaDevice)
    limit = memlock_limit()
    # More than the limit, to find out if the driver ignores it, unless that would take too much memory.
    num_bytes = _TRIAL_BYTES if limit is None else max(_TRIAL_BYTES, min(_LARGEST_TRIAL, limit + 2**20))
    tried = f"{format_bytes(num_bytes)} tried"
    error = device.try_registering(num_bytes)
    if error is not None:
        return (
            f"fails ({error}; {tried}), so every copy uses staging buffers, which is slower. Raise the limit: ulimit -l "
            "unlimited, memlock in limits.conf, or --ulimit memlock=-1 for a container"
        )
    if limit is None:
        return f"works ({tried}, no limit)"
    if num_bytes > limit:
        return f"works, beyond RLIMIT_MEMLOCK ({tried})"
    return f"works ({tried}); not tried beyond RLIMIT_MEMLOCK"


def _chosen(text: str) -> str:
    """Return the active choice, which the kernel marks with brackets."""
    choice = re.search(r"\[(\w+)\]", text)
    return choice[1] if choice else "unknown"


def _read(path: str | Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
