"""Stop a run on SIGINT or SIGTERM."""

import os
import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self

from horizon_lm.errors import InterruptedRunError


class Interrupts:
    """Context manager: let SIGINT and SIGTERM end the run, immediately or after the current step.

    Until `finish_steps` is called, the first signal stops the run immediately; afterwards, at the end of a step. A
    second signal always stops immediately. Python delivers signals only to the main thread; in other threads this does
    nothing.

    Attributes:
        requested: a signal has arrived.
    """

    _SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._previous: list[Any] = []
        self._finishes_steps = self.requested = False

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._previous = [signal.signal(number, self._handle) for number in self._SIGNALS]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in zip(self._SIGNALS, self._previous, strict=False):
            signal.signal(number, handler)

    def finish_steps(self) -> None:
        """Defer signals to the next `check`."""
        self._finishes_steps = True

    def check(self, step: int, num_steps: int, kept: str) -> None:
        """Raise InterruptedRunError if a signal has arrived. ``kept`` describes what the run leaves behind."""
        if self.requested:
            raise InterruptedRunError(f"interrupted after step {step} of {num_steps}. {kept}")

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._finishes_steps or self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # Not print(), which is not reentrant: the signal may have interrupted one.
        os.write(2, b"\nstopping after this step; interrupt again to stop immediately\n")
