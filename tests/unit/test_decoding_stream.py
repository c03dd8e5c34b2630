"""Codes cross the link while those before are decoded, in any order that two streams may take."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from horizon_lm.codecs.base import Codec
from horizon_lm.codecs.mxfp4 import Mxfp4
from horizon_lm.device import cuda_link
from horizon_lm.device.cuda_link import CudaLink

SHAPE = torch.Size((6, 64, 32))  # six matrices, one a part
PART = Mxfp4().num_bytes((1, *SHAPE[1:]))


class Streams:
    """Streams whose work waits to be run, in an order that a test chooses.

    Attributes:
        log: what was run: the stream, what it did, and the number of this kind of work.
    """

    def __init__(self) -> None:
        self.all: list[Stream] = []
        self.current = Stream(self)
        self.log: list[tuple[str, int]] = []
        self.counts = {"copy": 0, "decode": 0}

    def enqueue(self, kind: str, work: Callable[[], Any]) -> None:
        number = self.counts[kind]
        self.counts[kind] += 1

        def run() -> bool:
            work()
            self.log.append((kind, number))
            return True

        self.current.work.append(run)

    def run(self, choose: Callable[[list["Stream"]], list["Stream"]]) -> None:
        """Run everything; of the streams that can go on, always the first in a chosen order."""
        while any(stream.work for stream in self.all):
            for stream in choose(list(self.all)):
                if stream.work and stream.work[0]():
                    stream.work.popleft()
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


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = Streams()

    def decode(codec: Codec, components: Any, out: torch.Tensor, dtype: torch.dtype) -> None:
        streams.enqueue("decode", lambda: codec.decode_part(components, out, dtype))

    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: Stream(streams))
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: Event(streams))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: streams.current)
    monkeypatch.setattr(torch.cuda, "stream", streams.on)
    monkeypatch.setattr(torch.cuda, "device", lambda *_: nullcontext())
    monkeypatch.setattr(cuda_link, "HostTransport", lambda *_: Transport(streams))
    monkeypatch.setattr(cuda_link, "decode", decode)
    monkeypatch.setattr(cuda_link, "_PACKED_BYTES", PART)
    monkeypatch.setattr(cuda_link, "_PACKED_BYTES_OF_TORCH", PART)
    monkeypatch.setattr(cuda_link, "_PIECE_ELEMENTS", 1024)
    return streams


def shuffled(seed: int) -> Callable[[list[Stream]], list[Stream]]:
    generator = random.Random(seed)
    return lambda all_streams: generator.sample(all_streams, len(all_streams))


def copies_first(all_streams: list[Stream]) -> list[Stream]:
    return all_streams


def decoding_first(all_streams: list[Stream]) -> list[Stream]:
    return all_streams[::-1]


def decode_two(streams: Streams, choose: Callable[[list[Stream]], list[Stream]]) -> bool:
    """Decode two tensors. Return whether all values are right, and were before the next operation."""
    link, codec = CudaLink(torch.device("cpu")), Mxfp4()
    packed = [torch.randint(0, 256, (codec.num_bytes(SHAPE),), dtype=torch.uint8) for _ in range(2)]
    for each in packed:
        codec.views(each, SHAPE)["scales"].fill_(127)
    got = [torch.empty(SHAPE, dtype=torch.bfloat16) for _ in packed]
    for out, codes in zip(got, packed, strict=True):
        link.decode(out, codes, codec, torch.bfloat16)
    link.finish()
    streams.enqueue("copy", lambda: None)  # of the next operation
    streams.run(choose)
    return streams.log[-1][0] == "copy" and all(
        torch.equal(out, codec.decode(codes, torch.empty(SHAPE, dtype=torch.bfloat16)))
        for out, codes in zip(got, packed, strict=True)
    )


@pytest.mark.parametrize("choose", [copies_first, decoding_first, *map(shuffled, range(8))])
def test_values_are_right_in_any_order(streams: Streams, choose: Callable[[list[Stream]], list[Stream]]) -> None:
    assert decode_two(streams, choose)


@pytest.mark.parametrize("lost", ["decoded", "arrived"])
def test_a_missing_wait_is_found(streams: Streams, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """Negative control."""
    wait = Stream.wait_event
    monkeypatch.setattr(
        Stream,
        "wait_event",
        lambda self, event: None if (self is streams.all[0]) == (lost == "decoded") else wait(self, event),
    )
    assert not decode_two(streams, copies_first if lost == "decoded" else decoding_first)


def test_the_link_copies_while_the_part_before_is_decoded(streams: Streams) -> None:
    """Also from one tensor to the next; each part has two components."""
    assert decode_two(streams, copies_first)
    at = {entry: place for place, entry in enumerate(streams.log)}
    assert all(at["copy", 2 * part + 2] < at["decode", part] for part in range(2 * SHAPE[0] - 1))
