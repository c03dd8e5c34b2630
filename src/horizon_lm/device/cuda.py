"""An NVIDIA device: CUDA streams and events, device memory and its meter, and page-locking of host memory in place."""

import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch

from horizon_lm.common.quantities import counted, format_bytes
from horizon_lm.device.async_device import StreamDevice
from horizon_lm.device.base import Meter
from horizon_lm.device.cuda_link import LINK_SCRATCH_BYTES, CudaLink, DeviceLink, packed_bytes
from horizon_lm.device.page_locks import PageLocks
from horizon_lm.device.transfers import Link
from horizon_lm.errors import ConfigError, PageLockWarning, warn
from horizon_lm.memory.arena import Arena
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.memory.kernels.decoding import warm_up
from horizon_lm.schedule.ops import Stream

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


class CudaDevice(StreamDevice):
    """An NVIDIA GPU with one copy stream in each direction; computation runs on the caller's stream.

    Args:
        name: ``cuda`` or ``cuda:N``.
        capacity: limit on the bytes that torch may allocate there, while the device is in use; None for no additional limit.
        host_threads: threads for updates; None for the usable cores except those needed for other threads.

    Attributes:
        registration_error: CUDA's reason for failing to page-lock host memory, which is then copied through staging
            buffers; None if all host memory is page-locked.
        workspace_bytes: device memory that cuBLAS keeps for the computing threads.
    """

    link_bytes = 2 * LINK_SCRATCH_BYTES

    def __init__(self, name: str = "cuda", capacity: int | None = None, host_threads: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(f"device is {name!r}, but torch finds no CUDA device; use device='cpu'")
        index = torch.device(name).index
        torch_device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        if torch_device.index >= torch.cuda.device_count():
            raise ConfigError(
                f"device is {name!r}, but torch finds only {counted(torch.cuda.device_count(), 'CUDA device')}"
            )
        super().__init__(name, torch_device, capacity, host_threads)
        _let_segments_expand()
        self.registration_error: str | None = None
        self._locks = PageLocks(torch_device)
        self._warned_bytes = 0  # bytes of the last warning about memory that is not page-locked
        self.workspace_bytes = 0
        # Not at exit, since the end of the process undoes both.
        weakref.finalize(self, self._locks.unlock_all).atexit = False
        if capacity is not None:
            lift_limit = _limit_allocator(capacity, torch_device)
            weakref.finalize(self, lift_limit).atexit = False
        self._clock: tuple[torch.cuda.Event, float] | None = None  # an event, and the time at which it was reached

    # Device memory

    def spare_bytes(self) -> int | None:
        """Return the bytes that torch's allocator could still provide."""
        return allocatable_bytes(self.torch_device)

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
        """Page-lock buffers in place. Memory that CUDA cannot lock is copied through staging buffers, more slowly."""
        for buffer in buffers:
            self._locks.lock(buffer)
        failed = self._locks.failed_bytes
        self.registration_error = self._locks.error
        if failed and failed >= 2 * self._warned_bytes:  # warn each time the amount doubles, not for each buffer
            self._warned_bytes = failed
            warn(
                f"{format_bytes(failed)} of host memory ({failed:,} bytes) could not be page-locked "
                f"({self.registration_error}): its copies go through staging buffers, which is slower. "
                "Raise the limit: ulimit -l unlimited, memlock in limits.conf, or --ulimit memlock=-1 for a container. WSL 2 "
                "allows at most half of the machine's memory.",
                PageLockWarning,
            )

    def try_registering(self, num_bytes: int) -> str | None:
        """Page-lock a number of bytes and unlock them again. Return CUDA's reason if this fails."""
        locks = PageLocks(self.torch_device)
        locks.lock(Arena(num_bytes).take(num_bytes, torch.uint8))
        locks.unlock_all()
        return locks.error

    # Randomness

    def rng_state(self) -> Any:
        return torch.get_rng_state(), torch.cuda.get_rng_state(self.torch_device)

    def set_rng_state(self, state: Any) -> None:
        of_host, of_device = state
        torch.set_rng_state(of_host)
        torch.cuda.set_rng_state(of_device, self.torch_device)

    def seeded_rng_state(self, seed: int) -> Any:
        device = torch.Generator(self.torch_device).manual_seed(seed)
        return torch.Generator().manual_seed(seed).get_state(), device.get_state()

    # Streams

    def _open_stream(self, name: Stream) -> tuple[Any, Link]:
        """Return a stream of this name and its link."""
        # Copy streams launch small kernels; with high priority they run before the rest of a large matrix product.
        stream = torch.cuda.Stream(self.torch_device, priority=-1)
        # Collectives copy nothing between host and device.
        link: Link = DeviceLink() if name == Stream.COLLECTIVE else CudaLink(self.torch_device, self._locks)
        # The link's memory may have been freed by computation that is still running.
        self._wait_event(stream, self._record(None))
        return stream, link

    def open_streams(self) -> None:
        super().open_streams()
        self.workspace_bytes = max(self.workspace_bytes, _make_workspaces(self.torch_device))

    def prepare_decoding(self, codec: Codec, shape: Sequence[int], dtype: torch.dtype, rounded: torch.dtype) -> None:
        with torch.cuda.device(self.torch_device):
            warm_up(codec, shape, dtype, rounded, packed_bytes(), self.torch_device)

    @property
    def _enter_thread(self) -> Callable[[], None]:
        return partial(torch.cuda.set_device, self.torch_device)

    def _use_stream(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def _record(self, stream: Any, timed: bool = False) -> "_Event":
        event = _Event(self.torch_device, timed or self.trace is not None)
        event.cuda.record(stream or torch.cuda.current_stream(self.torch_device))
        return event

    def _wait_event(self, stream: Any, event: Any) -> None:
        (stream or torch.cuda.current_stream(self.torch_device)).wait_event(event.cuda)

    def _synchronize_streams(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def _start_clock(self) -> None:
        event = self._record(None, timed=True)
        event.synchronize()
        self._clock = event.cuda, time.perf_counter()

    def _seconds(self, event: Any) -> float:
        assert self._clock is not None
        zero, seconds_at_zero = self._clock
        return seconds_at_zero + zero.elapsed_time(event.cuda) * 1e-3


class _Event:
    """An event that any thread may wait for. Its own device is made current for that: CUDA would make a context on the thread's
    current device, which is the first GPU unless the thread has chosen another.
    """

    def __init__(self, device: torch.device, timed: bool) -> None:
        # A blocking event: a thread that waits for it sleeps, and leaves its core to the optimizer.
        self._device, self.cuda = device, torch.cuda.Event(blocking=True, enable_timing=timed)

    def query(self) -> bool:
        with torch.cuda.device(self._device):
            return self.cuda.query()

    def synchronize(self) -> None:
        with torch.cuda.device(self._device):
            self.cuda.synchronize()


def allocatable_bytes(device: torch.device) -> int:
    """Return the device memory that torch's allocator could still provide, in bytes.

    This is the free memory reported by the driver, limited to this process's fraction of the device, plus memory that
    torch has reserved but does not use.
    """
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    allowed = int(torch.cuda.get_per_process_memory_fraction(device) * total) - reserved
    return max(0, min(free, allowed)) + reserved - torch.cuda.memory_allocated(device)


def _limit_allocator(capacity: int, device: torch.device) -> Callable[[], None]:
    """Limit the bytes that torch allocates on a device. Return a function that lifts the limit again."""
    before = torch.cuda.get_per_process_memory_fraction(device)
    share = capacity / torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(before, share), device)
    return partial(torch.cuda.set_per_process_memory_fraction, before, device)


def _let_segments_expand() -> None:
    """Configure the allocator to waste less memory on a nearly full device, unless the user has configured it."""
    given = next((os.environ[name] for name in _ALLOCATOR_VARIABLES if os.environ.get(name)), "")
    if "expandable_segments" in given or "backend" in given:
        return
    torch._C._accelerator_setAllocatorSettings(
        f"{given},expandable_segments:True" if given else "expandable_segments:True"
    )


def _make_workspaces(device: torch.device) -> int:
    """Make cuBLAS allocate its workspaces now, and return the newly allocated bytes.

    Each computing thread has one (32 MiB on Hopper): the caller's thread for forward passes, autograd's for backward
    passes. Threads in lock-step multiply nothing; their units are computed by the caller's.
    """
    before = torch.cuda.memory_allocated(device)
    with torch.inference_mode(False), torch.enable_grad():
        matrix = torch.ones(16, 16, device=device, requires_grad=True)
        torch.mm(matrix, matrix).sum().backward()
    del matrix
    return torch.cuda.memory_allocated(device) - before


class AllocatorMeter:
    """A context manager that measures the memory allocated by torch's allocator. It resets torch's peak statistics."""

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
