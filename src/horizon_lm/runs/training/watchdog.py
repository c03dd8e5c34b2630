"""Report a step that hangs: the operations that it waits for, and the stacks of all threads."""

import faulthandler
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from horizon_lm.common.quantities import format_seconds
from horizon_lm.errors import first_line
from horizon_lm.runs.training.part import Part
from horizon_lm.runs.training.printing import print_to_stderr


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
