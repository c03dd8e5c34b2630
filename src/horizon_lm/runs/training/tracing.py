"""Record the operations of a few training steps."""

import time

from horizon_lm.common.resources import resident_bytes
from horizon_lm.engine.streamed import engine_of
from horizon_lm.runs.training.part import Part
from horizon_lm.runs.training.run import Run, Training
from horizon_lm.schedule.trace import Trace

_FIRST = 3  # traced step; the first two steps touch memory for the first time and compile


class Tracing(Part):
    """A recorder of training steps; writes a file for chrome://tracing, Perfetto and ``horizon-lm report``."""

    def __init__(self, run: Run, training: Training) -> None:
        num_traced, num_steps, self._model = run.settings.config.trace_steps, run.intervals.num_steps, training.model
        self._device, self._session = engine_of(self._model).device, run.session
        self._first = max(1, min(_FIRST, num_steps - num_traced + 1))  # earlier in a run of few steps
        self._last = min(self._first + num_traced - 1, num_steps)
        self._trace: Trace | None = None
        self._started = 0.0

    def before_step(self, step: int) -> None:
        """End the previous step if it is recorded; start recording before the first traced step, and write the file after the last."""
        with self._session.reporter.attempt("trace.json"):
            if self._trace is not None:
                self._end_step(step - 1)
                if step > self._last:
                    self._write()
            elif step == max(1, self._first - 1) and self._first <= self._last:
                import horizon_lm

                # Start one step early, because its updates run during the first recorded step.
                horizon_lm.synchronize(self._model)
                self._trace = self._device.trace = Trace(self._sample)
                self._started = time.perf_counter()

    def finish(self, step: int) -> None:
        """End the last step of the run and write the recorded steps, even if the run stopped early."""
        with self._session.reporter.attempt("trace.json"):
            if self._trace is not None:
                self._end_step(step)
                self._write()

    def _end_step(self, step: int) -> None:
        """Record the times of a step that has ended, if it is to be traced. The next step starts now."""
        assert self._trace is not None
        now = time.perf_counter()
        if step >= self._first:
            self._trace.steps.append((step, self._started, now))
        self._started = now

    def _sample(self) -> dict[str, int]:
        return {"device bytes": self._device.used_bytes(), "host bytes": resident_bytes()}

    def _write(self) -> None:
        """End the trace, and write it without the operations before its first step."""
        import horizon_lm

        trace, self._trace = self._trace, None  # written once, also if this fails
        assert trace is not None
        horizon_lm.synchronize(self._model)
        self._device.trace = None
        if trace.steps:
            _, start, _ = trace.steps[0]
            trace.drop_before(start)
            if self._session.ranks.is_first:
                trace.write(self._session.run_dir.path / "trace.json")
