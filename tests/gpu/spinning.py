"""A CUDA device with late copies: a spinning kernel runs before each copy."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from horizon_lm.device.cuda import CudaDevice
from horizon_lm.schedule.ops import Stream

_CYCLES_PER_SECOND = 1.5e9  # approximate clock rate of a GPU; delays need not be exact


class SpinningDevice(CudaDevice):
    """A CUDA device that delays its copies.

    Args:
        seed: the seed of the delays.
        seconds: the maximum delay.
        slow: streams whose copies are delayed; None for both.
    """

    def __init__(self, seed: int, seconds: float, slow: Sequence[Stream] | None = None) -> None:
        super().__init__(host_threads=2)
        self._random, self._cycles = random.Random(seed), int(seconds * _CYCLES_PER_SECOND)
        self._slow = slow if slow is not None else list(Stream)
        self._late: set[Any] = set()

    def _open_stream(self, name: Stream) -> Any:
        stream, link = super()._open_stream(name)
        if name in self._slow:
            self._late.add(stream)
        return stream, link

    @contextmanager
    def _use_stream(self, stream: Any) -> Iterator[None]:
        with torch.cuda.stream(stream):
            if stream in self._late:
                torch.cuda._sleep(self._random.randrange(1, self._cycles))
            yield
