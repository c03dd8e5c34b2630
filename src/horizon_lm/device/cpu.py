"""The reference device: operations run inline, in list order."""

from collections.abc import Sequence
from typing import Any

import torch

from horizon_lm.device.base import Counters, Task, check_capacity
from horizon_lm.store.arena import Arena


class CpuDevice:
    """Host memory plays the device. Streams do not exist: every task is finished when `issue` returns.

    Args:
        capacity: bytes that buffers may take together; None for no limit.
    """

    name = "cpu"

    def __init__(self, capacity: int | None = None) -> None:
        self.torch_device = torch.device("cpu")
        self.counters = Counters()
        self.capacity = capacity

    def allocate(self, numel: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
        num_bytes = numel * dtype.itemsize
        check_capacity(self.capacity, self.counters, num_bytes, kind, self.name)
        buffer = torch.empty(numel, dtype=dtype)
        self.counters.add(kind, num_bytes)
        self.poison(buffer)
        return buffer

    def free(self, buffer: torch.Tensor, kind: str) -> None:
        self.counters.add(kind, -buffer.numel() * buffer.element_size())
        self.poison(buffer)

    def poison(self, buffer: torch.Tensor) -> None:
        pass

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return Arena(num_bytes).take(num_bytes, torch.uint8)

    def register_host(self, buffers: Sequence[torch.Tensor]) -> None:
        pass

    def announce(self, tasks: Sequence[Task]) -> None:
        pass

    def issue(self, task: Task) -> None:
        assert task.moves is not None, f"{task.op} was issued before its moves were known"
        for move in task.moves:
            move.run(copy_tensor)
            self.counters.moved[f"{task.op.kind}:{task.op.unit}"] += move.host_bytes
        task.done = True

    def begin(self, task: Task) -> None:
        pass

    def end(self, task: Task) -> None:
        task.done = True

    def wait(self, tasks: Sequence[Task]) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def cancel(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            task.done = True

    def rng_state(self) -> Any:
        return torch.get_rng_state()

    def set_rng_state(self, state: Any) -> None:
        torch.set_rng_state(state)

    def seeded_rng_state(self, seed: int) -> Any:
        return torch.Generator().manual_seed(seed).get_state()


def copy_tensor(destination: torch.Tensor, source: torch.Tensor) -> None:
    destination.copy_(source)
