"""``horizon-lm doctor`` as a user runs it. The tests check that figures exist, not their values."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from horizon_lm.device.cpu import CpuDevice
from horizon_lm.device.cuda import CudaDevice
from horizon_lm.errors import ConfigError
from horizon_lm.planning.arithmetic.catalog import read_profile
from horizon_lm.tools.doctor import host_benchmarks, machine
from horizon_lm.tools.doctor.host_benchmarks import disk_rates, host_bandwidth, update_time
from horizon_lm.tools.doctor.machine import describe_machine
from horizon_lm.tools.doctor.profile import measure_machine
from horizon_lm.tools.doctor.timing import Rounds
from tests.e2e.command import run
from tests.support.emulated_gpu import emulated_gpu

QUICK = Rounds(seconds=0.0, at_least=1, quick=True)
RATES = ("device_bandwidth", "op_seconds", "link_in", "link_out", "link_both", "host_memory", "cores")


def doctor(*arguments: Any, home: Path, code: int = 0) -> "subprocess.CompletedProcess[str]":
    """Run the command in a separate process, with this folder as home and working directory."""
    environment = os.environ | {"HOME": str(home), "OMP_NUM_THREADS": "1"}
    environment.pop("XDG_CONFIG_HOME", None)
    command = [sys.executable, "-m", "horizon_lm.cli", "doctor", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, cwd=home)
    assert done.returncode == code, done.stderr
    return done


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_profile_of_this_machine(tmp_path: Path) -> None:
    done = doctor("--quick", "--device", "cpu", "--json", home=tmp_path)
    own = tmp_path / ".config" / "horizon-lm" / "profile.json"
    assert files(tmp_path) == [".config/horizon-lm/profile.json"]  # the disk benchmark leaves no file behind

    profile = read_profile(own)
    assert (profile.device, profile.gpu, profile.device_memory) == ("cpu", "", 0)
    figures = [getattr(profile, name) for name in RATES]
    for rates in (profile.matmul, profile.attention, profile.host_bandwidth):
        figures += rates.values()
    assert all(math.isfinite(figure) and figure > 0 for figure in figures)
    assert list(profile.host_bandwidth)[-1] == str(profile.cores)
    measured = re.compile(r"measured \d{4}-\d\d-\d\d by horizon-lm doctor, .+")
    assert set(RATES) | {"matmul", "attention", "host_bandwidth"} <= profile.sources.keys()
    assert all(measured.fullmatch(source) for source in profile.sources.values())

    said = json.loads(done.stdout)  # nothing else is on standard output
    assert said["profile"] == json.loads(own.read_text())
    assert said["saved"] == str(own)
    assert {"torch", "numba", "python", "horizon-lm"} <= said["machine"]["versions"].keys()
    assert "RLIMIT_MEMLOCK" in said["machine"]["limits"]
    assert "host memory, threads: 1:" in done.stderr  # progress


# Errors are raised before anything is measured


def rejected(message: str, *arguments: Any) -> None:
    done = run("doctor", "--quick", "--device", "cpu", *arguments)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr
    assert done.stdout == ""


def test_unwritable_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CONFIG_HOME")
    (tmp_path / "file").write_text("")
    rejected(f"{tmp_path}/file is not a folder", "--output", tmp_path / "file/profile.json")
    rejected("file/sub does not exist; create it", "--output", tmp_path / "file/sub/profile.json")
    rejected(f"--output: {tmp_path} is a folder; name a file in it", "--output", tmp_path)
    rejected("nowhere is not a folder", "--folder", "nowhere", "--no-save")
    assert files(tmp_path) == ["file"]


# Parts that --quick skips, and their behavior when resources are short


def test_update_time() -> None:
    found = update_time("fp32_master", CpuDevice(), cores=1, available=2**30, rounds=QUICK)
    assert 1e-11 < found.parameter < 1e-6
    assert 1e-8 < found.unit < 1e-1


@pytest.mark.parametrize(
    ("units", "parameters", "expected"),
    [
        (5e-4, 0.24e-9, (0.24e-9, 5e-4)),
        (0.0, 0.24e-9, (0.24e-9, 1e-7)),  # JSON has positive figures
        (4e-4, -0.01e-9, (4.05e-11, 1e-7)),  # the larger model was faster, because the machine was busy
    ],
)
def test_an_update_is_timed_with_two_sizes(
    monkeypatch: pytest.MonkeyPatch, units: float, parameters: float, expected: tuple[float, float]
) -> None:
    """What starting the update of a unit takes is no time of its parameters: in large blocks it does not count."""
    sizes = []

    def step_of(config: Any, *_: Any) -> tuple[int, float]:
        block = 885_312 + 3 * 576 * config.intermediate_size
        count = config.num_hidden_layers * block + 8192 * 576 + 576
        sizes.append(count)
        return count, (config.num_hidden_layers + 2) * units + parameters * count

    monkeypatch.setattr(host_benchmarks, "_measure_step", step_of)
    found = update_time("fp32_master", CpuDevice(), cores=16, available=2**40, rounds=Rounds())
    assert tuple(found) == pytest.approx(expected, rel=1e-3)
    assert 18 * max(sizes) < 2 * 2**30


def test_disk_rates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(rate > 0 for rate in disk_rates(tmp_path, QUICK))
    with pytest.raises(ConfigError, match="nowhere: No such file or directory; name a folder"):
        disk_rates(tmp_path / "nowhere", QUICK)
    full = os.statvfs_result((4096, 4096, 1000, 1000, 1000, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: full)
    assert disk_rates(tmp_path, QUICK) == (0.0, 0.0)
    assert files(tmp_path) == []


def test_host_bandwidth_by_threads() -> None:
    assert list(host_bandwidth(6, 2**30, QUICK)) == ["1", "2", "4", "6"]


# The GPU code, on an emulated GPU


def test_emulated_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with emulated_gpu(free_bytes=24 * 10**9) as gpu:
        profile = measure_machine(CudaDevice, tmp_path, QUICK, lambda line: None)
        profile.save(tmp_path / "profile.json")
        assert read_profile(tmp_path / "profile.json") == profile
        assert (profile.device, profile.gpu, profile.device_memory) == ("cuda", "Emulated GPU", 24 * 10**9)
        assert all(math.isfinite(rate) and rate > 0 for rate in profile.matmul.values())

        assert describe_machine(CudaDevice(), tmp_path)["gpu"]["packed rows"].startswith("FlashAttention-2 of torch ")

        def page_locking(limit: int | None) -> str:
            monkeypatch.setattr(machine, "memlock_limit", lambda: limit)
            return describe_machine(CudaDevice(), tmp_path)["gpu"]["page-locking"]

        assert page_locking(None) == "works (64.00 MiB tried, no limit)"
        assert page_locking(8 * 2**20) == "works, beyond RLIMIT_MEMLOCK (64.00 MiB tried)"
        assert page_locking(99 * 2**20) == "works, beyond RLIMIT_MEMLOCK (100.00 MiB tried)"
        assert page_locking(2**40).startswith("works (1.00 GiB tried); not tried beyond")
        gpu.lockable = 2**20
        assert page_locking(8 * 2**20).startswith("fails (out of memory; 64.00 MiB tried), so every copy")


def test_slow_work_is_timed_once() -> None:
    times: list[int] = []
    Rounds(seconds=0.0, at_least=3).median(lambda: times.append(1))
    assert len(times) == 2  # including the untimed one
    Rounds(seconds=0.01, at_least=3).median(lambda: times.append(1), prepare=lambda: times.append(0))
    assert times[2:6] == [0, 1, 0, 1]
    assert len(times) >= 2 + 4 * 2
