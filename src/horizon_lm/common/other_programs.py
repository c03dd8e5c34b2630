"""Measure the cores that other programs use, which slow down a benchmark or a run."""

import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import psutil

from horizon_lm.common.resources import usable_cores


@dataclass(frozen=True, slots=True)
class CoreUse:
    """The processor time of a process and of its machine, since their start or between two moments.

    Attributes:
        host: name of the machine.
        cores, usable: its cores, and those that this process may use.
        everybody: busy seconds of all cores.
        own: busy seconds of this process and of those that it has started.
        seconds: seconds on the clock.
    """

    host: str
    cores: int
    usable: int
    everybody: float
    own: float
    seconds: float

    @classmethod
    def now(cls) -> "CoreUse":
        """Return the times since the start of the machine and of the process."""
        times, cores = psutil.cpu_times(), os.cpu_count() or 1
        everybody = times.user + times.nice + times.system
        return cls(socket.gethostname(), cores, usable_cores(), everybody, _own_seconds(), time.perf_counter())

    def since(self, before: "CoreUse") -> "CoreUse":
        """Return the times between an earlier moment and this one."""
        return replace(
            self,
            everybody=self.everybody - before.everybody,
            own=self.own - before.own,
            seconds=self.seconds - before.seconds,
        )


def cores_of_others(processes: Sequence[CoreUse]) -> float:
    """Return the average number of cores used by other programs than these processes, each of which has measured their machine."""
    own, seconds = sum(each.own for each in processes), max(each.seconds for each in processes)
    return max(0.0, max(each.everybody for each in processes) - own) / max(seconds, 1e-9)


def missing_cores(processes: Sequence[CoreUse]) -> float:
    """Return how many of the cores that these processes of one machine may use were taken by other programs. Those are assumed
    to use first the cores that the processes may not use.
    """
    return cores_of_others(processes) + sum(each.usable for each in processes) - processes[0].cores


def _own_seconds() -> float:
    """Return the busy seconds of this process, of its children that have ended and of those that run."""
    own = os.times()
    seconds = own.user + own.system + own.children_user + own.children_system
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has ended meanwhile
            times = child.cpu_times()
            seconds += times.user + times.system
    return seconds
