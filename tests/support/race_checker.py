"""The streams of ``torch.cuda`` without a GPU, and a check that what they do to shared memory is in order.

Everything runs at once. Each stream counts its operations and knows which operations of others it has waited for, as in a vector
clock; the thread that enqueues is one of them. A race is an access to memory that another stream has written, or a write to memory
that another stream has used, without having waited for that.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[str, int]


class CheckedStream:
    def __init__(self, checker: "RaceChecker", name: str) -> None:
        self.name, self.clock = name, {name: 0}
        self._checker = checker

    def learn(self, clock: Clock) -> None:
        """Take over what another stream knew when this one has waited for it."""
        self.clock = {name: max(self.clock.get(name, 0), clock.get(name, 0)) for name in self.clock | clock}

    def wait_stream(self, other: "CheckedStream") -> None:
        if self._checker.obeys("wait_stream"):
            self.learn(other.clock)


class CheckedEvent:
    """An event of the current stream. Until it is recorded, waiting for it does nothing."""

    def __init__(self, checker: "RaceChecker") -> None:
        self._checker = checker
        self._clock: Clock = {}

    def record(self) -> None:
        self._clock = dict(self._checker.current.clock)

    def wait(self) -> None:
        if self._checker.obeys("wait"):
            self._checker.current.learn(self._clock)


class RaceChecker(TorchDispatchMode):
    """Replaces ``torch.cuda`` in code that uses streams; operations are checked while it is active.

    Args:
        ignored: a wait that is left out: its name, and the name of the function that calls it.

    Attributes:
        races: descriptions of all races.
        num_copies: number of operations in streams other than the one of computation.
    """

    def __init__(self, ignored: tuple[str, str] | None = None) -> None:
        super().__init__()
        self._ignored, self._num_streams = ignored, 0
        self._host, self._compute = CheckedStream(self, "host"), CheckedStream(self, "compute")
        self._streams = [self._host, self._compute]
        self.current = self._compute
        self._of_host: set[int] = set()
        self._written: dict[int, tuple[str, int]] = {}  # by address: the last write
        self._read: dict[int, Clock] = {}  # by address: the last read by each stream since then
        self.races: list[str] = []
        self.num_copies = 0

    def share(self, host: Iterable[torch.Tensor], device: Iterable[torch.Tensor]) -> None:
        """Check accesses to these tensors, which are never freed. Streams of copies may use no others."""
        self._of_host = {_address(tensor) for tensor in host}
        self._read = {address: {} for address in (*self._of_host, *map(_address, device))}

    def obeys(self, name: str) -> bool:
        return (name, sys._getframe(2).f_code.co_name) != self._ignored

    # The part of torch.cuda that code with streams calls

    def Stream(self) -> CheckedStream:  # noqa: N802
        stream = CheckedStream(self, f"stream {len(self._streams)}")
        self._streams.append(stream)
        return stream

    def Event(self) -> CheckedEvent:  # noqa: N802
        return CheckedEvent(self)

    def current_stream(self) -> CheckedStream:
        return self.current

    @contextmanager
    def stream(self, stream: CheckedStream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self) -> None:
        if self.obeys("synchronize"):
            for stream in self._streams:
                self._host.learn(stream.clock)

    # The check

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self._check(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _check(self, func: Any, args: Any, kwargs: dict[str, Any]) -> None:
        accesses: dict[int, bool] = {}  # whether it is a write, by address
        for argument, value in zip(func._schema.arguments, args, strict=False):
            self._note(accesses, argument, value)
        for argument in func._schema.arguments:
            if argument.name in kwargs:
                self._note(accesses, argument, kwargs[argument.name])
        shared = {address: writes for address, writes in accesses.items() if address in self._read}
        stream = self.current
        if stream is self._compute:  # outside of streams of copies, operations on host memory are the thread's own
            stream = self._host if shared.keys() & self._of_host else self._compute
        else:
            self.num_copies += 1
            if shared.keys() != accesses.keys():
                self.races.append(f"{func} in {stream.name} uses memory that may be freed before it has run")
        if stream is not self._host:
            stream.learn(self._host.clock)  # the thread enqueues what it does after what it has done
        stream.clock = stream.clock | {stream.name: stream.clock[stream.name] + 1}
        for address, writes in shared.items():
            self._access(stream, address, writes, str(func))

    def _note(self, accesses: dict[int, bool], argument: Any, value: Any) -> None:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        for leaf in tree_leaves(value):
            if isinstance(leaf, torch.Tensor):
                accesses[_address(leaf)] = accesses.get(_address(leaf), False) or writes

    def _access(self, stream: CheckedStream, address: int, writes: bool, name: str) -> None:
        before = [self._written[address]] if address in self._written else []
        if writes:
            before += self._read[address].items()
        for other, number in before:
            if stream.clock.get(other, 0) < number:
                self.races.append(f"{name} in {stream.name} did not wait for {other}")
        if writes:
            self._written[address], self._read[address] = (stream.name, stream.clock[stream.name]), {}
        else:
            self._read[address][stream.name] = stream.clock[stream.name]


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
