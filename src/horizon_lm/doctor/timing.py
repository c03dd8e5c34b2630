"""How long a piece of work takes: the median of several rounds."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Work = Callable[[], Any]

_PATIENCE = 4.0  # work that takes so many times longer than it is worth is timed once


@dataclass(frozen=True, slots=True)
class Rounds:
    """How much time a figure is worth.

    Attributes:
        seconds: rounds are repeated for about so long.
        at_least: so many of them are timed even if they take longer.
        quick: small sizes, for tests: figures that show that everything runs, and no more.
    """

    seconds: float = 0.7
    at_least: int = 3
    quick: bool = False

    def median(self, work: Work, device: torch.device | None = None, prepare: Work | None = None) -> float:
        """Median seconds of ``work``.

        Args:
            work: done once before it is timed, so that compiling and the first touch of memory are not counted.
            device: whose enqueued work is waited for.
            prepare: done before each round, and not timed.
        """
        first = _seconds(work, device, prepare)
        at_least = self.at_least if first < _PATIENCE * self.seconds else 1
        times: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(times) < at_least or time.perf_counter() < end:
            times.append(_seconds(work, device, prepare))
        return statistics.median(times)

    def too_long(self, seconds: float) -> bool:
        """Work of so many seconds is not worth it."""
        return seconds > _PATIENCE * self.seconds


def _seconds(work: Work, device: torch.device | None, prepare: Work | None) -> float:
    if prepare is not None:
        prepare()
    _synchronize(device)
    start = time.perf_counter()
    work()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
