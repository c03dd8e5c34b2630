"""Kernels that are kept on disk: found again by every process, never in place of another kernel, and never if damaged."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from horizon_lm.memory.kernels import cache
from horizon_lm.memory.kernels.bits import F32, inlined, kernel
from horizon_lm.memory.kernels.gradients import landing_kernel, squared_norm_kernel
from horizon_lm.memory.kernels.updates import rows_kernel
from horizon_lm.optim.adamw import AdamW
from horizon_lm.optim.lion import Lion


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    return tmp_path / "horizon-lm" / "kernels"


def sum_of_squares() -> Any:
    """Return a kernel as another process would make it."""
    return squared_norm_kernel.__wrapped__("float32")


def hits(compiled: Any) -> int:
    assert compiled(np.array([3, 4], F32)) == 25
    return sum(compiled.stats.cache_hits.values())


def test_a_kernel_is_compiled_once() -> None:
    assert [hits(sum_of_squares()) for _ in range(3)] == [0, 1, 1]


def test_another_process_finds_it(folder: Path) -> None:
    hits(sum_of_squares())
    code = (
        "import numpy as np; from horizon_lm.memory.kernels.gradients import squared_norm_kernel as make; kernel = make('float32');"
        "print(kernel(np.array([3, 4], np.float32)), sum(kernel.stats.cache_hits.values()))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "25.0 1\n"


def test_the_same_code_of_other_functions_is_another_kernel() -> None:
    for add in (False, True):
        target = np.ones(2, F32)
        landing_kernel.__wrapped__("float32", "float32", add)(target, np.ones(2, F32))
        assert target.tolist() == [1 + add, 1 + add]
    composed = [rows_kernel(each.rule, "float32", "float32", "float32") for each in (AdamW, Lion)]
    assert composed[0]._cache._identity != composed[1]._cache._identity


UPDATES = """
import os
import sys
import numpy as np
from horizon_lm.memory.kernels.updates import rows_kernel
from horizon_lm.optim.adamw import AdamW
from horizon_lm.optim.update_tasks import step_scalars

scalars = step_scalars(AdamW.rule, {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0}, 1, clip=1, key=7)

def update(weights):
    kernel = rows_kernel(AdamW.rule, weights, "float32", "float32")
    values, low = np.arange(15000, 15128, dtype=np.uint16), np.zeros(128, np.uint16)
    moments = [np.zeros(128, np.float32) for _ in range(2)]
    nothing, rows = np.zeros(0, np.float32), np.arange(2)
    kernel(values, low, np.linspace(-1, 1, 128, dtype=np.float32), *moments, nothing, nothing, 64, 0, rows, rows, scalars)
    print(weights, sum(kernel.stats.cache_hits.values()), values.tobytes().hex(), low.tobytes().hex(), flush=True)

for kinds in sys.argv[1:]:  # a process each, as it is after its imports, which take longer than all kernels
    if not (child := os.fork()):
        for weights in kinds.split():
            update(weights)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"{kinds} failed")
"""


def test_kernels_of_two_processes_call_their_own_parts() -> None:
    """Two kernels that two processes compiled in the same order: numba counts their parts alike."""
    command = [sys.executable, "-c", UPDATES, "bf16", "fp32_master", "bf16 fp32_master", "fp32_master bf16"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    loaded = [line.replace(" 0 ", " 1 ") for line in printed[:2]]  # the first two processes compile
    assert all(line.split()[1] == "0" for line in printed[:2])
    assert printed[2:] == [*loaded, *loaded[::-1]]


@pytest.mark.parametrize(
    "change",
    [lambda old: old[:40], lambda old: old[:-1] + bytes([old[-1] ^ 1]), lambda old: b""],
    ids=["cut off", "a bit", "empty"],
)
def test_a_damaged_file_is_made_again(folder: Path, change: Any) -> None:
    hits(sum_of_squares())
    (path,) = folder.iterdir()
    path.write_bytes(change(path.read_bytes()))
    assert [hits(sum_of_squares()) for _ in range(2)] == [0, 1]
    assert list(folder.iterdir()) == [path]


def test_other_sources_and_versions_are_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    hits(sum_of_squares())
    monkeypatch.setattr(cache, "_versions", lambda: ("sources", "numba", "numpy", "python"))
    assert hits(sum_of_squares()) == 0


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_nothing_is_read_from_a_folder_that_others_can_write(folder: Path, mode: int) -> None:
    hits(sum_of_squares())
    folder.chmod(mode)
    assert hits(sum_of_squares()) == 0


def test_a_folder_of_somebody_else_is_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hits(sum_of_squares())
    monkeypatch.setattr(cache.os, "getuid", lambda: -1)
    assert hits(sum_of_squares()) == 0


@pytest.mark.parametrize("place", ["file/inside", "file"])
def test_without_a_folder_kernels_are_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / place))
    assert [hits(sum_of_squares()) for _ in range(2)] == [0, 0]


def test_a_relative_folder_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "~")
    assert hits(sum_of_squares()) == 0
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_no_part_of_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, content: bytes) -> None:
        path.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    assert hits(sum_of_squares()) == 0
    assert not list(folder.iterdir())


def test_a_kernel_that_calls_functions_of_others_is_not_kept(folder: Path) -> None:
    @inlined
    def of_others(value: Any) -> Any:
        return value + F32(1)

    assert kernel(lambda value: of_others(value))(F32(1)) == 2
    assert not folder.exists()
