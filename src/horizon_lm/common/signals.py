"""Interrupt a command once. Further signals are ignored while it ends."""

import os
import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGXCPU)
"""Signals that ask a run to end: of a terminal, of the system, of a batch system before its limit, of a limit on CPU time."""

_command_pid = 0  # the process of the command, whose children have its handlers
_arrived_name = ""  # the name of the signal that has interrupted the command


def interrupt_on_stop_signals() -> None:
    """Install `interrupt_once` as the handler of all `STOP_SIGNALS`, except for signals that are ignored or have another handler."""
    global _command_pid
    _command_pid = os.getpid()
    for each in STOP_SIGNALS:
        if signal.getsignal(each) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(each, interrupt_once)


def interrupt_once(number: int, frame: FrameType | None) -> None:
    """Handle a signal: remember its name, ignore all further signals that ask for an end, and raise KeyboardInterrupt. A forked child, which
    has inherited this handler, ends by the signal itself.
    """
    global _arrived_name
    if os.getpid() != _command_pid:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        return
    ignore_stop_signals()
    _arrived_name = signal.Signals(number).name
    raise KeyboardInterrupt


def arrived_signal() -> str:
    """Return the name of the signal that has interrupted the command; empty if there was none."""
    return _arrived_name


def ignore_stop_signals() -> None:
    """Ignore all signals that ask for an end, because this process is ending."""
    for each in STOP_SIGNALS:
        signal.signal(each, signal.SIG_IGN)
