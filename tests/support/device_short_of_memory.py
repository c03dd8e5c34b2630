"""A simulated device on which some computations run out of memory."""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch

from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.schedule.ops import Kind

Computation = tuple[Kind, str]  # of a unit


class ShortDevice(SimulatedDevice):
    """A simulated device with the capacity of SimulatedDevice, and further failures.

    Args:
        failures: computations that fail with torch's error, once each, in this order.
        options: as for SimulatedDevice.
    """

    def __init__(self, failures: Iterable[Computation] = (), **options: Any) -> None:
        super().__init__(**options)
        self.failures = deque(failures)

    def end(self, task: Any) -> None:
        if self.failures and self.failures[0] == (task.op.kind, task.op.unit):
            self.failures.popleft()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        super().end(task)
