"""Say what a command does that shows nothing for some seconds."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SECONDS = 3.0  # of silence
_ERASE = "\r\x1b[K"  # the line of a terminal


def _ignore(text: str) -> None:
    """Show nothing."""


@contextmanager
def announced(text: str) -> Iterator[Callable[[str], None]]:
    """Context manager: show a text on the terminal while the block lasts, once it has taken some seconds. Nothing goes to a log.

    Its value is a function that replaces the text by another.
    """
    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield _ignore
        return

    lock, is_shown = threading.Lock(), False

    def show() -> None:
        nonlocal is_shown
        with lock:
            stream.write(text)
            stream.flush()
            is_shown = True

    def replace(other: str) -> None:
        nonlocal text
        with lock:
            text = other
            if is_shown:
                stream.write(_ERASE + text)
                stream.flush()

    timer = threading.Timer(_SECONDS, show)
    timer.daemon = True
    timer.start()
    try:
        yield replace
    finally:
        timer.cancel()
        timer.join()  # it may be writing
        if is_shown:
            stream.write(_ERASE)
            stream.flush()
