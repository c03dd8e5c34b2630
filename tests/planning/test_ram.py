"""Limits on a process's memory (control groups, the machine, its own limits), and free disk space."""

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from horizon_lm.common import resources
from horizon_lm.common.resources import (
    MemoryLimit,
    control_groups,
    disk_free,
    memlock_limit,
    memory_limits,
    resident_bytes,
)

MIB = 2**20
RESIDENT = 80 * MIB  # bytes of the process below, without mapped files
STATUS = "Name:\ta kB\nVmSize:\t  512000 kB\nVmRSS:\t  102400 kB\nRssFile:\t   20480 kB\nVmData:\t  204800 kB\n"
MEMINFO = f"MemTotal: {2**30} kB\nMemFree: 1 kB\nMemAvailable:   {2**29} kB\nActive(file): 3 kB\nHugePages_Total: 0\n"
UNLIMITED = 9223372036854771712


@pytest.fixture(autouse=True)
def _no_limits_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    limit_process(monkeypatch)


def limit_process(monkeypatch: pytest.MonkeyPatch, **limits: int) -> None:
    soft = {getattr(resource, name): limit for name, limit in limits.items()}
    hard = resource.RLIM_INFINITY
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft.get(kind, resource.RLIM_INFINITY), hard))


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else f"{content}\n".encode())


def limits_of(root: Path, membership: str = "", files: dict[str, object] | None = None) -> list[MemoryLimit]:
    proc = {"proc/self/status": STATUS, "proc/meminfo": MEMINFO, "proc/self/cgroup": membership}
    write(root, proc | {f"cgroups/{name}": content for name, content in (files or {}).items()})
    return memory_limits(root / "proc", root / "cgroups")


def v2(folder: str, limit: object, used: int, stat: str | bytes = "", **more: object) -> dict[str, object]:
    """Return the files of a control group; sizes are in MiB."""
    limit = limit * MIB if isinstance(limit, int) else limit
    files = {"max": limit, "high": "max", "current": used * MIB, "stat": stat} | more
    return {f"{folder}memory.{name}": content for name, content in files.items()}


def v1(folder: str, limit: int, used: int, stat: str = "") -> dict[str, object]:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    return {f"{folder}{name}": content for name, content in zip(names, (limit, used * MIB, stat), strict=True)}


CACHE = f"anon 7\nfile {900 * MIB}\nshmem {300 * MIB}\ninactive_file {200 * MIB}\nactive_file {400 * MIB}\n"
TOTALS = "inactive_file 5\nactive_file 6\n" + "".join(f"total_{line}\n" for line in CACHE.splitlines())
GROUPS: dict[str, tuple[str, dict[str, object], dict[str, int]]] = {
    # membership, files, room (MiB) under each limit
    "v2, no limit": ("0::/a", v2("a/", "max", 300), {}),
    "v2, own group": ("0::/a/b", v2("a/b/", 1000, 300), {"v2 /a/b (memory.max 1000.00 MiB)": 700}),
    "v2, smaller limit above": (
        "0::/a/b",
        v2("a/b/", 2000, 300) | v2("a/", 1000, 600),
        {"v2 /a (memory.max 1000.00 MiB)": 400, "v2 /a/b (memory.max 1.95 GiB)": 1700},
    ),
    "v2, at the mount": ("0::/", v2("", 1000, 300), {"v2 / (memory.max 1000.00 MiB)": 700}),
    "v2, the path is the host's": ("0::/docker/1f", v2("", 1000, 300), {"v2 / (memory.max 1000.00 MiB)": 700}),
    "v2, another group of that name": (
        "0::/docker/1f", v2("", 1000, 300) | v2("docker/", 50, 30), {"v2 / (memory.max 1000.00 MiB)": 700},
    ),
    "v2, a path out of the namespace": (
        "0::/../a", v2("", 1000, 300) | v2("../a/", 50, 30), {"v2 / (memory.max 1000.00 MiB)": 700},
    ),
    "v2, cache is no use, shmem is": ("0::/a", v2("a/", 1500, 1200, CACHE), {"v2 /a (memory.max 1.46 GiB)": 900}),
    "v2, slab": (
        "0::/a", v2("a/", 1000, 300, f"slab_reclaimable {100 * MIB}\nslab {150 * MIB}"),
        {"v2 /a (memory.max 1000.00 MiB)": 800},
    ),
    "v2, more cache than use": ("0::/a", v2("a/", 1000, 300, CACHE), {"v2 /a (memory.max 1000.00 MiB)": 1000}),
    "v2, memory.high": (
        "0::/a", v2("a/", 1000, 300, high=600 * MIB), {"v2 /a (memory.high 600.00 MiB)": 300},
    ),
    "v2, memory.high alone": (
        "0::/a", v2("a/", "max", 300, high=600 * MIB), {"v2 /a (memory.high 600.00 MiB)": 300},
    ),
    "v2, above memory.high": ("0::/a", v2("a/", "max", 900, high=600 * MIB), {"v2 /a (memory.high 600.00 MiB)": -80}),
    "v1, no limit": ("4:memory:/x", v1("memory/x/", UNLIMITED, 300), {}),
    "v1, own group": (
        "4:memory:/x\n3:cpu:/y", v1("memory/x/", 1000 * MIB, 300) | v1("memory/y/", 50 * MIB, 30),
        {"v1 /x (memory.limit_in_bytes 1000.00 MiB)": 700},
    ),
    "v1, above": (
        "4:memory:/x/z", v1("memory/x/z/", UNLIMITED, 100) | v1("memory/x/", 1000 * MIB, 300),
        {"v1 /x (memory.limit_in_bytes 1000.00 MiB)": 700},
    ),
    "v1, the path is the host's": (
        "4:memory:/docker/1f", v1("memory/", 1000 * MIB, 300), {"v1 / (memory.limit_in_bytes 1000.00 MiB)": 700},
    ),
    "v1, totals": (
        "4:memory:/x", v1("memory/x/", 1500 * MIB, 1200, TOTALS), {"v1 /x (memory.limit_in_bytes 1.46 GiB)": 900},
    ),
    "v1, no totals": (
        "4:memory:/x", v1("memory/x/", 1500 * MIB, 1200, CACHE), {"v1 /x (memory.limit_in_bytes 1.46 GiB)": 900},
    ),
    "v1, co-mounted": (
        "4:cpu,memory:/x", v1("memory/x/", 1000 * MIB, 300), {"v1 /x (memory.limit_in_bytes 1000.00 MiB)": 700},
    ),
    "v1, co-mounted without links": (
        "4:cpu,memory:/x", v1("cpu,memory/x/", 1000 * MIB, 300), {"v1 /x (memory.limit_in_bytes 1000.00 MiB)": 700},
    ),
    "hybrid, limits in v1": (
        "4:memory:/x\n1:name=systemd:/s\n0::/s", v1("memory/x/", 1000 * MIB, 300) | {"unified/s/cgroup.procs": 1},
        {"v1 /x (memory.limit_in_bytes 1000.00 MiB)": 700},
    ),
    "hybrid, limits in v2": (
        "3:cpu:/x\n0::/s", v2("unified/s/", 1000, 300) | {"cpu/x/tasks": 1}, {"v2 /s (memory.max 1000.00 MiB)": 700},
    ),
    "v2, a group called unified": (
        "0::/s", v2("s/", 1000, 300) | v2("unified/s/", 50, 30) | {"cgroup.controllers": "memory"},
        {"v2 /s (memory.max 1000.00 MiB)": 700},
    ),
    "garbage in a membership": ("\n0:\nmemory\n0::/a", v2("a/", 1000, 300), {"v2 /a (memory.max 1000.00 MiB)": 700}),
    "garbage in a limit": (
        "0::/a/b", v2("a/b/", "1e3", 3) | v2("a/", 1000, 300, high="-5"), {"v2 /a (memory.max 1000.00 MiB)": 700},
    ),
    "garbage in a use": ("0::/a", v2("a/", 1000, 300, current="9" * 5000), {}),
    "garbage in cache": (
        "0::/a", v2("a/", 1000, 300, stat=b"\xff\xfe 3\nactive_file\nactive_file -1\nx y z\ninactive_file 1048576\n"),
        {"v2 /a (memory.max 1000.00 MiB)": 701},
    ),
    "files that are missing": ("0::/a/b/c", {"a/b/c/memory.max": 5, "a/b/memory.current": 5, "a/memory.stat": 5}, {}),
}  # fmt: skip


@pytest.mark.parametrize(("membership", "files", "left"), list(GROUPS.values()), ids=list(GROUPS))
def test_control_groups(tmp_path: Path, membership: str, files: dict[str, object], left: dict[str, int]) -> None:
    limits = limits_of(tmp_path, membership, files)
    assert [x.room for x in limits] == sorted(x.room for x in limits)
    groups = {x.name: x.room for x in limits if x.name != "MemAvailable"}
    assert groups == {f"cgroup {name}": RESIDENT + mib * MIB for name, mib in left.items()}
    assert len(limits) == len(groups) + 1


def test_groups_are_innermost_first(tmp_path: Path) -> None:
    write(tmp_path, {"membership": "5:memory,cpu:/x\n2:memory_not:/no\n0::/a/b", "memory/x/f": 1, "unified/a/b/f": 1})
    groups = [(group.version, group.path) for group in control_groups("memory", tmp_path, tmp_path / "membership")]
    assert groups == [(1, "/x"), (1, "/"), (2, "/a/b"), (2, "/a"), (2, "/")]
    assert list(control_groups("memory", tmp_path, tmp_path / "nowhere")) == []


def test_machine_limits(tmp_path: Path) -> None:
    assert limits_of(tmp_path, "0::/", v2("", 2**30, 0))[0] == MemoryLimit(
        "MemAvailable", 2**39 + RESIDENT, is_estimate=True
    )
    old = "MemFree: 1000 kB\nBuffers: 20 kB\nCached: 300 kB\nShmem: 40 kB\n"
    write(tmp_path, {"proc/meminfo": old})
    (limit,) = memory_limits(tmp_path / "proc", tmp_path / "nowhere")
    assert limit == MemoryLimit("MemFree and page cache", (1000 + 20 + 300 - 40) * 1024 + RESIDENT, is_estimate=True)


@pytest.mark.parametrize("files", [{}, {"meminfo": b"\xffMemAvailable: many kB\nMemFree: 1", "self/status": "VmRSS"}])
def test_without_proc(tmp_path: Path, files: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, files)
    limit_process(monkeypatch, RLIMIT_AS=1)  # the mapped size is unknown
    physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert memory_limits(tmp_path, tmp_path) == [MemoryLimit("physical memory", physical, is_estimate=True)]
    assert MIB < resident_bytes(tmp_path) < physical

    def unknown(name: str) -> int:
        raise ValueError(name)

    monkeypatch.setattr(os, "sysconf", unknown)
    assert memory_limits(tmp_path, tmp_path) == []


def test_process_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit_process(monkeypatch, RLIMIT_AS=700 * MIB, RLIMIT_DATA=260 * MIB)
    data, space, _ = limits_of(tmp_path)
    assert data == MemoryLimit("RLIMIT_DATA", 60 * MIB + RESIDENT)
    assert space == MemoryLimit("RLIMIT_AS", 200 * MIB + RESIDENT)
    limit_process(monkeypatch, RLIMIT_AS=100 * MIB)  # below the mapped size
    assert limits_of(tmp_path)[0] == MemoryLimit("RLIMIT_AS", 0)


def test_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert memlock_limit() is None
    limit_process(monkeypatch, RLIMIT_MEMLOCK=8 * MIB)
    assert memlock_limit() == 8 * MIB


def test_mapped_files_do_not_count(tmp_path: Path) -> None:
    limits_of(tmp_path)
    assert resident_bytes(tmp_path / "proc") == RESIDENT
    write(tmp_path, {"proc/self/status": STATUS.replace("RssFile", "Other")})  # Linux before 4.5
    assert resident_bytes(tmp_path / "proc") == 100 * MIB


CHILD = """
import resource, sys
from pathlib import Path
from horizon_lm.common.resources import memory_limits, resident_bytes

MIB = 2**20
name, mapped = sys.argv[1:]
lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
limit = int(lines[mapped].split()[0]) * 1024 + 300 * MIB
before = resident_bytes()
resource.setrlimit(getattr(resource, name), (limit, limit))
(room,) = (limit.room for limit in memory_limits() if limit.name == name)
assert abs(room - before - 300 * MIB) < 20 * MIB, (room, before)
block = bytearray(room - resident_bytes() - 50 * MIB)
block[::4096] = bytes(len(range(0, len(block), 4096)))
assert abs(resident_bytes() - (room - 50 * MIB)) < 20 * MIB, resident_bytes()
(after,) = (limit.room for limit in memory_limits() if limit.name == name)
assert abs(after - room) < 20 * MIB, (after, room)
del block
try:
    bytearray(room - resident_bytes() + 50 * MIB)
except MemoryError:
    print("as expected")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not enforce these limits")
@pytest.mark.parametrize(("name", "mapped"), [("RLIMIT_AS", "VmSize"), ("RLIMIT_DATA", "VmData")])
def test_room_can_be_allocated(name: str, mapped: str) -> None:
    command = [sys.executable, "-c", CHILD, name, mapped]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "as expected\n"), done.stderr


def test_disk_of_missing_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def statvfs(path: Path) -> os.statvfs_result:
        if not path.exists():
            raise FileNotFoundError(path)
        asked.append(path)
        return os.statvfs_result((4096, 512, 100, 80, 70, 0, 0, 0, 0, 255))  # blocks: 80 free, 70 of them for users

    monkeypatch.setattr(resources.os, "statvfs", statvfs)
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "other" / "not yet")
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "other", Path("other/not/yet"), Path("link/below")):
        assert disk_free(path) == 70 * 512
    assert asked == [tmp_path / "other"] * 3


def test_disk_of_existing_path(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    there = os.statvfs(tmp_path)
    for path in (tmp_path / "not" / "yet", tmp_path / "file" / "below"):
        assert 0 < disk_free(path) < there.f_blocks * there.f_frsize
