"""The device under test: a GPU, or threads that replace its streams."""

import warnings
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import torch

from horizon_lm.device.cuda import AllocatorMeter, CudaDevice
from tests.gpu.spinning import SpinningDevice
from tests.support.tensor_memory import StorageMeter
from tests.support.threaded_device import ThreadedDevice


@dataclass(frozen=True)
class Accelerator:
    """The device under test, a GPU or its stand-in on the CPU."""

    is_cuda: bool

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cuda" if self.is_cuda else "cpu")

    def open(self) -> Any:
        """Open a device for one model."""
        return CudaDevice() if self.is_cuda else ThreadedDevice(1, delay=1e-4, spare=20_000_000, measures=True)

    def slowed(self, seed: int, seconds: float, streams: Any = None) -> Any:
        """Open a device whose copies are up to ``seconds`` late on some streams, or on both (None)."""
        if self.is_cuda:
            return SpinningDevice(seed, seconds, streams)
        return ThreadedDevice(seed, delay=seconds, slow=streams)

    def meter(self) -> AbstractContextManager[Any]:
        """Measure device memory independently of the engine."""
        return AllocatorMeter(self.torch_device) if self.is_cuda else StorageMeter()

    def host_bytes(self) -> int:
        """Return the resident host memory of this process."""
        return psutil.Process().memory_info().rss

    @contextmanager
    def without_synchronization(self) -> Any:
        """Context manager: raise if an operation makes the host wait for the device."""
        try:
            if self.is_cuda:
                with warnings.catch_warnings(action="ignore"):  # torch warns that this mode is incomplete
                    torch.cuda.set_sync_debug_mode("error")
            yield
        finally:
            if self.is_cuda:
                torch.cuda.set_sync_debug_mode("default")
