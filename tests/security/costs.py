"""Measure what reading a file costs, in a forked process that the kernel limits."""

import json
import os
import resource
import signal
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from horizon_lm.errors import HorizonError

MAX_SECONDS, MAX_BYTES = 10, 500 * 10**6  # of CPU, and of memory above that of the process, before a file is rejected
_SPARE_BYTES = 4 * 2**30  # of address space, so that no input can take the memory of the machine


@dataclass(frozen=True, slots=True)
class Cost:
    """The seconds of CPU and the bytes that a call took, and how it ended.

    Attributes:
        kind: ``HorizonError``, the name of another exception, ``killed``, or an empty text.
        message: the message of the exception.
    """

    seconds: float
    bytes: int
    kind: str
    message: str

    @property
    def problem(self) -> str:
        """Return what is wrong with this cost; an empty text if nothing is."""
        if self.kind not in ("", "HorizonError"):
            return f"{self.kind}: {self.message}"
        if self.seconds > MAX_SECONDS or self.bytes > MAX_BYTES:
            return f"{self.seconds:.1f} s and {self.bytes / 1e6:.0f} MB: {self.message or 'accepted'}"
        return ""


def cost_of(call: Callable[[], object]) -> Cost:
    """Return what a call costs in a fork of this process, with the processes that it starts."""
    readable, writable = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of threads; those of this process hold no lock that is needed
        child = os.fork()
    if child == 0:
        try:
            os.close(readable)
            os.write(writable, json.dumps(_measure(call)).encode())
        finally:
            os._exit(0)
    os.close(writable)
    with os.fdopen(readable, "rb") as stream:
        answer = stream.read()
    _, status, usage = os.wait4(child, 0)
    seconds = usage.ru_utime + usage.ru_stime
    if not answer:
        return Cost(
            seconds, 0, "killed", f"by {signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else status}"
        )
    peak, kind, message = json.loads(answer)
    return Cost(seconds, peak, kind, message)


def _measure(call: Callable[[], object]) -> tuple[int, str, str]:
    """Call, and return the bytes that it took, and the kind and message of its exception."""
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    before = _status("VmRSS")
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_SECONDS + 5, MAX_SECONDS + 5))
    resource.setrlimit(resource.RLIMIT_AS, (_status("VmSize") + _SPARE_BYTES,) * 2)
    kind = message = ""
    try:
        call()
    except HorizonError as error:
        kind, message = "HorizonError", str(error)
    except BaseException as error:
        kind, message = type(error).__name__, str(error)
    return max(0, _status("VmHWM") - before), kind, message[:2000]


def _status(name: str) -> int:
    """Return a number of bytes from ``/proc/self/status``."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))
