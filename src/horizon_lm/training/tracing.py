"""A few steps of a run, operation by operation, as they really happened."""

import time
from pathlib import Path
from typing import Any

from horizon_lm.resources import resident_bytes
from horizon_lm.schedule.trace import Trace

_FIRST = 3  # the steps before it touch memory and compile


class Tracing:
    """Records some steps and writes them to a file for chrome://tracing, Perfetto and ``horizon-lm report``.

    Args:
        model: a streamed model.
        num_traced: steps to record; 0 for none.
        num_steps: of the run.
        path: of the file.
    """

    def __init__(self, model: Any, num_traced: int, num_steps: int, path: Path) -> None:
        self._model, self._device, self._path = model, model._horizon.engine.device, path
        self._first = max(1, min(_FIRST, num_steps - num_traced + 1))
        self._last = min(self._first + num_traced - 1, num_steps)
        self._trace: Trace | None = None
        self._begun = 0.0

    def before_step(self, step: int) -> None:
        """A step is about to begin; the one before it is over."""
        if self._trace is not None:
            self._step_is_over(step - 1)
            if step > self._last:
                self._write()
        elif step == max(1, self._first - 1) and self._first <= self._last:
            import horizon_lm

            # A step early: its updates run in the first step that is recorded.
            horizon_lm.synchronize(self._model)
            self._trace = self._device.trace = Trace(self._sample)
            self._begun = time.perf_counter()

    def finish(self, step: int) -> None:
        """The last step is over, which may be one before those that were to be recorded have come to their end."""
        if self._trace is not None:
            self._step_is_over(step)
            self._write()

    def _step_is_over(self, step: int) -> None:
        assert self._trace is not None
        now = time.perf_counter()
        if step >= self._first:
            self._trace.steps.append((step, self._begun, now))
        self._begun = now

    def _sample(self) -> dict[str, int]:
        return {"device bytes": self._device.used_bytes(), "host bytes": resident_bytes()}

    def _write(self) -> None:
        import horizon_lm

        assert self._trace is not None
        horizon_lm.synchronize(self._model)
        self._device.trace = None
        if self._trace.steps:
            self._trace.drop_before(self._trace.steps[0][1])
            self._trace.write(self._path)
        self._trace = None
