"""Streams, events and copies of a stand-in for CUDA whose work waits to be run, in any order that several streams may take."""

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from horizon_lm.device import cuda_link

Order = Callable[[list["Stream"]], list["Stream"]]


class Streams:
    """Streams whose work waits to be run, in an order that a test chooses.

    Attributes:
        log: what was run: the stream, what it did, and the number of this kind of work.
    """

    def __init__(self) -> None:
        self.all: list[Stream] = []
        self.current = Stream(self)
        self.log: list[tuple[str, int]] = []
        self._counts: Counter[str] = Counter()
        self._copies: set[Callable[[], bool]] = set()

    def enqueue(self, kind: str, work: Callable[[], Any]) -> None:
        number = self._counts[kind]
        self._counts[kind] += 1

        def run() -> bool:
            work()
            self.log.append((kind, number))
            return True

        self.current.work.append(run)
        if kind == "copy":
            self._copies.add(run)

    def copy_times(self) -> int:
        """Run everything, and return the time that it takes if streams copy at once and nothing but copies takes time."""
        times = 0
        while True:
            while any(
                self._advance(stream) for stream in self.all if stream.work and stream.work[0] not in self._copies
            ):
                pass
            copying = [stream for stream in self.all if stream.work and stream.work[0] in self._copies]
            if not copying:
                return times
            times += 1
            for stream in copying:
                self._advance(stream)

    @staticmethod
    def _advance(stream: "Stream") -> bool:
        """Run the first work of a stream, and return whether it could go on."""
        ran = stream.work[0]()
        if ran:
            stream.work.popleft()
        return ran

    def run(self, choose: Order) -> None:
        """Run everything; of the streams that can go on, always the first in a chosen order."""
        while any(stream.work for stream in self.all):
            for stream in choose(list(self.all)):
                if stream.work and self._advance(stream):
                    break
            else:
                raise AssertionError("streams wait for each other")

    @contextmanager
    def on(self, stream: "Stream") -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before


class Stream:
    def __init__(self, streams: Streams) -> None:
        self.work: deque[Callable[[], bool]] = deque()
        streams.all.append(self)

    def wait_event(self, event: "Event") -> None:
        target = event.recorded
        self.work.append(lambda: event.reached >= target)


class Event:
    """An event that may be recorded again; who waits, waits for the last recording before."""

    def __init__(self, streams: Streams) -> None:
        self.streams, self.recorded, self.reached = streams, 0, 0

    def record(self) -> None:
        self.recorded += 1
        number = self.recorded

        def reach() -> bool:
            self.reached = number
            return True

        self.streams.current.work.append(reach)


class Transport:
    """Copies of page-locked memory."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        self.streams.enqueue("copy", lambda: destination.copy_(source))
        return destination


def replace_cuda(monkeypatch: pytest.MonkeyPatch) -> Streams:
    """Make links use streams that a test runs; return these."""
    streams = Streams()
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream(streams))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.on)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: nullcontext())
    monkeypatch.setattr(cuda_link, "HostTransport", lambda *_: Transport(streams))
    return streams


def shuffled(seed: int) -> Order:
    """Return an order that is drawn anew for each piece of work."""
    generator = random.Random(seed)
    return lambda all_streams: generator.sample(all_streams, len(all_streams))


def own_first(all_streams: list[Stream]) -> list[Stream]:
    """Return the order in which the link's own stream runs as early as possible."""
    return all_streams


def beside_first(all_streams: list[Stream]) -> list[Stream]:
    """Return the order in which the stream beside the link's own runs as early as possible."""
    return all_streams[::-1]


def lose_waits(monkeypatch: pytest.MonkeyPatch, streams: Streams, own: bool) -> None:
    """Drop the waits of the link's own stream, or of the one beside it."""
    wait = Stream.wait_event
    monkeypatch.setattr(
        Stream, "wait_event", lambda self, event: None if (self is streams.all[0]) == own else wait(self, event)
    )
