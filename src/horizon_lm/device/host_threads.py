"""Threads for work in host memory: the optimizer's updates.

Tasks start in the order in which they are given; each is cut into pieces that several threads take. Kernels release the
interpreter's lock. While the device's computation needs cores too, only some of the threads take pieces.
"""

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from horizon_lm.device.base import Task
from horizon_lm.device.transfers import Link, Move
from horizon_lm.schedule.trace import Trace

_SECONDS_TO_END = 10.0  # for all; what waits for a step that was broken off would wait for ever
_running: "weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]]" = weakref.WeakKeyDictionary()


def start_thread(name: str, target: Callable[..., None], args: tuple[Any, ...], stop: Callable[[], None]) -> None:
    """Start a thread for as long as a device is used.

    Args:
        name: of the thread.
        target, args: what it does; they refer to the device weakly.
        stop: makes ``target`` return soon. Called once at the interpreter's end.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    _running[thread] = stop
    thread.start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # a child has none of these threads


@atexit.register
def _end_all() -> None:
    """In the order in which they were started: copy streams first, which may wait for updates."""
    until = time.monotonic() + _SECONDS_TO_END
    for thread, stop in list(_running.items()):
        stop()
        thread.join(max(0.0, until - time.monotonic()))


@dataclass(eq=False, slots=True)
class _Job:
    """A task in the queue. ``ready`` blocks until it may run; ``preparing`` while a thread is doing that."""

    task: Task
    ready: Callable[[], None] | None
    moves: Sequence[Move]
    taken: int = 0  # of the moves
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
    """What the threads share. They hold no reference to the pool, so that a forgotten pool ends them."""

    def __init__(self, link: Link, limit: int) -> None:
        self.changed = threading.Condition()
        self.link = link
        self.queue: deque[_Job] = deque()  # jobs with moves that nobody has taken
        self.unfinished: dict[int, _Job] = {}
        self.limit = limit
        self.active = 0
        self.closed = False
        self.trace: Trace | None = None

    def something_to_do(self) -> bool:
        return bool(self.queue) and not self.queue[0].preparing and self.active < self.limit


class HostPool:
    """See the module's description.

    Args:
        num_threads: threads while nothing computes.
        num_while_computing: threads that take pieces while something does; at least one.
        link: given to the moves.
    """

    def __init__(self, num_threads: int, num_while_computing: int, link: Link) -> None:
        self.num_threads, self.num_while_computing = num_threads, max(1, min(num_while_computing, num_threads))
        self._state = _State(link, num_threads)
        state = self._state
        weakref.finalize(self, _close, state).atexit = False
        # One more, because one may be waiting for a task to be ready, which an urgent one may have to come before.
        for number in range(num_threads + 1):
            start_thread(f"horizon-host-{number}", _work, (state,), lambda: _close(state))

    def submit(
        self, task: Task, ready: Callable[[], None] | None = None, trace: Trace | None = None, urgent: bool = False
    ) -> None:
        """Run the moves of ``task`` after those of earlier tasks have been taken, and after ``ready`` has returned.

        An urgent task is taken next.
        """
        assert task.moves is not None
        if not task.moves:
            task.done = True
            return
        job = _Job(task, ready, task.moves)
        state = self._state
        with state.changed:
            state.trace = trace
            (state.queue.appendleft if urgent else state.queue.append)(job)
            state.unfinished[id(task)] = job
            state.changed.notify_all()

    def computing(self, computing: bool) -> None:
        """The device's computation begins or ends; until then it shares the cores, or not."""
        state = self._state
        state.limit = self.num_while_computing if computing else self.num_threads
        if not computing and state.queue:
            with state.changed:
                state.changed.notify_all()

    def wait(self, tasks: Sequence[Task] | None = None) -> None:
        """Block until these tasks (None: all) are finished. Raises what a piece of them raised."""
        state = self._state
        with state.changed:
            while True:
                jobs = list(state.unfinished.values())
                if tasks is not None:
                    jobs = [job for job in jobs if any(job.task is task for task in tasks)]
                failed = next((job for job in jobs if job.error is not None and not job.running), None)
                if failed is not None and failed.error is not None:
                    failed.task.done = True
                    del state.unfinished[id(failed.task)]
                    raise failed.error
                if not jobs:
                    return
                state.changed.wait()


def _close(state: _State) -> None:
    with state.changed:
        state.closed = True
        state.changed.notify_all()


def _work(state: _State) -> None:
    """The life of a thread."""
    while True:
        with state.changed:
            while not state.closed and not state.something_to_do():
                state.changed.wait()
            if state.closed:
                return
            job = state.queue[0]
            prepare, job.ready = job.ready, None
            job.preparing = prepare is not None
            piece = None if job.preparing else job.take()
            if not job.has_more:
                state.queue.popleft()
            state.active += piece is not None
            job.running += 1
            job.started = job.started or time.perf_counter()
        try:
            if piece is None:
                assert prepare is not None
                prepare()
            else:
                piece.run(state.link)
        except BaseException as error:
            job.error = job.error or error
        with state.changed:
            state.active -= piece is not None
            _after(state, job)
        del job, piece, prepare  # while it waits, a thread keeps nothing alive


def _after(state: _State, job: _Job) -> None:
    """A thread is done with a piece of a job, or with waiting for it to be ready."""
    job.running -= 1
    was_preparing, job.preparing = job.preparing, False
    if job.error is not None:
        job.taken = len(job.moves)
        if job in state.queue:
            state.queue.remove(job)
    elif not job.has_more and not job.running:
        job.task.done = True
        del state.unfinished[id(job.task)]
        if state.trace is not None:
            state.trace.add(job.task.op, job.started, time.perf_counter())
    elif not was_preparing:
        return  # the others are busy with pieces, and take the next one by themselves
    state.changed.notify_all()
