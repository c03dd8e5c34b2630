"""The device under test: a GPU, or with ``--device cpu`` threads that replace its streams, to try the tests
themselves.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.accelerator import Accelerator


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
