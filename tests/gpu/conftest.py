"""The device under test: a GPU, or with ``--device cpu`` threads that replace its streams, to try the tests
themselves.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import psutil
import pytest
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


@pytest.fixture
def accelerator(request: pytest.FixtureRequest) -> Accelerator:
    name = request.config.getoption("--device")
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device; --device cpu tries the tests themselves")
    return Accelerator(name == "cuda")


@pytest.fixture
def only_cuda(accelerator: Accelerator) -> Accelerator:
    if not accelerator.is_cuda:
        pytest.skip("this has no stand-in on a CPU")
    return accelerator


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests that compile."""
    for item in items:
        if item.get_closest_marker("gpu") and "compile" in item.name:
            item.add_marker("compiled")


@pytest.fixture
def one_plan() -> Iterator[None]:
    """Disable cuDNN attention, which may choose another plan when a block is recomputed, and so other bits."""
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)
