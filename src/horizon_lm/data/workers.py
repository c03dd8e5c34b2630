"""Processes that tokenize rows: they end with this process, and on a signal only where they hold no lock.

The processes are forked by `datasets` (`multiprocess.Pool`). They would inherit the handlers of signals, survive a killed
parent, and if a signal to the whole process group ended one while it takes a task, it would keep the lock of the pool, whose
end would then never come. So signals wait in a worker until it works on rows.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from horizon_lm.constants import STOP_SIGNALS

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_parent: tuple[int, int] | None = None  # the process and the thread that start workers now
_is_worker = False
_libc = ctypes.CDLL(None)


@contextmanager
def ending_with_us() -> Iterator[None]:
    """Context manager: make every process that is forked inside a worker. After an error the remaining ones are killed."""
    global _parent
    before, others = _parent, psutil.Process().children()
    _parent = os.getpid(), threading.get_ident()
    try:
        yield
    except BaseException:
        for process in psutil.Process().children():
            if process not in others:
                process.kill()
        raise
    finally:
        _parent = before


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Context manager and decorator: let a signal end a worker. Does nothing in other processes."""
    if not _is_worker:
        yield
        return
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)


def _become_worker() -> None:
    """Set up a forked process."""
    global _parent, _is_worker
    if _parent is None:
        return
    process, thread = _parent
    signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    # The system watches the thread that forked, not its process. A pool replaces dead workers in a thread that ends too early.
    if threading.get_ident() == thread:
        with suppress(AttributeError):  # not Linux
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != process:  # it died in between
        os._exit(1)
    _parent, _is_worker = None, True


os.register_at_fork(after_in_child=_become_worker)
