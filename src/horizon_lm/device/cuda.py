"""An NVIDIA device: three streams, events where the schedule has a wait, host memory registered in place.

Copies touch only buffers that this object allocated, so nothing here needs ``record_stream``. Computation is the
caller's current stream. One host thread issues everything in schedule order, so an event has always been recorded
before something waits for it.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from horizon_lm.device.base import Counters, Task, check_capacity
from horizon_lm.device.cores import usable_cores
from horizon_lm.device.host_link import HostLink
from horizon_lm.device.moves import Squares
from horizon_lm.device.pool import HostPool
from horizon_lm.errors import ConfigError
from horizon_lm.schedule.ops import Kind, Stream
from horizon_lm.schedule.trace import Trace
from horizon_lm.store.arena import Arena

_REGISTER_PIECE = 64 * 2**30  # one registration of 512 GiB or more fails on recent drivers (LMCache#5177)
_BUSY_THREADS = 3  # main, autograd's, and the driver's for copies
_SQUARE_PIECE = 1 << 24  # elements squared at once on the device


class CudaDevice:
    """See the module's description.

    Args:
        name: ``cuda`` or ``cuda:N``.
        capacity: bytes that the engine's buffers may take together; None for no limit of ours.
        host_threads: threads for updates; None for the usable cores less those that main, autograd and copies need.
    """

    def __init__(self, name: str = "cuda", capacity: int | None = None, host_threads: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(f"device is {name!r}, but torch finds no CUDA device; use device='cpu'")
        index = torch.device(name).index
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        if self.torch_device.index >= torch.cuda.device_count():
            raise ConfigError(f"device is {name!r}, but there are only {torch.cuda.device_count()} CUDA devices")
        self.name = name
        self.counters = Counters()
        self.capacity = capacity
        self.link = CudaLink(self.torch_device)
        self.trace: Trace | None = None
        self._host_threads = host_threads
        self._pool: HostPool | None = None
        self._registered: list[torch.Tensor] = []
        self._streams = {s: torch.cuda.Stream(self.torch_device) for s in (Stream.COPY_IN, Stream.COPY_OUT)}

    def allocate(self, numel: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
        num_bytes = numel * dtype.itemsize
        check_capacity(self.capacity, self.counters, num_bytes, kind, self.name)
        buffer = torch.empty(numel, dtype=dtype, device=self.torch_device)
        self.counters.add(kind, num_bytes)
        return buffer

    def free(self, buffer: torch.Tensor, kind: str) -> None:
        self.counters.add(kind, -buffer.numel() * buffer.element_size())

    def poison(self, buffer: torch.Tensor) -> None:
        pass

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        buffer = Arena(num_bytes).take(num_bytes, torch.uint8)
        self.register_host([buffer])
        return buffer

    def register_host(self, buffers: Sequence[torch.Tensor]) -> None:
        """Page-lock slabs in place. What cannot be locked is staged by the driver instead: slower, not wrong."""
        for buffer in buffers:
            raw = buffer.view(torch.uint8)
            for start in range(0, raw.numel(), _REGISTER_PIECE):
                piece = raw[start : start + _REGISTER_PIECE]
                if int(torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0)) != 0:
                    self._clear_error()
                    return
                self._registered.append(piece)  # the memory must outlive its registration

    def _clear_error(self) -> None:
        """A failed registration leaves an error behind that the next kernel launch would report as its own."""
        with suppress(RuntimeError):
            torch.zeros(1, device=self.torch_device)

    def __del__(self) -> None:
        for piece in getattr(self, "_registered", ()):
            torch.cuda.cudart().cudaHostUnregister(piece.data_ptr())

    def announce(self, tasks: Sequence[Task]) -> None:
        pass

    def issue(self, task: Task) -> None:
        assert task.moves is not None, f"{task.op} was issued before its moves were known"
        task.issued = True
        if task.op.stream == Stream.HOST:
            waits = task.waits
            self._host_pool().submit(task, lambda: self.wait(waits), self.trace)
            return
        if task.op.kind == Kind.UPDATE_ROWS:  # host work on the copy-in stream: what the next copy takes
            self.wait(task.waits)
            self._host_pool().submit(task, trace=self.trace, urgent=True)
            self._host_pool().wait([task])
            return
        stream = self._streams[task.op.stream]
        self._wait_on(stream, task)
        with torch.cuda.stream(stream):
            for move in task.moves:
                move.run(self.link)
                self.counters.moved[f"{task.op.kind}:{task.op.unit}"] += move.host_bytes
        task.event = torch.cuda.Event(blocking=True)
        task.event.record(stream)

    def _host_pool(self) -> HostPool:
        if self._pool is None:
            threads = self._host_threads or max(1, usable_cores() - _BUSY_THREADS)
            self._pool = HostPool(threads, threads, self.link)
        return self._pool

    def begin(self, task: Task) -> None:
        self._wait_on(torch.cuda.current_stream(self.torch_device), task)

    def end(self, task: Task) -> None:
        task.event = torch.cuda.Event(blocking=True)
        task.event.record(torch.cuda.current_stream(self.torch_device))

    def wait(self, tasks: Sequence[Task]) -> None:
        host = [task for task in tasks if task.op.stream == Stream.HOST and not task.done]
        if host and self._pool is not None:
            self._pool.wait(host)
        for task in tasks:
            if task.event is not None:
                task.event.synchronize()
                task.done = True

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        if self._pool is not None:
            self._pool.wait()

    def cancel(self, tasks: Sequence[Task]) -> None:
        for stream in self._streams.values():
            stream.synchronize()
        for task in tasks:
            task.done = True

    def rng_state(self) -> Any:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.torch_device)

    def set_rng_state(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1], self.torch_device)

    def seeded_rng_state(self, seed: int) -> Any:
        device = torch.Generator(self.torch_device).manual_seed(seed)
        return torch.Generator().manual_seed(seed).get_state(), device.get_state()

    def _wait_on(self, stream: torch.cuda.Stream, task: Task) -> None:
        # An update has no event: what needs its result is not enqueued before it is done.
        self.wait([other for other in task.waits if other.op.stream == Stream.HOST])
        for other in task.waits:
            if other.event is not None:
                stream.wait_event(other.event)
        task.waits = []  # they are in the stream now; keeping them would keep every earlier task alive


class CudaLink:
    """Transfers on the current stream. Types are converted on the device, whole in its own dtype over the link."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if source.device == destination.device or source.dtype == destination.dtype:
            # Onto the host the caller goes on only when it has waited for the task.
            destination.copy_(source, non_blocking=True)
        elif destination.device.type == "cuda":
            destination.copy_(source.to(destination.device, non_blocking=True))
        else:
            destination.copy_(source.to(destination.dtype), non_blocking=True)

    def land(self, destination: torch.Tensor, source: torch.Tensor, add: bool) -> Squares:
        """Rounded, added and squared on the device; the result is read there when somebody asks for it."""
        kept = source.to(destination.dtype)
        if add:
            present = destination.to(self._device, non_blocking=True)
            kept = present.float().add_(source).to(destination.dtype)
        destination.copy_(kept, non_blocking=True)
        squares = torch.zeros((), dtype=torch.float64, device=self._device)
        for piece in kept.split(_SQUARE_PIECE):
            squares += piece.float().square_().sum(dtype=torch.float64)
        return squares

    def land_rows(self, table: torch.Tensor, source: torch.Tensor, rows: torch.Tensor, add: bool) -> Squares:
        """Through host memory, and the host waits for it: rows of a table have no single address to copy to."""
        return HostLink().land_rows(table, source.to("cpu"), rows, add)
