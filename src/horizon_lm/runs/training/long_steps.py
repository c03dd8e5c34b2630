"""Show how far a step is that takes long, and report one that hangs: the operations that it waits for, and the stacks of all threads."""

import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from horizon_lm.common.quantities import counted, format_seconds
from horizon_lm.engine.streamed import engine_of
from horizon_lm.errors import first_line
from horizon_lm.runs.training.part import Part
from horizon_lm.runs.training.reporter import print_to_stderr
from horizon_lm.runs.training.run import Run, Training


class Watchdog(Part):
    """Reports on standard error, once, a step that takes longer than a limit. The run goes on waiting.

    Args:
        seconds: the limit; None for no report.
        pending_operations: returns a line for each operation that was begun and is not finished.
    """

    def __init__(self, seconds: float | None, pending_operations: Callable[[], Sequence[str]]) -> None:
        self._seconds, self._pending_operations = seconds, pending_operations

    @contextmanager
    def during_step(self, step: int) -> Iterator[None]:
        if self._seconds is None:
            yield
            return
        timer = threading.Timer(self._seconds, _report, (f"step {step}", self._seconds, self._pending_operations))
        timer.name, timer.daemon = "horizon-watchdog", True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()


def _report(name: str, seconds: float, pending_operations: Callable[[], Sequence[str]]) -> None:
    """Print the pending operations and the stacks of all threads; a timer calls this in its thread."""
    try:
        pending = pending_operations() or ["none"]
    except Exception as error:  # a device that has failed
        pending = [f"unknown, because the device does not answer ({first_line(error)})"]
    print_to_stderr(
        f"warning: {name} has taken more than {format_seconds(seconds)} (step_timeout); the run goes on waiting. "
        "Operations that are not finished:\n  " + "\n  ".join(pending)
    )
    print_to_stderr("\n".join(f"thread 0x{each.ident or 0:016x} is {each.name}" for each in threading.enumerate()))
    # By way of a file, because faulthandler needs a descriptor, and standard error has none in notebooks.
    with suppress(OSError), tempfile.TemporaryFile("w+", encoding="utf-8") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        print_to_stderr(file.read())


_SECONDS = 5  # between two looks at a step


class LongSteps(Part):
    """Shows the phase and the time of a step while it runs, and the planned time of the first one before it begins."""

    def __init__(self, run: Run, training: Training) -> None:
        self._run, self._training, self._reporter = run, training, run.session.reporter
        self._is_first = True

    def before_step(self, step: int) -> None:
        if self._is_first:
            self._is_first = False
            blocks = counted(engine_of(self._training.model).parts.num_blocks, "block")
            self._reporter.announce(step, f"{blocks}, forward and backward{self._by_plan()}", self._planned_seconds())

    @contextmanager
    def during_step(self, step: int) -> Iterator[None]:
        begun = time.monotonic()

        def show() -> None:
            phase = engine_of(self._training.model).cursor.describe_progress()  # empty between two passes
            since = f"{format_seconds(time.monotonic() - begun)} since its start"
            line = f"{phase}, {since}" if phase else since
            self._reporter.note(step, phase, line + self._by_plan())

        with _repeating(show):
            yield

    def _planned_seconds(self) -> float:
        """Return the expected seconds of a step; 0 if they are unknown, as for a step too short to be announced."""
        time_of_step = self._run.settings.plan.time
        return 0.0 if time_of_step is None else time_of_step.seconds

    def _by_plan(self) -> str:
        seconds = self._planned_seconds()
        return f", about {format_seconds(seconds)} by the plan" if seconds >= 1 else ""


@contextmanager
def _repeating(action: Callable[[], None]) -> Iterator[None]:
    """Context manager: call a function every few seconds, in a thread of its own, during the enclosed work."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.wait(_SECONDS):
            action()

    thread = threading.Thread(target=repeat, name="horizon-long-steps", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()  # no line of a step comes after its end
