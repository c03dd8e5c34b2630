"""Threads of devices, which end before the interpreter does.

One that is inside torch while Python is finalized cannot take the interpreter's lock again, and its end aborts the
process.
"""

import atexit
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

_SECONDS_TO_END = 10.0  # for all; what waits for a step that was broken off would wait for ever
_running: "weakref.WeakKeyDictionary[threading.Thread, Callable[[], None]]" = weakref.WeakKeyDictionary()


def start_thread(name: str, target: Callable[..., None], args: tuple[Any, ...], stop: Callable[[], None]) -> None:
    """Start a thread for as long as a device is used.

    Args:
        name: of the thread.
        target, args: what it does; they refer to the device weakly.
        stop: makes ``target`` return soon. Called once at the interpreter's end.
    """
    thread = threading.Thread(target=target, args=args, name=name, daemon=True)
    _running[thread] = stop
    thread.start()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_running.clear)  # a child has none of these threads


@atexit.register
def _end_all() -> None:
    """In the order in which they were started: copy streams first, which may wait for updates."""
    until = time.monotonic() + _SECONDS_TO_END
    for thread, stop in list(_running.items()):
        stop()
        thread.join(max(0.0, until - time.monotonic()))
