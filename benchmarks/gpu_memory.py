"""Host memory of a benchmark: the peak of the whole machine, and where memory is, from /proc.

A run takes more than its plan counts: page tables, staging buffers and the CUDA context are nobody's tensors. Page-locked memory
is not always attributed to a process either, so both sides are printed: what the process has, and what the machine has lost.

    python3 benchmarks/gpu_memory.py [cuda] --gib 113

fills and page-locks so much memory, frees it again, and exits with 1 if the machine does not have it.
"""

import argparse
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

GIB = 2**30
# What /proc/self/status knows of a process, and what /proc/meminfo knows of the machine; both in KiB.
_OF_PROCESS = ("VmRSS", "RssAnon", "RssFile", "RssShmem", "VmLck", "VmPin", "VmPTE", "VmSwap")
_OF_MACHINE = (
    "MemTotal", "MemAvailable", "MemFree", "AnonPages", "Shmem", "Cached", "PageTables", "SecPageTables", "Mlocked", "Unevictable",
    "SUnreclaim", "KernelStack", "Percpu", "VmallocUsed", "HugePages_Total",
)  # fmt: skip


def of_process() -> dict[str, int]:
    """Return the bytes of this process by kind; empty where /proc is missing."""
    return _read(Path("/proc/self/status"), _OF_PROCESS)


def of_machine() -> dict[str, int]:
    """Return the bytes of the machine by kind, with ``Used``: all that is not available."""
    found = _read(Path("/proc/meminfo"), _OF_MACHINE)
    if "MemAvailable" in found:
        found["Used"] = found["MemTotal"] - found["MemAvailable"]
    return found


def _read(file: Path, names: tuple[str, ...]) -> dict[str, int]:
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return {}
    found = dict(line.split(":", 1) for line in lines if ":" in line)
    return {name: 1024 * int(found[name].split()[0]) for name in names if name in found and found[name].endswith("kB")}


def available_bytes() -> int:
    """Return the bytes of host memory that this process can get now, of the machine or of its control group."""
    from horizon_lm.common.resources import memory_limits

    return min(found.room for found in memory_limits())


class HostMemory:
    """A context manager that measures the peak of host memory beyond what was in use before.

    It counts the whole machine, because page-locked memory is not always attributed to its process.

    Attributes:
        before: the machine when it was entered.
        peak: the most bytes since then, beyond those in use before.
    """

    def __enter__(self) -> "HostMemory":
        self.before = of_machine()
        self._over, self.peak = threading.Event(), 0
        self._used_before = _used_bytes()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.2):
            self.peak = max(self.peak, _used_bytes() - self._used_before)

    def breakdown(self) -> dict[str, dict[str, int]]:
        """Return where memory is now: of this process, and of the machine before and now."""
        return {"process": of_process(), "before": self.before, "now": of_machine()}


def _used_bytes() -> int:
    import psutil

    memory = psutil.virtual_memory()
    return memory.total - memory.available  # both read now: the memory of a virtual machine may grow


def describe(found: dict[str, dict[str, int]], planned: dict[str, int], counted: dict[str, int]) -> list[str]:
    """Return lines that say where host memory is.

    Args:
        found: from `HostMemory.breakdown`.
        planned: bytes that the plan has counted, by kind.
        counted: bytes that the engine has allocated, by kind.
    """
    process, before, now = found["process"], found["before"], found["now"]
    change = {name: now[name] - before[name] for name in now if name in before and name != "MemTotal"}
    lines = []
    if planned:
        lines.append(f"  - planned {_total(planned)}: {_kinds(planned)}")
    if counted:
        lines.append(f"  - allocated by the engine {_total(counted)}: {_kinds(counted)}")
    lines.append(f"  - the process: {_kinds(process) or 'unknown'}")
    lines.append(f"  - the machine, in use before {_gib(before.get('Used', 0))}, and now: {_gib(now.get('Used', 0))}")
    lines.append(f"  - what has changed on the machine: {_kinds(change) or 'unknown'}")
    if "Used" in change and process:
        outside = change["Used"] - process.get("VmRSS", 0) - change.get("PageTables", 0)
        text = f"  - in use on the machine beyond the process's RSS and page tables: {_gib(outside)}"
        if counted:
            beyond = change["Used"] - sum(counted.values())
            text += f"; beyond what the engine has allocated: {_gib(beyond)}"
        lines.append(text + " (drivers, page-locked memory that is nobody's, other processes)")
    return lines


def _total(kinds: dict[str, int]) -> str:
    return _gib(sum(kinds.values()))


def _kinds(kinds: dict[str, int]) -> str:
    return ", ".join(f"{name} {_gib(num)}" for name, num in kinds.items() if abs(num) >= 2**20)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB" if abs(num_bytes) >= 2**27 else f"{num_bytes / 2**20:.0f} MiB"


def fill_and_lock(num_bytes: int, on_gpu: bool, spare: int = 2 * GIB) -> tuple[int, str]:
    """Fill and page-lock host memory, as a model does, and free it again.

    Args:
        num_bytes: how much.
        on_gpu: lock with CUDA; without a GPU, memory is filled alone.
        spare: stop when less than this is available, before the machine kills somebody.

    Returns:
        The bytes that were filled and locked, and why it ended there; empty if all of them were.
    """
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from horizon_lm.device.page_locks import PageLocks
    from horizon_lm.memory.arena import Arena

    locks = PageLocks(torch.device("cuda", 0)) if on_gpu else None
    pieces: list[torch.Tensor] = []
    try:
        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            while (done := sum(each.numel() for each in pieces)) < num_bytes:
                size = min(2 * GIB, num_bytes - done)
                if available_bytes() < spare + size:
                    return done, f"only {_gib(available_bytes())} were left"
                pieces.append(Arena(size).take(size, torch.uint8))
                list(threads.map(lambda part: part.fill_(1), pieces[-1].chunk(4 * (os.cpu_count() or 1))))
                if locks is not None:
                    locks.lock(pieces[-1])
                    if locks.error is not None:
                        return done, f"CUDA could not lock it: {locks.error}"
        return num_bytes, ""
    finally:
        if locks is not None:
            locks.unlock_all()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("device", nargs="?", default="cuda")
    parser.add_argument("--gib", type=float, default=1.0, help="how much to fill and lock")
    arguments = parser.parse_args()
    before, began = of_machine(), time.perf_counter()
    done, reason = fill_and_lock(round(arguments.gib * GIB), arguments.device != "cpu")
    seconds = time.perf_counter() - began
    print(
        f"filled and locked {_gib(done)} of {arguments.gib:g} GiB in {seconds:.1f} s{'; ' + reason if reason else ''}"
    )
    print(f"available before: {_gib(before.get('MemAvailable', 0))}")
    sys.exit(1 if reason else 0)


if __name__ == "__main__":
    main()
