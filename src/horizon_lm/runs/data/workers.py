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
_POOL_SIGNALS = (signal.SIGTERM,)  # how a pool ends its workers
_SECONDS_UNTIL_END = 5.0  # seconds between a signal from elsewhere and the end of a worker whose parent does not end it
_forking_thread: tuple[int, int] | None = None  # the process and the thread that start workers now
_libc = ctypes.CDLL(None)


@contextmanager
def ending_with_us() -> Iterator[None]:
    """Context manager: every process that is forked in it becomes a worker (`_become_worker`). On an error, the child processes that were
    started in it are killed.
    """
    global _forking_thread
    outer, earlier = _forking_thread, psutil.Process().children()
    _forking_thread = os.getpid(), threading.get_ident()
    try:
        yield
    except BaseException:
        for process in psutil.Process().children():
            if process not in earlier:
                process.kill()
        raise
    finally:
        _forking_thread = outer


def _become_worker() -> None:
    """Let a forked process end with its parent, if it was forked inside of `ending_with_us`. Called in every forked process."""
    global _forking_thread
    if _forking_thread is None:
        return
    (process, thread), _forking_thread = _forking_thread, None  # a process that a worker forks is no worker
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL if number in _POOL_SIGNALS else signal.SIG_IGN)
    # The system watches the thread that forked, not its process. A pool replaces dead workers in a thread that ends too early.
    if threading.get_ident() == thread:
        with suppress(AttributeError):  # not Linux
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != process:  # it died in between
        os._exit(1)
    if hasattr(signal, "sigwaitinfo"):  # which knows the sender of a signal; not on macOS
        signal.pthread_sigmask(signal.SIG_BLOCK, _POOL_SIGNALS)
        threading.Thread(target=_end_on_signal, args=(process,), name="horizon-end", daemon=True).start()


def _end_on_signal(parent: int) -> None:
    """Wait for a signal to end, and end this process: at once if ``parent`` sent it, or `_SECONDS_UNTIL_END` after one from elsewhere."""
    if signal.sigwaitinfo(_POOL_SIGNALS).si_pid != parent:
        signal.sigtimedwait(_POOL_SIGNALS, _SECONDS_UNTIL_END)  # two signals at the same time may arrive as one
    os._exit(1)


os.register_at_fork(after_in_child=_become_worker)
