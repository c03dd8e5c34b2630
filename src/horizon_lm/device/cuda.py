"""An NVIDIA device: CUDA streams and events, host memory registered in place, conversions on the device.

Copies touch only buffers that this object or the engine allocated for good, so nothing here needs ``record_stream``.
"""

import os
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from horizon_lm.device.async_device import StreamDevice
from horizon_lm.device.base import Meter
from horizon_lm.device.cpu import HostLink
from horizon_lm.device.page_locks import PageLocks
from horizon_lm.device.transfers import Link, SquaredNorm
from horizon_lm.errors import ConfigError, PageLockWarning
from horizon_lm.quantities import format_bytes
from horizon_lm.store.store import Arena

_PIECE = 1 << 24  # elements that are converted or squared at once
_STAGING_BYTES = 64 * 2**20
_ALIGNMENT = 256  # bytes, of what shares scratch space


class CudaDevice(StreamDevice):
    """See the module's description.

    Args:
        name: ``cuda`` or ``cuda:N``.
        capacity: bytes that the engine's buffers may take together; None for no limit of ours.
        host_threads: threads for updates; None for the usable cores less those that everything else needs.

    Attributes:
        registration_error: CUDA's reason when host memory could not be page-locked, so that copies of it are staged; None
            if all of it could.
        workspace_bytes: of device memory that cuBLAS keeps for the threads that compute.
    """

    link_bytes = 2 * 4 * _PIECE  # of two links, which convert and sum in pieces

    def __init__(self, name: str = "cuda", capacity: int | None = None, host_threads: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(f"device is {name!r}, but torch finds no CUDA device; use device='cpu'")
        index = torch.device(name).index
        torch_device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        if torch_device.index >= torch.cuda.device_count():
            raise ConfigError(f"device is {name!r}, but there are only {torch.cuda.device_count()} CUDA devices")
        super().__init__(name, torch_device, capacity, host_threads)
        _let_segments_expand()
        self.registration_error: str | None = None
        self._locks = PageLocks(torch_device)
        self._warned_bytes = 0
        self.workspace_bytes = 0
        weakref.finalize(self, self._locks.unlock_all).atexit = False
        self._clock: tuple[torch.cuda.Event, float] | None = None

    def spare_bytes(self) -> int | None:
        """What torch's allocator could still give out; our own limit, if that is less."""
        spare = allocatable_bytes(self.torch_device)
        own = self.capacity - self.counters.allocated_total if self.capacity is not None else None
        return spare if own is None else min(own, spare)

    @property
    def scratch_bytes(self) -> int:  # type: ignore[override]
        return self.link_bytes + self.workspace_bytes

    def used_bytes(self) -> int:
        return torch.cuda.memory_allocated(self.torch_device)

    def meter(self) -> AbstractContextManager[Meter]:
        return AllocatorMeter(self.torch_device)

    def trim(self) -> None:
        torch.cuda.empty_cache()

    # Host memory

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        buffer = Arena(num_bytes).take(num_bytes, torch.uint8)
        self.register_host([buffer])
        return buffer

    def free_host(self, buffer: torch.Tensor) -> None:
        self._locks.unlock(buffer)

    def register_host(self, buffers: Sequence[torch.Tensor]) -> None:
        """Page-lock slabs in place. Copies of what cannot be locked go through staging buffers: slower, not wrong."""
        for buffer in buffers:
            self._locks.lock(buffer)
        refused = self._locks.refused_bytes
        self.registration_error = self._locks.error
        if refused >= 2 * self._warned_bytes and refused:  # not again for each buffer
            self._warned_bytes = refused
            warnings.warn(
                f"{format_bytes(refused)} of host memory ({refused:,} bytes) could not be page-locked "
                f"({self.registration_error}): copies between it and the device go through staging buffers, which is slower. "
                "Raise the limit: ulimit -l unlimited, memlock in limits.conf, or --ulimit memlock=-1 for a container; WSL 2 "
                "allows no more than half of the machine's memory.",
                PageLockWarning,
                stacklevel=2,
            )

    def try_registering(self, num_bytes: int) -> str | None:
        """Page-lock so many bytes of host memory for a moment. Return CUDA's reason if it refuses."""
        locks = PageLocks(self.torch_device)
        locks.lock(Arena(num_bytes).take(num_bytes, torch.uint8))
        locks.unlock_all()
        return locks.error

    # Randomness

    def rng_state(self) -> Any:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.torch_device)

    def set_rng_state(self, state: Any) -> None:
        torch.set_rng_state(state[0])
        torch.cuda.set_rng_state(state[1], self.torch_device)

    def seeded_rng_state(self, seed: int) -> Any:
        device = torch.Generator(self.torch_device).manual_seed(seed)
        return torch.Generator().manual_seed(seed).get_state(), device.get_state()

    # Streams

    def _open_stream(self) -> tuple[Any, Link]:
        # Their kernels are small: they go before what is left of a large product.
        stream = torch.cuda.Stream(self.torch_device, priority=-1)
        link = CudaLink(self.torch_device, self._locks)
        self._wait_event(stream, self._record(None))  # what computes may still use what was in the link's memory before
        return stream, link

    def open_streams(self) -> None:
        super().open_streams()
        self.workspace_bytes = max(self.workspace_bytes, _make_workspaces(self.torch_device))

    def _on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def _record(self, stream: Any) -> torch.cuda.Event:
        # Threads that wait for it sleep instead of taking a core from the optimizer.
        event = torch.cuda.Event(blocking=True, enable_timing=self.trace is not None)
        event.record(stream or torch.cuda.current_stream(self.torch_device))
        return event

    def _wait_event(self, stream: Any, event: Any) -> None:
        (stream or torch.cuda.current_stream(self.torch_device)).wait_event(event)

    def _synchronize_streams(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def _start_clock(self) -> None:
        event = torch.cuda.Event(blocking=True, enable_timing=True)
        event.record(torch.cuda.current_stream(self.torch_device))
        event.synchronize()
        self._clock = event, time.perf_counter()

    def _seconds(self, event: Any) -> float:
        assert self._clock is not None
        zero, at = self._clock
        return at + zero.elapsed_time(event) * 1e-3


def allocatable_bytes(device: torch.device) -> int:
    """Device memory that torch's allocator could still give out.

    The driver's free memory, as far as the fraction of the device that this process may take allows, and what torch has from
    it and does not use.
    """
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
    return max(0, min(free, allowed)) + reserved - torch.cuda.memory_allocated(device)


def _let_segments_expand() -> None:
    """Set the allocator up to waste less of a device that is nearly full, unless the user has set it up."""
    name = next((name for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), None)
    given = os.environ[name] if name else ""
    if "expandable_segments" in given or "backend" in given:
        return
    torch._C._accelerator_setAllocatorSettings(",".join(filter(None, [given, "expandable_segments:True"])))


_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def _make_workspaces(device: torch.device) -> int:
    """Have cuBLAS allocate its workspaces and return their bytes, less those that are there already.

    Each thread that computes has one, of 32 MiB on Hopper: the caller's for forwards, autograd's for backwards.
    """
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode(False), torch.enable_grad():
        matrix = torch.ones(16, 16, device=device, requires_grad=True)
        torch.mm(matrix, matrix).sum().backward()
    del matrix
    return torch.cuda.memory_allocated(device) - before


class AllocatorMeter:
    """What torch's allocator gave out since the block began. It forgets the peak that torch knew before."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._before = device, 0

    def __enter__(self) -> "AllocatorMeter":
        torch.cuda.reset_peak_memory_stats(self._device)
        self._before = torch.cuda.memory_allocated(self._device)
        return self

    def __exit__(self, *_: Any) -> None:
        return

    @property
    def current(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._before

    @property
    def peak(self) -> int:
        return torch.cuda.max_memory_allocated(self._device) - self._before


class CudaLink:
    """Transfers on the current stream, which is always the same one. Over the link goes what the host keeps.

    Its memory is allocated at once: for a thread that enqueues copies an allocation could be a wait for the device.

    Args:
        device: whose transfers these are.
        locks: which host memory is page-locked; None for what torch has locked alone.
    """

    def __init__(self, device: torch.device, locks: PageLocks | None = None) -> None:
        self._device, self._locks = device, locks or PageLocks(device)
        self._scratch = torch.empty(4 * _PIECE, dtype=torch.uint8, device=device)
        with torch.cuda.device(device):
            self._staging = [
                (torch.empty(_STAGING_BYTES, dtype=torch.uint8, pin_memory=True), torch.cuda.Event(blocking=True))
                for _ in range(2)
            ]
        self._turn = 0
        self._host = HostLink()

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        if source.dtype == destination.dtype:
            self._transfer(destination, source)
            return
        for d, s in _pieces(destination, source, _PIECE):
            if source.device == self._device:
                self._transfer(d, self._on_device(d.dtype, s.numel()).copy_(s))
            else:
                d.copy_(self._transfer(self._on_device(s.dtype, s.numel()), s))

    def gather(self, destination: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> None:
        for d, r in zip(*_rows_pieces(destination, rows), strict=True):
            staging, event = self._stage(r.numel() * table.shape[1], table.dtype)
            gathered = staging.view(r.numel(), table.shape[1])
            torch.index_select(table, 0, r, out=gathered)
            self.copy(d.view(-1), staging)
            event.record()

    def land(self, destination: torch.Tensor, source: torch.Tensor, add: bool) -> SquaredNorm:
        """Rounded, added and squared on the device, with scratch space of one piece."""
        if not add and source.dtype == destination.dtype:
            self._transfer(destination, source)
            return _squared_norm([_norm(piece) for piece in source.split(_PIECE)])
        norms = []
        for d, s in _pieces(destination, source, _PIECE // 2):
            kept = self._on_device(d.dtype, d.numel())
            if add:
                self._transfer(kept, d)
                # Of an fp32 store it is ``kept`` itself.
                total = kept if kept.dtype == torch.float32 else self._on_device(torch.float32, d.numel(), behind=kept)
                kept.copy_(total.copy_(kept).add_(s))
            else:
                kept.copy_(s)
            self._transfer(d, kept)
            norms.append(_norm(kept))
        return _squared_norm(norms)

    def land_rows(self, table: torch.Tensor, source: torch.Tensor, rows: torch.Tensor, add: bool) -> SquaredNorm:
        """Rows of a table have no single address to copy to, so threads land them in host memory."""
        total = 0.0
        for s, r in zip(*_rows_pieces(source, rows), strict=True):
            staging, event = self._stage(s.numel(), source.dtype)
            staging.copy_(s.reshape(-1), non_blocking=True)
            event.record()
            event.synchronize()
            total += self._host.land_rows(table, staging.view(s.shape), r, add)
        return total

    def _transfer(self, destination: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Between host and device, in one dtype. What is not page-locked goes through staging buffers in pieces."""
        to_device = destination.device == self._device
        for start, stop, is_locked in self._locks.parts(source if to_device else destination):
            if is_locked:
                destination[start:stop].copy_(source[start:stop], non_blocking=True)
            else:
                self._staged(destination[start:stop], source[start:stop], to_device)
        return destination

    def _staged(self, destination: torch.Tensor, source: torch.Tensor, to_device: bool) -> None:
        for d, s in _pieces(destination, source, _STAGING_BYTES // source.element_size()):
            staging, event = self._stage(s.numel(), s.dtype)
            if to_device:
                d.copy_(staging.copy_(s), non_blocking=True)
                event.record()
            else:
                staging.copy_(s, non_blocking=True)
                event.record()
                event.synchronize()
                d.copy_(staging)

    def _stage(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.cuda.Event]:
        """A page-locked buffer that no copy uses any more, and the event to record when one does."""
        self._turn ^= 1
        buffer, event = self._staging[self._turn]
        event.synchronize()
        return buffer[: numel * dtype.itemsize].view(dtype), event

    def _on_device(self, dtype: torch.dtype, numel: int, behind: torch.Tensor | None = None) -> torch.Tensor:
        """Scratch space of this stream, whose last use lies earlier in it; ``behind``: what of it is in use."""
        start = 0 if behind is None else -(-behind.numel() * behind.element_size() // _ALIGNMENT) * _ALIGNMENT
        return self._scratch[start : start + numel * dtype.itemsize].view(dtype)


def _pieces(a: torch.Tensor, b: torch.Tensor, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(a.split(size), b.split(size), strict=True)


def _rows_pieces(values: torch.Tensor, rows: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Pieces of rows (R, H) that fit into a staging buffer in any dtype, and their indices."""
    size = max(1, min(_PIECE, _STAGING_BYTES // 4) // values.shape[1])
    return values.split(size), rows.split(size)


def _norm(piece: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(piece, dtype=torch.float32)


def _squared_norm(norms: list[torch.Tensor]) -> torch.Tensor:
    """The sum of squares on its way to a number in host memory, which is there when the landing is done."""
    host = torch.empty((), dtype=torch.float64, pin_memory=True)
    return host.copy_(torch.stack(norms).double().square().sum(), non_blocking=True)
