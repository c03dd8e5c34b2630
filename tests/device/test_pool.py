"""Threads for host work: order, shared cores and errors; and the number of usable cores."""

import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from horizon_lm.common.resources import usable_cores
from horizon_lm.common.units import block
from horizon_lm.device import host_threads
from horizon_lm.device.base import Task
from horizon_lm.device.cpu import HostLink
from horizon_lm.device.host_threads import HostPool
from horizon_lm.schedule.ops import Kind, Op, Stream


@dataclass
class Piece:
    function: Any
    host_bytes: int = 0

    def run(self, link: Any) -> None:
        self.function()

    def split(self, parts: int) -> list[Any]:
        return [self]


def task(*functions: Any) -> Task:
    return Task(Op(Kind.UPDATE, block(0), Stream.HOST), [], [Piece(f) for f in functions])


def test_tasks_are_all_done() -> None:
    pool, seen = HostPool(3, 1, HostLink()), []
    tasks = [task(*[lambda n=n: seen.append(n)] * 5) for n in range(20)]
    for each in tasks:
        pool.submit(each)
    pool.wait()
    assert all(each.done for each in tasks)
    assert sorted(seen) == sorted(list(range(20)) * 5)


def test_no_task_runs_before_it_is_ready() -> None:
    pool, gate, seen = HostPool(3, 1, HostLink()), threading.Event(), []
    first, second = task(lambda: seen.append(1)), task(lambda: seen.append(2))
    pool.submit(first, gate.wait)
    pool.submit(second)
    assert not first.done
    assert seen == []
    gate.set()
    pool.wait([first, second])
    assert seen == [1, 2]


def test_an_urgent_task_runs_next() -> None:
    pool, gate, seen = HostPool(1, 1, HostLink()), threading.Event(), []
    pool.submit(task(gate.wait))
    for n in range(3):
        pool.submit(task(lambda n=n: seen.append(n)))
    pool.submit(task(lambda: seen.append("urgent")), urgent=True)
    gate.set()
    pool.wait()
    assert seen == ["urgent", 0, 1, 2]


def test_a_task_may_wait_for_an_urgent_one() -> None:
    pool, waiting, gate, seen = HostPool(1, 1, HostLink()), threading.Event(), threading.Event(), []

    def ready() -> None:
        waiting.set()
        seen.append(gate.wait(10))

    pool.submit(task(lambda: None), ready)
    waiting.wait()
    pool.submit(task(gate.set), urgent=True)
    pool.wait()
    assert seen == [True]


def test_fewer_threads_run_while_the_device_computes() -> None:
    pool = HostPool(4, 1, HostLink())
    lock, running, peak = threading.Lock(), 0, 0

    def piece() -> None:
        nonlocal running, peak
        with lock:
            running += 1
            peak = max(peak, running)
        threading.Event().wait(0.002)
        with lock:
            running -= 1

    pool.share_cores(True)
    pool.submit(task(*[piece] * 20))
    pool.wait()
    assert peak == 1
    pool.share_cores(False)
    pool.submit(task(*[piece] * 40))
    pool.wait()
    assert peak > 1


def test_an_error_is_raised_in_wait_and_other_tasks_go_on() -> None:
    pool, seen = HostPool(2, 1, HostLink()), []

    def fails() -> None:
        raise ValueError("piece")

    bad, good = task(fails, lambda: None), task(lambda: seen.append(1))
    pool.submit(bad)
    pool.submit(good)
    pool.wait([good])
    with pytest.raises(ValueError, match="piece"):
        pool.wait([bad])
    pool.wait()
    assert seen == [1]


def test_threads_end_with_their_pool() -> None:
    before = set(threading.enumerate())
    pool = HostPool(3, 1, HostLink())
    pool.submit(task(lambda: None))
    pool.wait()
    del pool
    for _ in range(200):
        if set(threading.enumerate()) <= before:
            break
        threading.Event().wait(0.01)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("files", "membership", "expected"),
    [
        ({"cpu.max": "100000 100000"}, "0::/", 1),
        ({"a/b/cpu.max": "max 100000", "a/cpu.max": "100000 100000"}, "0::/a/b", 1),
        ({"cpu/x/cpu.cfs_quota_us": "100000", "cpu/x/cpu.cfs_period_us": "100000"}, "3:cpu,cpuacct:/x\n0::/", 1),
        ({"cpu.max": "50000 100000"}, "0::/", 1),  # half a core is still one thread
        ({"cpu.max": "max 100000"}, "0::/", None),
        ({}, "0::/elsewhere", None),
    ],
)
def test_usable_cores(tmp_path: Path, files: dict[str, str], membership: str, expected: int | None) -> None:
    for name, content in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    (tmp_path / "membership").write_text(membership)
    everything = usable_cores(tmp_path, tmp_path / "nowhere")
    assert usable_cores(tmp_path, tmp_path / "membership") == (expected or everything)
    assert everything >= 1


def test_a_thread_that_has_ended_holds_no_task() -> None:
    """Else its last tensors would be freed while the interpreter shuts down, which ends the process with an abort."""
    running, gate = threading.Event(), threading.Event()
    before = set(threading.enumerate())
    pool = HostPool(1, 1, HostLink())
    threads = set(threading.enumerate()) - before  # these references keep the threads themselves alive
    pool.submit(task(running.set, gate.wait))
    late = task(lambda: None)  # is not run any more
    pool.submit(late)
    held = weakref.ref(late.moves[0])
    running.wait()
    del pool, late
    gate.set()
    for thread in threads:
        thread.join(10)
    assert held() is None


def test_a_thread_that_was_not_started_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An interrupt that comes before its start must not be followed by another error at the interpreter's exit."""
    stopped, started = threading.Event(), threading.Event()
    running: dict[threading.Thread, Any] = {}
    monkeypatch.setattr(host_threads, "_running", running)
    monkeypatch.setattr(threading.Thread, "start", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        host_threads.start_thread("never", started.set, (), stopped.set)
    host_threads._stop_all_threads()
    assert stopped.is_set()
    assert not started.is_set()


def _interrupted(thread: threading.Thread) -> None:
    raise KeyboardInterrupt
