"""Measure the median duration of several rounds of a piece of work."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Work = Callable[[], Any]

_PATIENCE = 4.0  # work that takes longer than this multiple of its budget is timed once


@dataclass(frozen=True, slots=True)
class Rounds:
    """The time budget of a benchmark.

    Attributes:
        seconds: approximate time for which rounds are repeated.
        at_least: minimum number of timed rounds, even if they take longer.
        quick: use small sizes, for tests: the figures only show that everything runs.
    """

    seconds: float = 0.7
    at_least: int = 3
    quick: bool = False

    def median(self, work: Work, device: torch.device | None = None, prepare: Work | None = None) -> float:
        """Return the median duration of ``work`` in seconds.

        Args:
            work: function to time. It runs once before the first round, so that compilation and first memory accesses
                are not timed.
            device: device to synchronize before the clock is read.
            prepare: function to run before each round, without timing it.
        """
        warm_up = _seconds(work, device, prepare)
        at_least = self.at_least if warm_up < _PATIENCE * self.seconds else 1
        times: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(times) < at_least or time.perf_counter() < end:
            times.append(_seconds(work, device, prepare))
        return statistics.median(times)

    def too_long(self, seconds: float) -> bool:
        """Return whether work of this duration far exceeds the budget."""
        return seconds > _PATIENCE * self.seconds


def _seconds(work: Work, device: torch.device | None, prepare: Work | None) -> float:
    """Return the time of one run, which begins and ends with an idle device."""
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
