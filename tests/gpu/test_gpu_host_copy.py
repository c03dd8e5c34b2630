"""Values that are read while the device computes what was queued after them."""

import pytest
import torch

from horizon_lm.device.host_copy import HostCopy
from tests.gpu.accelerator import Accelerator

pytestmark = pytest.mark.gpu

LATER = int(0.5 * 1.5e9)  # cycles of about half a second


def test_values_are_those_of_the_time_of_the_copy(accelerator: Accelerator) -> None:
    values = torch.arange(3.0, device=accelerator.torch_device, requires_grad=True) * 2
    copy = HostCopy(values)
    assert copy.read().tolist() == [0, 2, 4]
    assert copy.read().device.type == "cpu"
    assert not copy.read().requires_grad


def test_reading_does_not_wait_for_what_is_queued_later(only_cuda: Accelerator) -> None:
    values = torch.ones(3, device=only_cuda.torch_device) * 2
    with only_cuda.without_synchronization():
        copy = HostCopy(values)
        torch.cuda._sleep(LATER)
        later = torch.cuda.Event()
        later.record()
    assert copy.read().tolist() == [2, 2, 2]
    assert not later.query()
