"""A device whose streams run by themselves: who enqueues what, and what has to be enqueued before.

Computation is enqueued by the caller, on the caller's current stream. Each copy stream has an *issuer*, a thread that
enqueues its tasks in schedule order. It may block, on an update in host memory or on a staging buffer, while the caller
goes on. Waiting for an event that is not recorded yet would be no wait at all, so whoever makes a stream wait for a
task first makes sure, on the host, that the task is enqueued. Nothing else blocks the caller inside a step.

What a stream and an event are is left to the abstract methods, so that threads can play the streams in tests.

"""

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from horizon_lm.device.base import Counters, Task, counted_empty
from horizon_lm.device.cpu import HostLink
from horizon_lm.device.host_threads import HostPool, start_thread
from horizon_lm.device.transfers import Link
from horizon_lm.resources import usable_cores
from horizon_lm.schedule.ops import Kind, Op, Stream
from horizon_lm.schedule.trace import Trace

_BUSY_THREADS = 4  # the caller, the two issuers, and the driver's for copies


class Event(Protocol):
    def synchronize(self) -> None:
        """Block the host until the stream has come to where the event was recorded."""
        ...


@dataclass(frozen=True, slots=True)
class _Times:
    """Events around one operation: its stream reached it, it began, it ended."""

    op: Op
    reached: Any
    began: Any
    ended: Any


class StreamDevice(ABC):
    """See the module's description.

    Args:
        name: as given by the user.
        torch_device: where buffers live.
        capacity: bytes that the engine's buffers may take together; None for no limit of ours.
        host_threads: threads for updates; None for the usable cores less those that everything else needs.
    """

    scratch_bytes = 0

    def __init__(
        self, name: str, torch_device: torch.device, capacity: int | None = None, host_threads: int | None = None
    ) -> None:
        self.name, self.torch_device, self.capacity = name, torch_device, capacity
        self.counters = Counters()
        self.link: Link = HostLink()  # of the threads; each copy stream has its own
        self._trace: Trace | None = None
        self._host_threads = host_threads or max(1, usable_cores() - _BUSY_THREADS)
        self._pool: HostPool | None = None
        self._issuers: dict[Stream, _Issuer] = {}
        self._changed = threading.Condition()
        self._failed: list[Task] = []
        self.broken: dict[Stream, BaseException] = {}  # streams that did not even take an event to wait for
        self._times: list[_Times] = []
        self._reached: tuple[Any, Any] | None = None

    @property
    def trace(self) -> Trace | None:
        """Records every operation if there is one. Beginning a trace waits for what is enqueued."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        if trace is not None:
            self._start_clock()
        self._trace = trace

    # Memory

    def allocate(self, numel: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
        buffer = counted_empty(
            numel, dtype, kind, self.torch_device, capacity=self.capacity, counters=self.counters, name=self.name
        )
        self.poison(buffer)
        # The memory may have been freed by computation that is still running: no copy may write to it before.
        event = self._record(None)
        for issuer in self._open_issuers().values():
            issuer.put(event)
        return buffer

    def used_bytes(self) -> int:
        return self.counters.allocated_total

    def trim(self) -> None:
        return

    def open_streams(self) -> None:
        self._open_issuers()

    def free(self, buffer: torch.Tensor, kind: str) -> None:
        self.counters.add(kind, -buffer.numel() * buffer.element_size())

    def poison(self, buffer: torch.Tensor) -> None:
        return

    # Tasks

    def announce(self, tasks: Sequence[Task]) -> None:
        return

    def issue(self, task: Task) -> None:
        assert task.moves is not None, f"{task.op} was issued before its moves were known"
        task.issued = True
        if task.op.stream == Stream.HOST:
            waits, task.waits = task.waits, []
            self._host_pool().submit(task, lambda: self.wait(waits), self.trace)
        else:
            self._open_issuers()[task.op.stream].put(task)

    def begin(self, task: Task) -> None:
        reached = self._record(None) if self.trace is not None else None
        self._order(None, task)
        if self.trace is not None:
            self._reached = (reached, self._record(None))

    def end(self, task: Task) -> None:
        event = self._record(None)
        self._settle(task, event)
        if self.trace is not None and self._reached is not None:
            self._times.append(_Times(task.op, *self._reached, event))
            self._reached = None

    def wait(self, tasks: Sequence[Task]) -> None:
        host = [task for task in tasks if task.op.stream == Stream.HOST and not task.done]
        if host and self._pool is not None:
            self._pool.wait(host)
        for task in tasks:
            event = self._event_of(task)
            if event is not None:
                event.synchronize()
            task.done = True

    def synchronize(self) -> None:
        self._drain_streams()
        if self._pool is not None:
            self._pool.wait()

    def cancel(self, tasks: Sequence[Task]) -> None:
        with self._changed:
            for task in tasks:
                task.done = True
            self._changed.notify_all()
        self._drain_streams()
        for task in self._failed:
            task.done = True  # of any pass: whoever waits for it from now on only wants it to be over
        self._failed.clear()
        self.broken.clear()

    def _drain_streams(self) -> None:
        for issuer in self._issuers.values():
            issuer.wait_until_idle()
        self._synchronize_streams()
        if self.trace is not None:
            times, self._times = self._times, []
            for t in times:
                self.trace.add(t.op, self._seconds(t.began), self._seconds(t.ended), self._seconds(t.reached))

    # What is enqueued, and in which order

    def enqueue(self, stream: Any, link: Link, task: Task) -> None:
        """Called by an issuer: put a task into its stream. A failure is kept for whoever waits for the task.

        What follows in the stream fails with it, until the pass is given up: a wait for it means having what came before.
        """
        try:
            if task.done:  # cancelled
                return
            for before in self._failed:
                if before.op.stream == task.op.stream and before.error is not None:
                    raise before.error
            if task.op.stream in self.broken:
                raise self.broken[task.op.stream]
            if task.op.kind == Kind.UPDATE_ROWS:  # host work in a copy stream: what the next copy takes
                self.wait(task.waits)
                self._host_pool().submit(task, trace=self.trace, urgent=True)
                self._host_pool().wait([task])
                self._settle(task, None)
                return
            reached = self._record(stream) if self.trace is not None else None
            self._order(stream, task)
            began = self._record(stream) if self.trace is not None else None
            assert task.moves is not None
            with self._on(stream):
                for move in () if task.done else task.moves:
                    move.run(link)
                    self.counters.moved[f"{task.op.kind}:{task.op.unit}"] += move.host_bytes
            event = self._record(stream)
            self._settle(task, event)
            if self.trace is not None:
                self._times.append(_Times(task.op, reached, began, event))
        except BaseException as error:
            with self._changed:
                task.error = error
                self._failed.append(task)
                self._changed.notify_all()

    def _order(self, stream: Any, task: Task) -> None:
        """Make a stream (None: the caller's) wait for what a task waits for."""
        waits, task.waits = task.waits, []  # keeping them would keep every earlier task alive
        self.wait([other for other in waits if other.op.stream == Stream.HOST])
        for other in waits:
            event = self._event_of(other)
            if event is not None:
                self._wait_event(stream, event)

    def _settle(self, task: Task, event: Any) -> None:
        """A task is enqueued up to this event, or done already."""
        with self._changed:
            task.event, task.done = event, event is None
            self._changed.notify_all()

    def _event_of(self, task: Task) -> Any:
        """The end of a task in its stream, once it is enqueued; None if it is done. Raises what it raised."""
        with self._changed:
            self._changed.wait_for(lambda: task.done or task.event is not None or task.error is not None)
            if task.error is not None and not task.done:
                task.done = True
                raise task.error
            return None if task.done else task.event

    def _host_pool(self) -> HostPool:
        with self._changed:
            if self._pool is None:
                self._pool = HostPool(self._host_threads, self._host_threads, self.link)
            return self._pool

    def _open_issuers(self) -> "dict[Stream, _Issuer]":
        if not self._issuers:
            self._issuers = {s: _Issuer(self, s, *self._open_stream()) for s in (Stream.COPY_IN, Stream.COPY_OUT)}
        return self._issuers

    # What a stream is

    @abstractmethod
    def _open_stream(self) -> tuple[Any, Link]:
        """A new copy stream and its link, which moves what it is asked to on the stream that is current."""

    @abstractmethod
    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside, the thread's current stream is this one."""

    @abstractmethod
    def _record(self, stream: Any) -> Event:
        """An event at the present end of a stream; None: the caller's current one."""

    @abstractmethod
    def _wait_event(self, stream: Any, event: Any) -> None:
        """What is enqueued from now on waits for the event."""

    @abstractmethod
    def _synchronize_streams(self) -> None:
        """Block the host until all streams are done."""

    @abstractmethod
    def _start_clock(self) -> None:
        """A trace begins: relate the device's clock to that of ``time.perf_counter``."""

    @abstractmethod
    def _seconds(self, event: Any) -> float:
        """When a finished event of a traced step happened, on the clock of ``time.perf_counter``."""


class _Issuer:
    """A thread that enqueues the tasks of one stream. It holds no reference to a device that has nothing to do."""

    def __init__(self, device: StreamDevice, stream: Stream, of_device: Any, link: Link) -> None:
        self._stream = stream
        self._queue: queue.SimpleQueue[Task | Event | None] = queue.SimpleQueue()
        self._finished = threading.Condition()
        self._unfinished = 0
        weakref.finalize(device, self._queue.put, None).atexit = False
        args = (weakref.ref(device), of_device, link)
        start_thread(f"horizon-{stream}", self._work, args, lambda: self._queue.put(None))

    def put(self, item: Task | Event) -> None:
        """Enqueue a task, or make what follows wait for an event."""
        with self._finished:
            self._unfinished += 1
        self._queue.put(item)

    def wait_until_idle(self) -> None:
        with self._finished:
            self._finished.wait_for(lambda: self._unfinished == 0)

    def _work(self, device_ref: "weakref.ref[StreamDevice]", stream: Any, link: Link) -> None:
        while (item := self._queue.get()) is not None:
            device = device_ref()
            if device is None:
                return
            try:
                if isinstance(item, Task):
                    device.enqueue(stream, link, item)
                else:
                    device._wait_event(stream, item)
            except BaseException as error:
                device.broken[self._stream] = error
            finally:
                del device, item  # while it waits, a thread keeps nothing alive
                with self._finished:
                    self._unfinished -= 1
                    self._finished.notify_all()
