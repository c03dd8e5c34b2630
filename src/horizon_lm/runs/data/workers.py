"""Processes that tokenize rows: they end with this process, and when it ends them, but not on a signal from elsewhere.

The processes are forked by `datasets` (`multiprocess.Pool`). They would inherit the handlers of signals, and survive a killed
parent. And if a signal to the whole process group ended one while it waits for a task, it would keep the lock of the pool, whose
end would then never come. So a worker listens to its parent alone, which has got the signal, too.
"""

import ctypes
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

from horizon_lm.common.signals import STOP_SIGNALS

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_END = (signal.SIGTERM,)  # how a pool ends its workers
_PATIENCE = 5.0  # seconds between a signal from elsewhere and the end of a worker whose parent does not end it
_parent: tuple[int, int] | None = None  # the process and the thread that start workers now
_libc = ctypes.CDLL(None)


@contextmanager
def ending_with_us() -> Iterator[None]:
    """Context manager: make a worker of every process that is forked in it (`_become_worker`). After an error those that remain are
    killed.
    """
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


def _become_worker() -> None:
    """Let a forked process end with its parent, if it was forked inside of `ending_with_us`. Called in every forked process."""
    global _parent
    if _parent is None:
        return
    (process, thread), _parent = _parent, None  # what a worker forks itself is none
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL if number in _END else signal.SIG_IGN)
    # The system watches the thread that forked, not its process. A pool replaces dead workers in a thread that ends too early.
    if threading.get_ident() == thread:
        with suppress(AttributeError):  # not Linux
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != process:  # it died in between
        os._exit(1)
    if hasattr(signal, "sigwaitinfo"):  # which tells the sender; not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, _END)
        threading.Thread(target=_end_with, args=(process,), name="horizon-end", daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when its parent signals so, or a while after a signal from elsewhere."""
    if signal.sigwaitinfo(_END).si_pid != parent:
        signal.sigtimedwait(_END, _PATIENCE)  # two signals at the same time may arrive as one
    os._exit(1)


os.register_at_fork(after_in_child=_become_worker)
