"""Stopping a run when the user or the system asks for it."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from horizon_lm.errors import InterruptedRunError


class Interrupts:
    """SIGINT and SIGTERM: at once while there is nothing to lose, at the end of a step in the loop. A context manager.

    ``requested``: a signal has come. A second one stops at once in any case. Outside the main thread, where signals do not arrive, nothing happens.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._previous: list[Any] = []
        self._waits = self.requested = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = [signal.signal(number, self._handle) for number in self._SIGNALS]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in zip(self._SIGNALS, self._previous, strict=False):
            signal.signal(number, handler)

    def wait_for_boundary(self) -> None:
        """From now on a signal waits for `check`."""
        self._waits = True

    def check(self, step: int, num_steps: int, kept: str) -> None:
        """At the end of a step: InterruptedRunError if a signal has come."""
        if self.requested:
            raise InterruptedRunError(f"interrupted after step {step} of {num_steps}. {kept}")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._waits or self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # print() may be what was interrupted
        os.write(2, b"\nstopping at the end of this step; interrupt again to stop at once\n")
