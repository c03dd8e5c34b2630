"""How many cores this process may use."""

import math
import os
from pathlib import Path


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """The process's affinity, and no more than what the quotas of its control groups allow; at least one."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.floor(min([affinity, *_quotas(cgroups, membership)])))


def _quotas(cgroups: Path, membership: Path) -> list[float]:
    """Quotas, in cores, of this process's group and of all groups above it (versions 1 and 2)."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:  # not Linux
        return []
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        root = cgroups / "cpu" if controllers else cgroups
        group = root / path.strip("/")
        for folder in (group, *group.parents):
            quotas += _quota(folder)
            if folder == root:
                break
    return quotas


def _quota(folder: Path) -> list[float]:
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = (
                (folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period")
            )  # fmt: skip
        return [] if quota in ("max", "-1") else [int(quota) / int(period)]
    except (OSError, ValueError):  # not visible from here
        return []
