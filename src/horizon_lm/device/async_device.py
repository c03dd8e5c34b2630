"""A device with asynchronous streams: the threads that enqueue tasks, and the events that order them.

The caller enqueues computation on its own current stream. Each copy stream has an *issuer*, a thread that enqueues its
tasks in schedule order; this is what prefetches the next blocks while the current one computes. An issuer may block, on
an update in host memory or on a staging buffer, while the caller goes on. Waiting for an event that is not recorded yet
would have no effect, so before a stream is made to wait for a task, the host waits until that task is enqueued. So a late
update holds up the caller, too, once it reaches the computation behind the copy that waits for the update, and so does the
gathering of the embedding's rows on the host. For the end of a copy the caller waits in three places: where memory could not be
page-locked, since a task is enqueued only once the issuer has filled or emptied the staging buffers; where a batch needs a
larger buffer than all before; and between the backward pass and the update, since `optimizer.step` returns after all gradients
have landed.

"The caller" is the thread of the model's forward method and, in a backward pass, the one in which autograd runs the nodes.

Streams and events are behind abstract methods, so that tests can emulate them with threads.
"""

import queue
import threading
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from horizon_lm.common.resources import usable_cores
from horizon_lm.device.base import Device, Task
from horizon_lm.device.cpu import HostLink
from horizon_lm.device.host_threads import DISK_THREADS, HOST_STREAMS, HostPool, complete_updates, start_thread
from horizon_lm.device.task_states import Event, TaskStates
from horizon_lm.device.transfers import Link
from horizon_lm.schedule.ops import Kind, Op, Stream
from horizon_lm.schedule.trace import Trace

_BUSY_THREADS = 4  # the caller, the two issuers, and the driver's copy thread


@dataclass(frozen=True, slots=True)
class _OpEvents:
    """Timing events of one operation: when its stream reached it, when it began after its waits, and when it ended."""

    op: Op
    reached: Event | None
    began: Event | None
    ended: Event


class StreamDevice(Device):
    """A device whose two copy streams run asynchronously; subclasses define streams and events.

    Args:
        name: the name that the user gave.
        torch_device: the device of the buffers.
        capacity: limit on the bytes of the engine's buffers; None for no additional limit.
        host_threads: threads for updates; None for the usable cores except those needed for other threads.
    """

    def __init__(
        self, name: str, torch_device: torch.device, capacity: int | None = None, host_threads: int | None = None
    ) -> None:
        super().__init__(torch_device, capacity)
        self.name = name
        self.link: Link = HostLink()  # for the host threads; each copy stream has a separate link
        self._trace: Trace | None = None
        self._host_threads = host_threads or max(1, usable_cores() - _BUSY_THREADS)
        self._pools: dict[Stream, HostPool] = {}
        self._issuers: dict[Stream, _Issuer] = {}
        self._opening = threading.Lock()  # of pools
        self._tasks = TaskStates()
        self.broken_streams: dict[Stream, BaseException] = {}  # streams that could not be made to wait for an event
        self._timed: list[_OpEvents] = []
        # Of the running computation: when the compute stream reached it, and when it began.
        self._compute_began: tuple[Event | None, Event] | None = None

    @property
    def trace(self) -> Trace | None:
        """The trace that records every operation, or None. Setting one waits until the compute stream is idle; copy streams must be."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        if trace is not None:
            self._start_clock()
        self._trace = trace

    # Memory

    def allocate(self, numel: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
        buffer = super().allocate(numel, dtype, kind)
        # Computation that is still running may have used this memory before: no copy may write to it until that has finished.
        event = self._record(None)
        for issuer in self._opened_issuers().values():
            issuer.put(event)
        return buffer

    def open_streams(self) -> None:
        self._opened_issuers()

    # Tasks

    def issue(self, task: Task) -> None:
        assert task.moves is not None, f"{task.op} was issued before its moves were known"
        task.issued = True
        if task.op.stream in HOST_STREAMS:
            self._pool(task.op.stream).submit(task, lambda: self._await_inputs(task), self.trace)
        else:
            self._issuer(task.op.stream).put(task)

    def begin(self, task: Task) -> None:
        reached = self._record(None) if self.trace is not None else None
        self._await_dependencies(None, task)
        if self.trace is not None:
            self._compute_began = (reached, self._record(None))

    def end(self, task: Task) -> None:
        event = self._record(None)
        self._tasks.enqueued(task, event)
        if self.trace is not None and self._compute_began is not None:
            self._timed.append(_OpEvents(task.op, *self._compute_began, event))
            self._compute_began = None

    def wait(self, tasks: Sequence[Task]) -> None:
        # Host tasks have no event: they are done once their pool has run them.
        on_host = [task for task in tasks if task.op.stream in HOST_STREAMS and not task.done]
        if on_host:
            for pool in list(self._pools.values()):
                pool.wait(on_host)
        for task in tasks:
            end = self._tasks.end_of(task)
            if end is not None:
                end.synchronize()
                self._tasks.finish(task)

    def synchronize(self) -> None:
        self._drain_streams()
        for pool in list(self._pools.values()):
            pool.wait()

    def is_finished(self, task: Task) -> bool:
        return self._tasks.is_finished(task)

    def cancel(self, tasks: Sequence[Task]) -> None:
        # Issued tasks run to their end: other ranks have launched the same collectives, or are about to, and would otherwise join those
        # of this rank's next pass.
        if Stream.COLLECTIVE in self._issuers:
            tasks = [task for task in tasks if not task.issued]
        self._tasks.drop(tasks)
        self._drain_streams()
        self._tasks.drop_failed()
        self.broken_streams.clear()

    def give_up(self, updates: Sequence[Task]) -> None:
        # Copies that wait for an update get an error instead, so that none lands in memory that an update still reads.
        complete_updates(updates, self._pool(Stream.HOST), [self._pool(Stream.DISK)])

    def _drain_streams(self) -> None:
        """Wait until nothing runs on the streams of the device, and record the times of what has run. Host threads may go on."""
        for issuer in self._issuers.values():
            issuer.wait_until_idle()
        self._synchronize_streams()
        for stream in Stream:
            self._tasks.finish_reached(stream)
        if self.trace is not None:
            timed, self._timed = self._timed, []
            for each in timed:
                start, end = self._seconds(each.began), self._seconds(each.ended)
                self.trace.add(each.op, start, end, self._seconds(each.reached))

    # Enqueuing in order

    def enqueue(self, stream: Any, link: Link, task: Task) -> None:
        """Enqueue a task in its stream; called by the stream's issuer. An exception is kept and raised in `wait`.

        Later tasks of the stream fail with the same exception until the pass is cancelled, because waiting for a task
        implies waiting for everything before it.
        """
        try:
            if task.dropped:
                return
            self._raise_if_failed(task.op.stream)
            if task.op.kind == Kind.UPDATE_ROWS:  # host work in this stream, whose next copy reads these rows
                self._update_rows(task)
                return
            reached = self._record(stream) if self.trace is not None else None
            self._await_dependencies(stream, task)
            began = self._record(stream) if self.trace is not None else None
            if task.dropped:  # while this thread waited for its dependencies
                return
            assert task.moves is not None
            with self._use_stream(stream):
                for move in task.moves:
                    move.run(link)
                    self.counters.moved[f"{task.op.kind}:{task.op.unit}"] += move.host_bytes
                link.finish()
            event = self._record(stream)
            self._tasks.enqueued(task, event)
            if self.trace is not None:
                self._timed.append(_OpEvents(task.op, reached, began, event))
        except BaseException as error:
            self._tasks.fail(task, error)

    def _update_rows(self, task: Task) -> None:
        """Run the update of rows in host threads, and wait for it: the next copy of the stream reads these rows."""
        self.wait(task.waits)
        pool = self._pool(Stream.HOST)
        pool.submit(task, trace=self.trace, urgent=True)  # before updates that are not needed yet
        pool.wait([task])
        self._tasks.finish(task)

    def _raise_if_failed(self, stream: Stream) -> None:
        """Raise the error of an earlier task of a stream, or of an event that the stream could not be made to wait for."""
        if error := self._tasks.error_of(stream) or self.broken_streams.get(stream):
            raise error

    def _await_dependencies(self, stream: Any, task: Task) -> None:
        """Make a stream (None: the caller's) wait for the dependencies of a task. Block until host tasks among them are done, and the other
        dependencies are enqueued.
        """
        waits = task.waits  # read once: another thread may forget them when the task is dropped
        self.wait([other for other in waits if other.op.stream in HOST_STREAMS])
        for other in waits:
            end = self._tasks.end_of(other)
            if end is not None:
                self._wait_event(stream, end)

    def _await_inputs(self, task: Task) -> None:
        """Block until the dependencies of a host task are done. Raise the error of a failed one, also if it was dropped since and `wait`
        raises nothing: the gradients or matrices that it should have copied to the host are missing.
        """
        waits = task.waits  # read once: another thread may forget them when the task is dropped
        self.wait(waits)
        for other in waits:
            if other.error is not None:
                raise other.error

    def _pool(self, stream: Stream) -> HostPool:
        """Return the threads of a host stream, started when first needed."""
        with self._opening:
            if stream not in self._pools:
                num_threads = self._host_threads if stream == Stream.HOST else DISK_THREADS
                # The number is the same while the device computes: caller and issuers have cores of their own (`_BUSY_THREADS`).
                self._pools[stream] = HostPool(num_threads, num_threads, self.link, self._enter_thread)
            return self._pools[stream]

    def _opened_issuers(self) -> "dict[Stream, _Issuer]":
        """Return all issuers. The first call opens the two copy streams and starts their issuers."""
        if not self._issuers:
            self._issuers = {s: _Issuer(self, s, *self._open_stream(s)) for s in (Stream.COPY_IN, Stream.COPY_OUT)}
        return self._issuers

    def _issuer(self, stream: Stream) -> "_Issuer":
        """Return the issuer of a stream. That of collectives is opened here, because one rank alone never needs it."""
        issuers = self._opened_issuers()
        if stream not in issuers:
            issuers[stream] = _Issuer(self, stream, *self._open_stream(stream))
        return issuers[stream]

    # Streams and events

    @property
    def _enter_thread(self) -> Callable[[], None]:
        """The function that each thread of the device calls when it starts. It holds no reference to the device."""
        return lambda: None

    @abstractmethod
    def _open_stream(self, name: Stream) -> tuple[Any, Link]:
        """Open a stream, and the link that transfers data on that stream."""

    @abstractmethod
    def _use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Context manager: make a stream the current one of this thread."""

    @abstractmethod
    def _record(self, stream: Any) -> Event:
        """Record an event at the current end of a stream (None: the caller's current stream)."""

    @abstractmethod
    def _wait_event(self, stream: Any, event: Any) -> None:
        """Make everything enqueued from now on wait for an event."""

    @abstractmethod
    def _synchronize_streams(self) -> None:
        """Block the host until all streams are idle."""

    @abstractmethod
    def _start_clock(self) -> None:
        """Relate the device's clock to ``time.perf_counter`` before a trace begins."""

    @abstractmethod
    def _seconds(self, event: Any) -> float:
        """Return the time at which an event of a traced step was reached, on the clock of ``time.perf_counter``."""


class _Issuer:
    """The thread that enqueues the tasks of one copy stream. While idle, it holds no reference to the device."""

    def __init__(self, device: StreamDevice, stream: Stream, handle: Any, link: Link) -> None:
        self._stream = stream
        self._queue: queue.SimpleQueue[Task | Event | None] = queue.SimpleQueue()
        self._finished = threading.Condition()
        self._unfinished = 0  # items that were put and are not handled yet
        end = partial(self._queue.put, None)  # ends the thread (`_run`)
        # Not at the interpreter's exit, where `start_thread` ends all threads in order.
        weakref.finalize(device, end).atexit = False
        args = (weakref.ref(device), handle, link, device._enter_thread)
        start_thread(f"horizon-{stream}", self._run, args, stop=end)

    def put(self, item: Task | Event) -> None:
        """Enqueue a task, or make all later tasks wait for an event."""
        with self._finished:
            self._unfinished += 1
        self._queue.put(item)

    def wait_until_idle(self) -> None:
        """Block until all items that were put are handled."""
        with self._finished:
            self._finished.wait_for(lambda: self._unfinished == 0)

    def _run(self, device_ref: "weakref.ref[StreamDevice]", stream: Any, link: Link, enter: Callable[[], None]) -> None:
        """Enqueue tasks, or waits for events, in the order of the queue, until the queue ends or the device is gone.

        Args:
            device_ref: the device.
            stream, link: where tasks are enqueued.
            enter: prepares this thread for the device.
        """
        enter()
        while (item := self._queue.get()) is not None:
            device = device_ref()
            if device is None:
                return
            try:
                if isinstance(item, Task):
                    device.enqueue(stream, link, item)
                else:
                    device._wait_event(stream, item)
            except BaseException as error:  # of `_wait_event`: `enqueue` keeps errors in the task
                device.broken_streams[self._stream] = error
            finally:
                del device, item  # a waiting thread keeps nothing alive
                with self._finished:
                    self._unfinished -= 1
                    self._finished.notify_all()
