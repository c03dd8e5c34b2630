"""Threads for work in host memory: the optimizer's updates, and the writing of checkpoints.

Tasks start in the order of submission, and several threads share the moves of each. Kernels release the GIL. While the
device's computation needs cores too, only some of the threads take moves.
"""

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from horizon_lm.device.base import Task
from horizon_lm.device.transfers import Link, Move
from horizon_lm.errors import StreamingError
from horizon_lm.schedule.ops import Stream
from horizon_lm.schedule.trace import Trace

HOST_STREAMS = (Stream.HOST, Stream.DISK)  # whose tasks run in pools of threads
DISK_THREADS = 4  # files of a checkpoint that are written at the same time: one does not keep a fast disk busy

_STOP_SECONDS = 10.0  # limit for all threads together: a thread that waits for an interrupted step would wait forever
_running: "weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]]" = weakref.WeakKeyDictionary()


def start_thread(name: str, target: Callable[..., None], args: tuple[Any, ...], stop: Callable[[], None]) -> None:
    """Start a daemon thread that is stopped at the interpreter's exit; the caller stops it when its device is gone.

    Args:
        name: the name of the thread.
        target, args: the function to run and its arguments, without strong references to the device.
        stop: a function that makes ``target`` return soon; called once at the interpreter's exit.
    """
    thread = threading.Thread(target=_run, args=(target, args), name=name, daemon=True)
    _running[thread] = stop
    thread.start()


def _run(target: Callable[..., None], args: tuple[Any, ...]) -> None:
    try:
        target(*args)
    finally:
        # `stop` may hold the last tensors. They must be freed before others see that the thread has ended: freed later, they
        # would be freed while the interpreter shuts down, in a thread that must not take the GIL any more.
        _running[threading.current_thread()] = lambda: None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # these threads do not exist in a forked child


@atexit.register
def _stop_all_threads() -> None:
    """Stop threads in the order in which they were started: copy streams first, since they may wait for updates."""
    until = time.monotonic() + _STOP_SECONDS
    for thread, stop in list(_running.items()):
        stop()
        if thread.is_alive():  # an interrupt may have come between its entry here and its start
            thread.join(max(0.0, until - time.monotonic()))


@dataclass(eq=False, slots=True)
class _Job:
    """A task in the queue.

    Attributes:
        wait_until_ready: blocks until the task may run; None once a thread has called it.
        taken: number of moves that threads have taken.
        preparing: True while a thread runs ``wait_until_ready``.
        running: number of threads that run a move of the job, or prepare it.
        started: time at which the first thread began; 0 before.
        error: the first error of a thread.
    """

    task: Task
    wait_until_ready: Callable[[], None] | None
    moves: Sequence[Move]
    taken: int = 0
    preparing: bool = False
    running: int = 0
    started: float = 0.0
    error: BaseException | None = None

    @property
    def has_more(self) -> bool:
        return self.taken < len(self.moves)

    def take(self) -> Move:
        self.taken += 1
        return self.moves[self.taken - 1]


class _State:
    """The state shared by the threads. They hold no reference to the pool, so that they end with it."""

    def __init__(self, link: Link, limit: int) -> None:
        self.changed = threading.Condition()
        self.link = link
        self.queue: deque[_Job] = deque()  # jobs with moves that no thread has taken
        self.unfinished: dict[int, _Job] = {}  # by the id of the task, also while it runs
        self.limit = limit  # threads that may run moves at the same time
        self.active = 0  # threads that run moves now
        self.closed = False  # no further move starts
        self.trace: Trace | None = None

    def close(self) -> None:
        """Start no further move."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def run_jobs(self, enter: Callable[[], None]) -> None:
        """Run moves of the first job in the queue until the pool is closed; this is the body of every thread."""
        enter()
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.closed or self._has_work())
                if self.closed:
                    return
                job = self.queue[0]
                work = self._take_work(job)
            try:
                work()
            except BaseException as error:
                job.error = job.error or error
            with self.changed:
                self._note_work_done(job)
            del job, work  # a waiting thread keeps nothing alive

    def _has_work(self) -> bool:
        return bool(self.queue) and not self.queue[0].preparing and self.active < self.limit

    def _take_work(self, job: _Job) -> Callable[[], None]:
        """Return the next piece of work on the first job of the queue: the wait until it may run, and after that its next move."""
        job.running += 1
        job.started = job.started or time.perf_counter()
        if job.wait_until_ready is not None:
            wait, job.wait_until_ready = job.wait_until_ready, None
            job.preparing = True  # so that all other threads wait for this one (`_has_work`)
            return wait
        move = job.take()
        if not job.has_more:
            self.queue.popleft()
        self.active += 1
        return partial(move.run, self.link)

    def _note_work_done(self, job: _Job) -> None:
        """Record that a thread has run one move of a job, or has waited until the job was ready. After the last move, finish its task."""
        job.running -= 1
        # No move runs while a thread is preparing, so the flag is about this thread.
        was_preparing, job.preparing = job.preparing, False
        if not was_preparing:
            self.active -= 1
        if job.error is not None:
            # Its other moves are not run. `HostPool.wait` raises the error.
            job.taken = len(job.moves)
            if job in self.queue:
                self.queue.remove(job)
        elif not job.has_more and not job.running:
            job.task.finish()
            del self.unfinished[id(job.task)]
            if self.trace is not None:
                self.trace.add(job.task.op, job.started, time.perf_counter())
        elif not was_preparing and not self.closed:
            return  # no thread waits for this: busy threads take the next move anyway
        self.changed.notify_all()


class HostPool:
    """A pool of threads that run the moves of tasks in order.

    Args:
        num_threads: active threads while the device is idle.
        num_while_computing: active threads while the device computes; at least one.
        link: the link on which moves run.
        enter: called by each thread when it starts; holds no reference to the device.
    """

    def __init__(
        self, num_threads: int, num_while_computing: int, link: Link, enter: Callable[[], None] = lambda: None
    ) -> None:
        self.num_threads, self.num_while_computing = num_threads, max(1, min(num_while_computing, num_threads))
        self._state = state = _State(link, num_threads)
        weakref.finalize(self, state.close).atexit = False
        # One additional thread, because one may be waiting for a task to be ready that depends on an urgent task of this pool.
        for number in range(num_threads + 1):
            start_thread(f"horizon-host-{number}", state.run_jobs, (enter,), state.close)

    def submit(
        self, task: Task, wait_until_ready: Callable[[], None] | None = None, trace: Trace | None = None,
        urgent: bool = False,
    ) -> None:  # fmt: skip
        """Run a task's moves after those of earlier tasks, once ``wait_until_ready`` has returned. An urgent task goes first."""
        assert task.moves is not None
        if not task.moves:
            task.finish()
            return
        job = _Job(task, wait_until_ready, task.moves)
        state = self._state
        with state.changed:
            state.trace = trace
            if urgent:
                state.queue.appendleft(job)
            else:
                state.queue.append(job)
            state.unfinished[id(task)] = job
            state.changed.notify_all()

    def share_cores(self, computing: bool) -> None:
        """Share the cores with the device's computation, or use all of them again."""
        state = self._state
        state.limit = self.num_while_computing if computing else self.num_threads
        if not computing and state.queue:
            with state.changed:
                state.changed.notify_all()

    @property
    def link(self) -> Link:
        """The link on which moves run."""
        return self._state.link

    def stop(self) -> None:
        """Start no further move, and block until those that run are finished. Threads that wait for a task are not awaited."""
        state = self._state
        state.close()
        with state.changed:
            state.changed.wait_for(lambda: state.active == 0)

    def wait(self, tasks: Sequence[Task] | None = None) -> None:
        """Block until these tasks (None: all) are finished, as far as they were submitted. Raise the error of a failed task, once.

        Raises:
            StreamingError: a task is unfinished and will stay so, because the pool was stopped.
        """
        state = self._state
        with state.changed:
            while True:
                jobs = list(state.unfinished.values())
                if tasks is not None:
                    jobs = [job for job in jobs if any(job.task is task for task in tasks)]
                failed = next((job for job in jobs if job.error is not None and not job.running), None)
                if failed is not None and failed.error is not None:
                    # `Task.drop` would also clear `task.waits`. After a device fault they show whether an update lacks matrices of the
                    # device (`PendingUpdates.need_device`); if it lacks none, its other moves are run in new threads.
                    failed.task.error, failed.task.dropped = failed.error, True
                    del state.unfinished[id(failed.task)]
                    raise failed.error
                if not jobs:
                    return
                if state.closed and not state.active:
                    raise StreamingError(f"{jobs[0].task.op} will not run: the threads for updates have been stopped")
                state.changed.wait()


def complete_updates(updates: Sequence[Task], pool: HostPool, others: Sequence[HostPool] = ()) -> None:
    """Stop all pools, then run the rest of these updates in a new pool, one after the other.

    Pieces that have run are skipped (`optim.update_tasks.Pieces`). The given tasks stay unfinished (`Device.give_up`).
    """
    for each in (pool, *others):
        each.stop()
    fresh = HostPool(pool.num_threads, pool.num_threads, pool.link)
    for update in updates:
        # Without its waits, which are for tasks of a device that has failed: the moves need host memory only.
        fresh.submit(Task(update.op, [], update.moves))
        fresh.wait()
