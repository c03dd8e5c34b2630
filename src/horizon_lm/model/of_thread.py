"""Values that each thread has for itself."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class OfThread(threading.local):
    """A value that each thread has for itself.

    Args:
        value: the value that each thread begins with.
    """

    def __init__(self, value: Any) -> None:  # called in each thread
        self.value = value

    @contextmanager
    def replaced(self, value: Any) -> Iterator[None]:
        """Context manager: let this thread have another value, and put back the one before."""
        before, self.value = self.value, value
        try:
            yield
        finally:
            self.value = before
