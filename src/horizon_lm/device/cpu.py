"""The reference device: operations run inline in list order; only optimizer updates run in threads."""

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from horizon_lm.common.ranges import pieces
from horizon_lm.common.resources import usable_cores
from horizon_lm.device.base import Device, Task
from horizon_lm.device.host_threads import DISK_THREADS, HOST_STREAMS, HostPool, complete_updates
from horizon_lm.device.transfers import SquaredNorm
from horizon_lm.memory.arena import Arena, as_array
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.schedule.ops import Kind, Stream
from horizon_lm.schedule.trace import Trace

_PACKED_BYTES = 1 << 19  # codes and scales that one thread decodes: a millisecond of work
_LANDED_ELEMENTS = 1 << 19  # elements that one thread lands: a millisecond of work


class HostLink:
    """Transfers within host memory. Gradients are landed and squared in one pass.

    Several threads land them, because no computation runs meanwhile: a CPU does one after the other, and the rows of the
    embedding land at the end of the backward pass. Several threads decode quantized weights, too.
    """

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        destination.copy_(source)

    def _in_threads(self, work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Return the results of ``work`` on each item, in their order. When this returns or raises, no thread works on an item any more."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(usable_cores(), "horizon-host")
        begun: list[Future[Any]] = []
        try:
            begun.extend(self._threads.submit(work, item) for item in items)
            return [each.result() for each in begun]
        finally:
            wait([each for each in begun if not each.cancel()])

    def decode(self, destination: torch.Tensor, packed: torch.Tensor, codec: Codec, dtype: torch.dtype) -> None:
        from horizon_lm.memory.kernels.host_decoding import decode

        def run(part: tuple[dict[str, torch.Tensor], torch.Tensor]) -> None:
            components, place = part
            decode(codec, components, place, dtype)

        self._in_threads(run, codec.cut(packed, destination, _PACKED_BYTES))

    def gather(self, destination: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> None:
        destination.copy_(table.index_select(0, rows))

    def call(self, function: Callable[[], None]) -> None:
        function()

    def finish(self) -> None:
        return

    def land(self, destination: torch.Tensor, source: torch.Tensor, add: bool) -> SquaredNorm:
        from horizon_lm.memory.kernels.gradients import landing_kernel

        kernel = landing_kernel(dtype_name(destination), dtype_name(source), add)
        target, values = as_array(destination), as_array(source)
        return self._land_all(lambda piece: kernel(target[piece], values[piece]), len(target), _LANDED_ELEMENTS)

    def land_rows(self, table: torch.Tensor, source: torch.Tensor, rows: torch.Tensor, add: bool) -> SquaredNorm:
        from horizon_lm.memory.kernels.gradients import rows_kernel

        kernel = rows_kernel(dtype_name(table), add)
        # target (V, H), values (R, H), indices (R,)
        target, values, indices = as_array(table), as_array(source.to(table.dtype).contiguous()), rows.numpy()
        num_rows = max(1, _LANDED_ELEMENTS // table.shape[1])  # of a piece
        return self._land_all(lambda piece: kernel(target, values[piece], indices[piece]), len(indices), num_rows)

    def _land_all(self, land: Callable[[slice], float], count: int, step: int) -> SquaredNorm:
        """Land ``count`` elements or rows in several threads, and return the sum of their squares.

        Args:
            land: function that lands a range of them, and returns its sum of squares.
            count: number of elements or rows.
            step: the number that a thread lands at once.
        """
        parts = pieces(count, step)
        if len(parts) < 2:
            return land(slice(0, count))
        # Pieces are distinct and their sums are added in order, so the number of threads does not change the result.
        return sum(self._in_threads(land, parts))


def dtype_name(tensor: torch.Tensor) -> str:
    """Return the kernels' name of a tensor's dtype, ``float32`` or ``bfloat16``."""
    return str(tensor.dtype).removeprefix("torch.")


class CpuDevice(Device):
    """A device in host memory. A copy is finished when `issue` returns; updates run in threads and overlap with later
    tasks.

    Args:
        capacity: limit on the bytes of all buffers; None for no limit.
        host_threads: threads for updates; None for all usable cores. While the device computes, only the cores that torch
            leaves are used, and at least one.
    """

    name = "cpu"

    def __init__(self, capacity: int | None = None, host_threads: int | None = None) -> None:
        super().__init__(torch.device("cpu"), capacity)
        self.link = HostLink()
        self.trace: Trace | None = None
        self._host_threads = host_threads
        self._pools: dict[Stream, HostPool] = {}
        self._computation_start = 0.0  # of the running computation
        self._last_computation_end: float | None = None  # of the computation before it

    def spare_bytes(self) -> int | None:
        return None  # its memory is host memory

    def meter(self) -> None:
        return None

    def open_streams(self) -> None:
        pass

    def free(self, buffer: torch.Tensor, kind: str) -> None:
        super().free(buffer, kind)
        self.poison(buffer)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return Arena(num_bytes).take(num_bytes, torch.uint8)

    def free_host(self, buffer: torch.Tensor) -> None:
        pass

    def register_host(self, buffers: Sequence[torch.Tensor]) -> None:
        pass

    def issue(self, task: Task) -> None:
        """Run a task at once, except for work in host memory, which threads run in order; an update of rows is waited for."""
        assert task.moves is not None, f"{task.op} was issued before its moves were known"
        task.issued = True
        if task.op.stream in HOST_STREAMS:
            # Copies and computations run inline, and a pool runs its tasks in order: only tasks of the other pool may be unfinished.
            unfinished = [t for t in task.waits if not t.done and t.op.stream != task.op.stream]
            self._pool(task.op.stream).submit(task, (lambda: self.wait(unfinished)) if unfinished else None, self.trace)
            return
        self.wait(task.waits)
        if task.op.kind == Kind.UPDATE_ROWS:  # the next copy reads these rows
            self._pool(Stream.HOST).submit(task, trace=self.trace, urgent=True)
            self.wait([task])
            return
        start = time.perf_counter()
        for move in task.moves:
            move.run(self.link)
            self.counters.moved[f"{task.op.kind}:{task.op.unit}"] += move.host_bytes
        task.finish()
        self._record(task, start)

    def begin(self, task: Task) -> None:
        self.wait(task.waits)
        self._share_cores(computing=True)
        self._computation_start = time.perf_counter()

    def end(self, task: Task) -> None:
        task.finish()
        self._share_cores(computing=False)
        self._record(task, self._computation_start, self._last_computation_end)
        self._last_computation_end = time.perf_counter()

    def wait(self, tasks: Sequence[Task]) -> None:
        if pending := [task for task in tasks if not task.done]:
            for pool in list(self._pools.values()):
                pool.wait(pending)

    def synchronize(self) -> None:
        self._share_cores(computing=False)
        for pool in self._pools.values():
            pool.wait()

    def is_finished(self, task: Task) -> bool:
        return task.done

    def cancel(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            task.drop()

    def give_up(self, updates: Sequence[Task]) -> None:
        complete_updates(updates, self._pool(Stream.HOST), [self._pool(Stream.DISK)])

    def _pool(self, stream: Stream) -> HostPool:
        """Return the threads of a host stream, started when first needed."""
        if stream not in self._pools:
            num_threads = num_while_computing = DISK_THREADS
            if stream == Stream.HOST:
                num_threads = self._host_threads or usable_cores()
                num_while_computing = num_threads - torch.get_num_threads()
            self._pools[stream] = HostPool(num_threads, num_while_computing, self.link)
        return self._pools[stream]

    def _share_cores(self, *, computing: bool) -> None:
        if Stream.HOST in self._pools:
            self._pools[Stream.HOST].share_cores(computing)

    def _record(self, task: Task, start: float, reached: float | None = None) -> None:
        if self.trace is not None:
            self.trace.add(task.op, start, time.perf_counter(), reached)

    def rng_state(self) -> Any:
        return torch.get_rng_state()

    def set_rng_state(self, state: Any) -> None:
        torch.set_rng_state(state)

    def seeded_rng_state(self, seed: int) -> Any:
        return torch.Generator().manual_seed(seed).get_state()
