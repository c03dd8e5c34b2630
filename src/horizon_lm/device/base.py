"""The interface between the engine and a device: tasks, counters, and the `Device`."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from horizon_lm.common.quantities import format_bytes
from horizon_lm.common.streaming_options import SMALLER_BATCHES
from horizon_lm.device.transfers import Link, Move
from horizon_lm.errors import DeviceMemoryError
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.schedule.ops import Op
from horizon_lm.schedule.trace import Trace


@dataclass(eq=False, slots=True)
class Task:
    """An operation of a pass, as given to a device. The cursor sets its moves, and the device alone the rest of its state.

    Attributes:
        waits: tasks that must be done first, as the schedule declares. A task that is done forgets them, or every task would keep all
            earlier tasks alive.
        moves: transfers or host work, unless the task computes; None until they are known (for example the rows of a
            batch).
        issued: True once the task was given to the device.
        finished: True once the device knows that the task has run to its end.
        dropped: True once the device knows that the task will not run to its end, because it was cancelled or has failed.
        error: an exception from a thread of the device. Every wait for a copy raises it until the copy is cancelled; for an
            update, the first wait does.
    """

    op: Op
    waits: Sequence["Task"]
    moves: Sequence[Move] | None = None
    issued: bool = False
    finished: bool = False
    dropped: bool = False
    error: BaseException | None = None

    @property
    def done(self) -> bool:
        """True once there is nothing left to wait for: the task has finished, or was dropped."""
        return self.finished or self.dropped

    def finish(self) -> None:
        """Mark the task as finished."""
        self.finished, self.waits = True, ()

    def drop(self) -> None:
        """Mark the task as dropped."""
        self.dropped, self.waits = True, ()


@dataclass
class Counters:
    """Number of bytes allocated on the device and moved over the link, by kind."""

    allocated: Counter[str] = field(default_factory=Counter)
    allocated_peak: int = 0
    moved: Counter[str] = field(default_factory=Counter)

    @property
    def allocated_total(self) -> int:
        return sum(self.allocated.values())

    def add(self, kind: str, num_bytes: int) -> None:
        self.allocated[kind] += num_bytes
        self.allocated_peak = max(self.allocated_peak, self.allocated_total)


class Meter(Protocol):
    """A meter of device memory: the bytes in use, relative to its start."""

    @property
    def current(self) -> int: ...

    @property
    def peak(self) -> int: ...


class Device(ABC):
    """The streams, memory and randomness of one accelerator, and threads for updates in host memory.

    Computation runs on the caller's current stream between `begin` and `end` of its task; every other task is given to
    `issue` in schedule order, in which the copy of the next block stands before the computation of this one: this is the prefetch.
    A device may run a task as soon as its waits allow and its moves are known; the simulated one does so from `announce` on, and so
    tests that the waits suffice.

    Args:
        torch_device: the device of the buffers.
        capacity: limit on the bytes of all buffers; None for no limit.

    Attributes:
        name: its name, for messages.
        link: its transfers.
        counters: the bytes of its buffers, and of what was moved.
        trace: records every operation while it is set; no copy may be running when it is set.
        scratch_bytes: the device memory that transfers and libraries take once streams are open, in addition to the engine's
            buffers.
    """

    name: str
    link: Link
    trace: Trace | None
    scratch_bytes = 0

    def __init__(self, torch_device: torch.device, capacity: int | None) -> None:
        self.torch_device, self.capacity = torch_device, capacity
        self.counters = Counters()

    def allocate(self, numel: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
        """Allocate a counted 1-D buffer. Raise DeviceMemoryError if it exceeds the capacity."""
        num_bytes, counters = numel * dtype.itemsize, self.counters
        if self.capacity is not None and counters.allocated_total + num_bytes > self.capacity:
            in_use = ", ".join(f"{k} {format_bytes(v)}" for k, v in counters.allocated.items() if v)
            raise DeviceMemoryError(
                f"{self.name}: {format_bytes(num_bytes)} for {kind} do not fit into the device capacity of "
                f"{format_bytes(self.capacity)}; in use: {in_use or 'nothing'}. Raise device_memory, or {SMALLER_BATCHES}."
            )
        buffer = torch.empty(numel, dtype=dtype, device=self.torch_device)
        counters.add(kind, num_bytes)
        self.poison(buffer)
        return buffer

    def free(self, buffer: torch.Tensor, kind: str) -> None:
        """Free a buffer that is no longer used."""
        self.counters.add(kind, -buffer.numel() * buffer.element_size())

    def used_bytes(self) -> int:
        """Return the known bytes of device memory in use: at least the engine's buffers."""
        return self.counters.allocated_total

    def poison(self, buffer: torch.Tensor) -> None:
        """Mark the contents of a buffer as invalid; a test device fills it with NaN, so that reads are noticed."""
        return

    def trim(self) -> None:
        """Return unused memory to the driver before allocations of other sizes."""
        return

    @abstractmethod
    def spare_bytes(self) -> int | None:
        """Return the unused bytes of device memory, or None if the device has no separate memory."""

    @abstractmethod
    def meter(self) -> AbstractContextManager[Meter] | None:
        """Return a context manager that measures the device memory of computations, or None if the device cannot measure it."""

    @abstractmethod
    def open_streams(self) -> None:
        """Open the streams and allocate the memory for transfers, before the first step."""

    def prepare_decoding(self, codec: Codec, shape: Sequence[int], dtype: torch.dtype, rounded: torch.dtype) -> None:
        """Compile the code that decodes a quantized tensor, so that no step waits for a compiler.

        Args:
            codec: its format.
            shape: its shape.
            dtype: dtype of its values on the device.
            rounded: dtype that values are rounded to first.
        """
        return

    @abstractmethod
    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Allocate a 1-D uint8 buffer of exactly this size in host memory, for copies at full speed."""

    @abstractmethod
    def free_host(self, buffer: torch.Tensor) -> None:
        """Free a buffer from `host_buffer`, viewed as any dtype, that is no longer used."""

    @abstractmethod
    def register_host(self, buffers: Sequence[torch.Tensor]) -> None:
        """Prepare existing host memory in place for copies at full speed."""

    def announce(self, tasks: Sequence[Task]) -> None:
        """Begin a pass that consists of these tasks, in this order."""
        return

    @abstractmethod
    def issue(self, task: Task) -> None:
        """Run a task other than computation once its waits have finished, unless it has run since `announce`."""

    @abstractmethod
    def begin(self, task: Task) -> None:
        """Make the compute stream wait for the dependencies of a task, before its computation is enqueued."""

    @abstractmethod
    def end(self, task: Task) -> None:
        """Record that the computation of a task has been enqueued."""

    @abstractmethod
    def wait(self, tasks: Sequence[Task]) -> None:
        """Block the host until these tasks are done. Raise the error of one that has failed (`Task.error`)."""

    @abstractmethod
    def synchronize(self) -> None:
        """Block the host until all issued work is done. Raise the error of an update that has failed."""

    @abstractmethod
    def is_finished(self, task: Task) -> bool:
        """Return whether a task is known to have run to its end, or was dropped. Any thread may ask, and nothing waits."""

    @abstractmethod
    def cancel(self, tasks: Sequence[Task]) -> None:
        """Drop tasks that have not started, and wait for those that have."""

    @abstractmethod
    def give_up(self, updates: Sequence[Task]) -> None:
        """Run these updates to their end in host threads, and start nothing else from now on.

        For hardware that has failed: it is not touched, and no thread waits for it. Their moves need host memory only, and
        those that have run are skipped. Every later wait for an unfinished task raises StreamingError.
        """

    @abstractmethod
    def rng_state(self) -> Any:
        """Return the random state of the host and of the device."""

    @abstractmethod
    def set_rng_state(self, state: Any) -> None:
        """Set what `rng_state` has returned."""

    @abstractmethod
    def seeded_rng_state(self, seed: int) -> Any:
        """Return the random state that ``torch.manual_seed(seed)`` would set, without changing the current state."""

    @contextmanager
    def rng_state_restored(self, start: Any = None) -> Iterator[None]:
        """Context manager: draw random numbers from the state ``start`` (None: the current one), and restore the old state at the end."""
        before = self.rng_state()
        if start is not None:
            self.set_rng_state(start)
        try:
            yield
        finally:
            self.set_rng_state(before)


def same_rng_state(a: Any, b: Any) -> bool:
    """Return whether two random states are equal: the state of the host and, on an accelerator, that of the device."""
    return all(map(same_rng_state, a, b)) if isinstance(a, tuple) else torch.equal(a, b)


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small tensor to a device, through page-locked memory so that the host does not wait for the device."""
    if tensor.device.type != "cpu" or device.type != "cuda":
        return tensor.to(device)
    with torch.cuda.device(device):  # torch page-locks memory through the current device
        return tensor.pin_memory().to(device, non_blocking=True)
