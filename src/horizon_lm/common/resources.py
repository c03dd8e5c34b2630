"""Memory, disk space and cores available to this process, given the machine, control groups and resource limits."""

import math
import os
import re
import resource
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from horizon_lm.common.quantities import format_bytes


@dataclass(frozen=True, slots=True)
class Group:
    """A control group of version 1 or 2, with its path below the mount point and the folder of its files."""

    version: int
    path: str
    folder: Path


def control_groups(controller: str, cgroups: Path, membership: Path) -> Iterator[Group]:
    """Yield this process's group and its ancestors, innermost first, in every hierarchy with this controller.

    ``cgroups`` is the mount point of the hierarchies, ``membership`` is ``/proc/self/cgroup`` (cgroups(7)). Groups of
    version 2 are yielded even without the controller, because the files that exist show whether they have it.
    """
    try:
        lines = membership.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError:  # not Linux
        return
    for fields in (line.split(":", 2) for line in lines):
        if len(fields) != 3:
            continue
        _, controllers, path = fields  # version 2 has no controllers here
        if controllers and controller not in controllers.split(","):
            continue
        mount_point = _mount_point(controller, controllers, cgroups)
        names = [name for name in path.split("/") if name]
        if ".." in names or not os.path.isdir(mount_point.joinpath(*names)):
            names = []  # in a container: the path is the host's, and the mount point is the group of this process
        for depth in range(len(names), -1, -1):
            kept = names[:depth]
            yield Group(1 if controllers else 2, "/" + "/".join(kept), mount_point.joinpath(*kept))


def _mount_point(controller: str, controllers: str, cgroups: Path) -> Path:
    """Return the folder of a hierarchy under ``cgroups``: that of a controller in version 1, that of all in version 2."""
    if controllers:  # a hierarchy with several controllers usually has a link for each of them, but not on all systems
        return cgroups / (controller if os.path.isdir(cgroups / controller) else controllers)
    hybrid = os.path.isdir(cgroups / "unified") and not os.path.exists(cgroups / "cgroup.controllers")
    return cgroups / "unified" if hybrid else cgroups


_PROC = Path("/proc")
_NO_LIMIT = 2**62  # version 1 has no value for "unlimited": it shows the largest number of whole pages


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """An upper bound on this process's memory.

    Attributes:
        name: display name, such as "cgroup v2 /user.slice/run.scope (memory.max 8.00 GiB)" or "MemAvailable".
        room: total bytes that this process may use: those in use (``resident_bytes``) plus those left under the limit.
        is_estimate: True if the limit is not enforced: it is the memory that is free now, and more may become free.
    """

    name: str
    room: int
    is_estimate: bool = False


def memory_limits(proc: Path = _PROC, cgroups: Path = Path("/sys/fs/cgroup")) -> list[MemoryLimit]:
    """Return every known bound on this process's memory, smallest first, leaving out bounds that cannot be read."""
    resident = resident_bytes(proc)
    groups = control_groups("memory", cgroups, proc / "self/cgroup")
    limits = [
        *(limit for group in groups for limit in _group_limits(group, resident)),
        *_machine_limits(proc, resident),
        *_process_limits(proc, resident),
    ]
    return sorted(limits, key=lambda limit: limit.room)


def resident_bytes(proc: Path = _PROC) -> int:
    """Return the memory used by this process in bytes: VmRSS without the pages of mapped files.

    Mapped files are page cache, which counts toward no limit, because the kernel drops it when memory is needed.
    Without ``/proc``, the peak of the process is returned, including mapped files.
    """
    status = _read_sizes(proc / "self/status")
    if "VmRSS" in status:
        return max(0, status["VmRSS"] - status.get("RssFile", 0))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def memlock_limit() -> int | None:
    """Return the bytes that this process may lock without privileges, or None if there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def disk_free(path: Path) -> int:
    """Return the bytes that an unprivileged user may still write at ``path``, which need not exist yet.

    Quotas of users and projects are not considered.

    Raises:
        OSError: the file system does not answer, or access is denied.
    """
    answer = os.statvfs(_nearest(path))
    return answer.f_bavail * answer.f_frsize


def takes_files(path: Path) -> bool:
    """Return whether the file system at ``path`` has space for files, also if it is full. File systems of the kernel, such as
    /proc, have none for any user. Raise OSError as `disk_free` does.
    """
    return os.statvfs(_nearest(path)).f_blocks > 0


def file_system(path: Path) -> int:
    """Return the number of the file system that contains or will contain ``path``; raise OSError if access is denied."""
    return os.stat(_nearest(path)).st_dev


def is_in_memory(path: Path, mounts: Path = _PROC / "self/mountinfo") -> bool:
    """Return whether files at ``path`` are kept in memory; raise OSError if access is denied. ``mounts``: proc(5)."""
    device = file_system(path)
    number = f" {os.major(device)}:{os.minor(device)} "
    return any(number in line and " - tmpfs " in line for line in _read_text(mounts).splitlines())


def file_size_limit() -> int | None:
    """Return the largest size of a file that this process may write (RLIMIT_FSIZE), or None if there is no limit."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _nearest(path: Path) -> Path:
    """Return ``path`` or its closest existing ancestor; raise OSError if access is denied."""
    target = Path(os.path.realpath(path))  # a link to a missing target may lead to another disk
    for place in (target, *target.parents):
        try:
            os.stat(place)
        except (FileNotFoundError, NotADirectoryError):
            continue
        return place
    raise FileNotFoundError(f"neither {target} nor any folder above it exists")


def _group_limits(group: Group, resident: int) -> list[MemoryLimit]:
    """Return the lowest limit of a group, if it has one. Page cache that the kernel can drop counts as free."""
    if group.version == 2:  # above memory.high a process is throttled until it barely runs, so treat it as a limit
        limit_files, usage_file = ["memory.max", "memory.high"], "memory.current"
    else:
        limit_files, usage_file = ["memory.limit_in_bytes"], "memory.usage_in_bytes"
    numbers = [(_read_number(group.folder / name), name) for name in limit_files]
    limits = [(number, name) for number, name in numbers if number is not None and number < _NO_LIMIT]
    used = _read_number(group.folder / usage_file)
    if not limits or used is None:
        return []
    limit, name = min(limits)
    stat = dict(re.findall(r"^(\w+) (\d{1,20})$", _read_text(group.folder / "memory.stat"), re.MULTILINE))
    # Version 1 lists the numbers of the group itself and the totals of its subtree. Neither counts tmpfs as cache.
    cache = [stat.get(f"total_{kind}", stat.get(kind, 0)) for kind in ("inactive_file", "active_file")]
    droppable = sum(map(int, [*cache, stat.get("slab_reclaimable", 0)]))
    text = f"cgroup v{group.version} {group.path} ({name} {format_bytes(limit)})"
    return [MemoryLimit(text, max(0, limit - max(0, used - droppable) + resident))]


def _machine_limits(proc: Path, resident: int) -> list[MemoryLimit]:
    """Return the memory that the machine has for this process, which uses ``resident`` bytes of it already."""
    memory = _read_sizes(proc / "meminfo")
    if "MemAvailable" in memory:
        return [MemoryLimit("MemAvailable", memory["MemAvailable"] + resident, is_estimate=True)]
    if "MemFree" in memory:  # Linux before 3.14
        cache = memory.get("Cached", 0) + memory.get("Buffers", 0) - memory.get("Shmem", 0)
        return [MemoryLimit("MemFree and page cache", memory["MemFree"] + max(0, cache) + resident, is_estimate=True)]
    try:
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return []
    return [MemoryLimit("physical memory", physical, is_estimate=True)] if physical > 0 else []


def _process_limits(proc: Path, resident: int) -> list[MemoryLimit]:
    """Return the limits on mapped memory, less memory that is mapped but not resident, such as reservations of libraries."""
    status = _read_sizes(proc / "self/status")
    limits = []
    for name, kind, mapped in (
        ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"),
        ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"),
    ):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY and mapped in status:
            limits.append(MemoryLimit(name, max(0, limit - status[mapped] + resident)))
    return limits


def _read_text(path: Path) -> str:
    """Return the text of a file; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # another kernel or version, or not visible from this process
        return ""


def _read_number(path: Path) -> int | None:
    """Return the number in a file, or None for other content, such as "max"."""
    text = _read_text(path).strip()
    return int(text) if re.fullmatch(r"\d{1,20}", text) else None


def _read_sizes(path: Path) -> dict[str, int]:
    """Return the ``name: number kB`` lines of a file, in bytes."""
    lines = re.findall(r"^(\w+):\s*(\d{1,20}) kB$", _read_text(path), re.MULTILINE)
    return {name: 1024 * int(number) for name, number in lines}


def threads_left(
    proc: Path = _PROC, cgroups: Path = Path("/sys/fs/cgroup"), user: int | None = None, limit: int | None = None
) -> tuple[int, str] | None:
    """Return how many more threads this process may start, and the name of the limit; None if there is no limit.

    Args:
        proc, cgroups: mount points of the file systems to read.
        user: real user of the process; None for this process's.
        limit: limit on the threads of the user; None for RLIMIT_NPROC.
    """
    left: list[tuple[int, str]] = []
    for group in control_groups("pids", cgroups, proc / "self/cgroup"):
        most, used = _read_number(group.folder / "pids.max"), _read_number(group.folder / "pids.current")
        if most is not None and used is not None:
            left.append((max(0, most - used), f"pids.max of the control group {group.path}"))
    user = os.getuid() if user is None else user
    limit = resource.getrlimit(resource.RLIMIT_NPROC)[0] if limit is None else limit
    if limit != resource.RLIM_INFINITY and user != 0 and not _is_exempt(proc):  # root is not limited
        running = sum(_num_threads(status, user) for status in proc.glob("[0-9]*/status"))
        left.append((max(0, limit - running), "RLIMIT_NPROC (ulimit -u)"))
    return min(left, default=None)


def _is_exempt(proc: Path) -> bool:
    """Return whether this process may exceed RLIMIT_NPROC (capabilities(7): CAP_SYS_ADMIN 21, CAP_SYS_RESOURCE 24)."""
    found = re.search(r"^CapEff:\s*([0-9a-f]+)$", _read_text(proc / "self/status"), re.MULTILINE)
    return found is not None and bool(int(found.group(1), 16) & (1 << 21 | 1 << 24))


def _num_threads(status: Path, user: int) -> int:
    """Return the number of threads of a process; 0 if the process is another user's."""
    text = _read_text(status)
    number = re.search(r"^Threads:\s*(\d+)$", text, re.MULTILINE)
    return int(number.group(1)) if number and re.search(rf"^Uid:\s*{user}\s", text, re.MULTILINE) else 0


def usable_cores(cgroups: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")) -> int:
    """Return the number of cores that this process may use, at least one: the least of its affinity, the quotas of its control
    groups, and its share of a machine that several processes use (`limit_cores`).
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for group in control_groups("cpu", cgroups, membership) for quota in _quotas(group)]
    return max(1, math.floor(min([affinity, *quotas, *_share_of_cores])))


_share_of_cores: list[int] = []  # this process's share of cores that others use, too; empty if they are all its own


def limit_cores(share: int | None) -> None:
    """Let `usable_cores` return at most this many cores from now on, because other processes share them; None for no limit."""
    _share_of_cores[:] = [] if share is None else [share]


def _quotas(group: Group) -> list[float]:
    """Return the number of cores that a control group may use, as a single element; an empty list if it is not limited."""
    names = ["cpu.max"] if group.version == 2 else ["cpu.cfs_quota_us", "cpu.cfs_period_us"]
    try:
        quota, period = " ".join((group.folder / name).read_text() for name in names).split()
        return [] if quota in ("max", "-1") else [int(quota) / int(period)]
    except (OSError, ValueError):  # not visible from this process
        return []
