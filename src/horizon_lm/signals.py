"""Interrupt a command once. Further signals are ignored while it ends."""

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
"""Signals that ask a run to end: of a terminal, of the system, of a batch system before its limit, of a limit on CPU time."""


def interrupt_once(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt, and ignore all further signals that ask for an end: the handler of SIGINT in a command."""
    ignore_stop_signals()
    raise KeyboardInterrupt


def ignore_stop_signals() -> None:
    """Ignore all signals that ask for an end, because this process is ending."""
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
