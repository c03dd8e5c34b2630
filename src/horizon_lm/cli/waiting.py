"""Say what a command does that shows nothing for some seconds."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_SECONDS = 3.0  # of silence
_ERASE = "\r\x1b[K"  # the line of a terminal


@contextmanager
def announced(text: str) -> Iterator[None]:
    """Context manager: show a text on the terminal while the block lasts, once it has taken some seconds. Nothing goes to a log."""
    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield
        return

    def show() -> None:
        stream.write(text)
        stream.flush()
        shown.set()

    shown, timer = threading.Event(), threading.Timer(_SECONDS, show)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # it may be writing
        if shown.is_set():
            stream.write(_ERASE)
            stream.flush()
