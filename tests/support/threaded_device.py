"""Threads that replace an accelerator's streams, to test `StreamDevice` with real concurrency on a CPU."""

import contextlib
import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from horizon_lm.device.async_device import StreamDevice
from horizon_lm.device.cpu import CpuDevice, HostLink
from horizon_lm.device.transfers import Link
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.schedule.ops import Stream
from tests.support.tensor_memory import StorageMeter

_current = threading.local()


class _Event:
    """An event that a stream sets when it reaches it."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.seconds = 0.0

    def set(self) -> None:
        self.seconds = time.perf_counter()
        self.reached.set()

    def query(self) -> bool:
        return self.reached.is_set()

    def synchronize(self) -> None:
        self.reached.wait()


class _Stream:
    """A thread that runs enqueued functions in order."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        weakref.finalize(self, self.queue.put, None)
        threading.Thread(target=_run, args=(self.queue,), daemon=True).start()


def _run(work: "queue.SimpleQueue[Callable[[], Any] | None]") -> None:
    while (item := work.get()) is not None:
        item()
        del item


class _PendingNumber:
    """A number that is known once its task has finished."""

    def __init__(self) -> None:
        self.value = float("nan")

    def __float__(self) -> float:
        return float(self.value)


class ThreadedLink:
    """A slow link that enqueues transfers in pieces with pauses between them, so that copies straddle computations."""

    def __init__(self, pause: Callable[[], None], pieces: int) -> None:
        self._host, self._pause, self._pieces = HostLink(), pause, pieces
        self._scratch = torch.empty(16)  # represents the memory of a real link, which its thread keeps until it ends

    def __del__(self) -> None:
        time.sleep(0.05)  # end late, so that tests that count memory must wait for the thread

    def _enqueue(self, function: Callable[[], Any]) -> None:
        _current.stream.queue.put(self._pause)
        _current.stream.queue.put(function)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        for d, s in zip(destination.tensor_split(self._pieces), source.tensor_split(self._pieces), strict=True):
            self._enqueue(lambda d=d, s=s: self._host.copy(d, s))

    def decode(self, destination: torch.Tensor, packed: torch.Tensor, codec: Codec, dtype: torch.dtype) -> None:
        self._enqueue(lambda: self._host.decode(destination, packed, codec, dtype))

    def gather(self, destination: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> None:
        self._enqueue(lambda: self._host.gather(destination, table, rows))

    def call(self, function: Callable[[], None]) -> None:
        self._enqueue(function)

    def finish(self) -> None:
        return

    def land(self, destination: torch.Tensor, source: torch.Tensor, add: bool) -> _PendingNumber:
        result = _PendingNumber()
        self._enqueue(lambda: setattr(result, "value", self._host.land(destination, source, add)))
        return result

    def land_rows(self, table: torch.Tensor, source: torch.Tensor, rows: torch.Tensor, add: bool) -> _PendingNumber:
        result = _PendingNumber()
        self._enqueue(lambda: setattr(result, "value", self._host.land_rows(table, source, rows, add)))
        return result


class ThreadedDevice(StreamDevice):
    """A device that computes immediately in the caller's thread, and copies in threads after random delays.

    Args:
        seed: the seed of the delays.
        delay: the maximum pause before a piece of a copy, in seconds.
        slow: streams that pause; None for all.
        pieces: the number of pieces of a copy.
        spare: the return value of `spare_bytes`.
        measures: True if `meter` is supported.
    """

    def __init__(
        self, seed: int = 0, delay: float = 1e-3, slow: Sequence[Stream] | None = None, pieces: int = 3,
        capacity: int | None = None, spare: int | None = None, measures: bool = False,
    ) -> None:  # fmt: skip
        super().__init__("threaded", torch.device("cpu"), capacity, host_threads=2)
        self.spare, self.measures = spare, measures
        self._random, self._delay, self._pieces = random.Random(seed), delay, pieces
        self._slow = slow if slow is not None else list(Stream)
        self._streams: dict[Stream, _Stream] = {}
        self.links: weakref.WeakValueDictionary[Stream, ThreadedLink] = weakref.WeakValueDictionary()

    def spare_bytes(self) -> int | None:
        return self.spare

    def meter(self) -> Any:
        return StorageMeter() if self.measures else None

    def poison(self, buffer: torch.Tensor) -> None:
        buffer.view(torch.uint8).fill_(0xFF)  # NaN

    # Buffers are in host memory, as on a `CpuDevice`.
    host_buffer, free_host, register_host = CpuDevice.host_buffer, CpuDevice.free_host, CpuDevice.register_host
    rng_state, set_rng_state, seeded_rng_state = (
        CpuDevice.rng_state,
        CpuDevice.set_rng_state,
        CpuDevice.seeded_rng_state,
    )

    def _open_stream(self, name: Stream) -> tuple[_Stream, Link]:
        slow = name in self._slow
        draw, longest = self._random, self._delay
        pause = (lambda: time.sleep(longest * draw.random())) if slow else (lambda: None)
        link = ThreadedLink(pause, self._pieces)
        self.links[name] = link
        self._streams[name] = _Stream()
        return self._streams[name], link

    def hold(self, name: Stream) -> threading.Event:
        """Let an open stream do nothing more until the returned event is set."""
        gate = threading.Event()
        self._streams[name].queue.put(gate.wait)
        return gate

    @contextlib.contextmanager
    def _use_stream(self, stream: _Stream) -> Any:
        _current.stream = stream
        yield
        _current.stream = None

    def _record(self, stream: _Stream | None) -> _Event:
        event = _Event()
        if stream is None:
            event.set()
        else:
            stream.queue.put(event.set)
        return event

    def _wait_event(self, stream: _Stream | None, event: _Event) -> None:
        if stream is None:
            event.synchronize()
        else:
            stream.queue.put(event.synchronize)

    def _synchronize_streams(self) -> None:
        for event in [self._record(stream) for stream in self._streams.values()]:
            event.synchronize()

    def _start_clock(self) -> None:
        return  # events use the host's clock

    def _seconds(self, event: _Event) -> float:
        return event.seconds
