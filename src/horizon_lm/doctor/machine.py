"""What a bug report should say about a machine: versions, limits, the processor and the GPU."""

import os
import platform
import re
import resource
import shutil
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import horizon_lm
from horizon_lm.device.base import Device
from horizon_lm.quantities import format_bytes
from horizon_lm.resources import memlock_limit, memory_limits, resident_bytes, usable_cores

Facts = dict[str, str]

_TRIAL_BYTES = 64 * 2**20
_LARGEST_TRIAL = 2**30
_SPARE_CORES = 0.2  # that other programs may have of those that this one uses


def describe_machine(device: Device, folder: Path) -> dict[str, Facts]:
    """Facts by section, as text for people. ``folder``: whose disk is looked at."""
    sections: dict[str, Facts] = {"versions": _versions(), "machine": _machine(folder), "limits": _limits()}
    if device.torch_device.type == "cuda":
        sections["gpu"] = _gpu(device.torch_device) | {"page-locking": _page_locking(device)}
    return sections


def processor() -> str:
    """The name of the processor."""
    name = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo"), re.MULTILINE)
    return name[1].strip() if name else platform.processor() or platform.machine()


def host_memory() -> int:
    """Bytes of memory that the machine has, whoever may use them."""
    import psutil

    return int(psutil.virtual_memory().total)


def available_memory() -> int:
    """Bytes that this process may still take."""
    import psutil

    rooms = [limit.room - resident_bytes() for limit in memory_limits()]
    return max(0, min([*rooms, int(psutil.virtual_memory().available)]))


class OtherPrograms:
    """How many cores other programs take from now on: a figure that is measured beside them is too low."""

    def __init__(self) -> None:
        self._began = self._times()

    def cores(self) -> float:
        """Cores that others had on average."""
        everybody, own, seconds = (after - before for after, before in zip(self._times(), self._began, strict=True))
        return max(0.0, everybody - own) / max(seconds, 1e-9)

    @staticmethod
    def were_missing(cores: float) -> bool:
        """Whether this program could not have all the cores that it may use beside others that had so many."""
        return cores + usable_cores() > (os.cpu_count() or 1) + _SPARE_CORES

    @staticmethod
    def _times() -> tuple[float, float, float]:
        """Seconds of all cores in which they were not idle, those of this process, and the clock."""
        import psutil

        times, own = psutil.cpu_times(), os.times()
        return times.user + times.nice + times.system, own.user + own.system, time.perf_counter()


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
    bound = min(memory_limits(), key=lambda limit: limit.room, default=None)
    return {
        "system": platform.platform(),
        "processor": processor(),
        "cores": f"{usable_cores()} usable of {os.cpu_count()}, {torch.get_num_threads()} threads in torch",
        "memory": f"{format_bytes(memory.total)}, {format_bytes(memory.available)} available",
        "bound by": f"{bound.name}: {format_bytes(bound.room)} in all" if bound else "nothing known",
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
    soft = resource.getrlimit(kind)[0]
    return "unlimited" if soft == resource.RLIM_INFINITY else format_bytes(soft)


def _gpu(device: torch.device) -> Facts:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "memory": format_bytes(properties.total_memory),
        "compute capability": f"{properties.major}.{properties.minor}",
        "link": _pci_link(str(properties.uuid)) or "not known",
    }


def _pci_link(uuid: str) -> str:
    """Speed and width of a GPU's PCIe link, now and at most, as the kernel has them; a GPU at rest turns it down."""
    for file in Path("/proc/driver/nvidia/gpus").glob("*/information"):
        if uuid and uuid in _read(file):
            folder = Path("/sys/bus/pci/devices") / file.parent.name
            speed, width, most_speed, most_width = (
                _read(folder / name).strip()
                for name in ("current_link_speed", "current_link_width", "max_link_speed", "max_link_width")
            )
            return f"{speed} x{width} now, {most_speed} x{most_width} at most"
    return ""


def _page_locking(device: Device) -> str:
    """Whether memory can be page-locked in place, tried beyond what RLIMIT_MEMLOCK says: drivers need not obey it."""
    from horizon_lm.device.cuda import CudaDevice

    assert isinstance(device, CudaDevice)
    limit = memlock_limit()
    num_bytes = _TRIAL_BYTES if limit is None else max(_TRIAL_BYTES, min(_LARGEST_TRIAL, limit + 2**20))
    tried = f"{format_bytes(num_bytes)} tried"
    error = device.try_registering(num_bytes)
    if error is not None:
        return (
            f"fails ({error}; {tried}), so every copy will be staged: slower, not wrong. Raise the limit: ulimit -l "
            "unlimited, memlock in limits.conf, or --ulimit memlock=-1 for a container"
        )
    if limit is None:
        return f"works ({tried}, no limit)"
    if num_bytes > limit:
        return f"works, whatever RLIMIT_MEMLOCK says ({tried})"
    return f"works ({tried}); beyond RLIMIT_MEMLOCK it was not tried"


def _chosen(text: str) -> str:
    """The choice in brackets, as the kernel writes it."""
    choice = re.search(r"\[(\w+)\]", text)
    return choice[1] if choice else "not known"


def _read(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
