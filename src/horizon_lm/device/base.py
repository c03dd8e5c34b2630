"""What the engine asks of a device."""

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from horizon_lm.device.transfers import Link, Move
from horizon_lm.errors import DoesNotFitError
from horizon_lm.quantities import format_bytes
from horizon_lm.schedule.ops import Op
from horizon_lm.schedule.trace import Trace


@dataclass(eq=False, slots=True)
class Task:
    """One operation of one pass, on its way through a device.

    Attributes:
        waits: tasks that must be finished first, as the schedule declares.
        moves: what to do, unless it computes; None until the engine knows (the rows of a batch, say).
        done: finished, or known never to run.
        issued: given to the device.
        event: for the device's own use.
        error: what it raised in a thread of the device, until somebody who waits for it is told.
    """

    op: Op
    waits: list["Task"]
    moves: Sequence[Move] | None = None
    done: bool = False
    issued: bool = False
    event: Any = None
    error: BaseException | None = None


@dataclass
class Counters:
    """Bytes allocated on the device and moved over the link, by kind."""

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
    """Bytes of device memory in use, over what was in use when it began."""

    @property
    def current(self) -> int: ...

    @property
    def peak(self) -> int: ...


class Device(Protocol):
    """Streams, memory and randomness of one accelerator, and threads for updates in host memory.

    Computation happens on the caller's current stream between `begin` and `end` of its task; every other task is given
    to `issue` in schedule order. A device may run issued tasks at any time that their waits allow.
    """

    name: str
    torch_device: torch.device
    counters: Counters
    trace: Trace | None  # records every operation if there is one

    @property
    def link(self) -> Link: ...

    @property
    def scratch_bytes(self) -> int:
        """Device memory that transfers and libraries take once streams are open, besides what the engine asks for."""
        ...

    def allocate(self, numel: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
        """A counted 1-D buffer. DoesNotFitError when the capacity is exceeded."""
        ...

    def spare_bytes(self) -> int | None:
        """Device memory that is not in use; None where it is not limited for itself."""
        ...

    def used_bytes(self) -> int:
        """Device memory in use now, as far as the device can tell: the engine's buffers at least."""
        ...

    def meter(self) -> AbstractContextManager[Meter] | None:
        """Follows the device memory that computations take inside; None where a device cannot tell."""
        ...

    def trim(self) -> None:
        """Give memory that is not in use back to the driver, for what comes next has other sizes."""
        ...

    def open_streams(self) -> None:
        """Make streams, and the memory that transfers need, so that no step has to."""
        ...

    def free(self, buffer: torch.Tensor, kind: str) -> None:
        """Give a buffer back. Everything that uses it must be finished."""
        ...

    def poison(self, buffer: torch.Tensor) -> None:
        """Told that the contents are dead; a device for tests makes sure that nobody reads them."""
        ...

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """Host bytes that copies can reach at full speed (uint8, 1-D, exact size)."""
        ...

    def free_host(self, buffer: torch.Tensor) -> None:
        """Give up a host buffer of `host_buffer`, in any dtype. Everything that uses it must be finished."""
        ...

    def register_host(self, buffers: Sequence[torch.Tensor]) -> None:
        """Make existing host memory reachable at full speed, in place."""
        ...

    def announce(self, tasks: Sequence[Task]) -> None:
        """A pass begins with these tasks, in this order."""
        ...

    def issue(self, task: Task) -> None:
        """Run a task that does not compute, once its waits are over."""
        ...

    def begin(self, task: Task) -> None:
        """Make the compute stream wait for what ``task`` waits for."""
        ...

    def end(self, task: Task) -> None:
        """The computation of ``task`` has been enqueued."""
        ...

    def wait(self, tasks: Sequence[Task]) -> None:
        """Block the host until these tasks are finished."""
        ...

    def synchronize(self) -> None:
        """Block the host until everything is finished."""
        ...

    def cancel(self, tasks: Sequence[Task]) -> None:
        """Drop tasks that have not started; wait for those that have."""
        ...

    def rng_state(self) -> Any:
        """Random state of the host and of the device."""
        ...

    def set_rng_state(self, state: Any) -> None: ...

    def seeded_rng_state(self, seed: int) -> Any:
        """The state that ``torch.manual_seed(seed)`` would give, without touching the current one."""
        ...


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A small tensor on the device. From page-locked memory, or the host might wait for what the device is doing."""
    if tensor.device.type != "cpu" or device.type != "cuda":
        return tensor.to(device)
    with torch.cuda.device(device):  # memory is page-locked through the device that is current
        return tensor.pin_memory().to(device, non_blocking=True)


def counted_empty(
    numel: int,
    dtype: torch.dtype,
    kind: str,
    device: torch.device,
    *,
    capacity: int | None,
    counters: Counters,
    name: str,
) -> torch.Tensor:
    """A new buffer, or DoesNotFitError when the device's capacity would be exceeded."""
    num_bytes = numel * dtype.itemsize
    if capacity is not None and counters.allocated_total + num_bytes > capacity:
        held = ", ".join(f"{k} {format_bytes(v)}" for k, v in counters.allocated.items() if v)
        raise DoesNotFitError(
            f"{name}: {format_bytes(num_bytes)} for {kind} do not fit into the device capacity of "
            f"{format_bytes(capacity)}; held: {held or 'nothing'}. Raise device_memory, or lower "
            "device_micro_batch_size or per_device_train_batch_size."
        )
    buffer = torch.empty(numel, dtype=dtype, device=device)
    counters.add(kind, num_bytes)
    return buffer
