"""Show and log a run: ``metrics.jsonl``, and a progress bar on a terminal or plain lines elsewhere, which no closed pipe ends."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, Self

from horizon_lm.common.quantities import counted
from horizon_lm.common.visible import visible, wrapped
from horizon_lm.errors import first_line
from horizon_lm.runs.training.line_file import LineFile
from horizon_lm.runs.training.metrics_text import format_line


class Printer:
    """A print function that raises nothing. Its first failure is reported on standard error.

    Args:
        print_fn: called with each line.
    """

    def __init__(self, print_fn: Callable[[str], None]) -> None:
        self._print_fn, self._failed = print_fn, False

    def __call__(self, text: str) -> None:
        try:
            self._print_fn(text)
        except Exception as error:
            if not self._failed:
                print_to_stderr(f"warning: printing failed ({first_line(error)}); the run goes on")
            self._failed = True


def print_to_stdout(text: str) -> None:
    """Print a line without buffering. Characters that standard output cannot encode are escaped.

    Raises:
        OSError: standard output cannot be written to. From then on, all that is printed is lost without an error, also by the
            interpreter when it ends.
    """
    if sys.stdout is None:  # it was closed before the start
        return
    try:
        print(encodable(text, sys.stdout.encoding), flush=True)
    except OSError:
        drop_stdout()
        raise


def drop_stdout() -> None:
    """Point standard output to nothing. Text that is printed from now on, or still buffered, is lost without an error."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def encodable(text: str, encoding: str | None) -> str:
    """Return a text with escapes for the characters that an encoding does not have."""
    encoding = encoding or "utf-8"
    return text.encode(encoding, "backslashreplace").decode(encoding)


def print_to_stderr(text: str) -> None:
    """Print a line on standard error if that is possible."""
    with suppress(Exception):
        print(encodable(text, sys.stderr.encoding), file=sys.stderr, flush=True)


_SILENT_SECONDS = 30  # without a line, where there is no progress bar
_PROGRESS_SECONDS = 10  # between lines about long work, in the same case


class Reporter:
    """Context manager: write metrics, flushed line by line, and show progress.

    Args:
        print_fn: called with each line; None prints to standard output, with a progress bar if that is a terminal.
    """

    def __init__(self, print_fn: Callable[[str], None] | None = None) -> None:
        self._bar: Any = None
        self._task: Any = None  # the bar's task for the steps, from `begin` on
        self._given_print_fn = print_fn
        self._print: Printer | None = None
        self._file: LineFile | None = None
        self._num_steps, self._last_printed_at = 0, time.monotonic()
        self._logged: Callable[[Mapping[str, Any]], None] = lambda line: None
        self._failed: set[str] = set()  # outputs whose failure was reported

    def __enter__(self) -> Self:
        print_fn = self._given_print_fn or print_to_stdout
        if self._given_print_fn is None:
            from rich.console import Console

            console = Console()
            if console.is_terminal:  # elsewhere, rich would wrap the lines of a file at the width of a window
                print_fn = lambda text: console.print(  # noqa: E731
                    wrapped(encodable(text, console.encoding), console.width),
                    markup=False,
                    highlight=False,
                    soft_wrap=True,
                )
                self._bar = _progress_bar(console)
        self._print = Printer(print_fn)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_bar()
        if self._file is not None and self._file.num_waiting:
            with suppress(OSError):
                self._file.flush()
            if self._file.num_waiting:
                self.print(
                    f"warning: {counted(self._file.num_waiting, 'line')} could not be written to {self._file.path}"
                )

    def print(self, *lines: str) -> None:
        """Print lines, above the progress bar if there is one. Control characters are made visible."""
        assert self._print is not None
        self._last_printed_at = time.monotonic()
        for line in lines:
            self._print(visible(line))

    @contextmanager
    def attempt(self, output: str) -> Iterator[None]:
        """Context manager: make an output that the run can do without. Its first failure is reported, and the run goes on."""
        try:
            yield
        except Exception as error:
            if output not in self._failed:
                self._failed.add(output)
                self.print(f"warning: {output} failed ({first_line(error)}); the run goes on without it")

    def begin(self, file: LineFile | None, num_steps: int, logged: Callable[[Mapping[str, Any]], None]) -> None:
        """Start the progress bar. Lines of metrics go to ``file``, None on a rank without one, and to ``logged`` from now on."""
        self._file, self._num_steps, self._logged = file, num_steps, logged
        if self._bar is not None:
            with self.attempt("the progress bar"):
                self._task = self._bar.add_task("training", total=num_steps, loss="", phase="")
                self._bar.start()

    def advance(self, step: int, loss: float) -> None:
        """Show that a step is done: on the progress bar, or as a line if there was none for half a minute."""
        text = f"loss {loss:.4f}"
        self._show(step, text, completed=step, loss=text, phase="")

    def note(self, step: int, phase: str, text: str) -> None:
        """Show how far a step is, in the same way as `advance`. Any thread may call this.

        Args:
            step: the step.
            phase: the text for the progress bar.
            text: the text for a line.
        """
        self._show(step, text, phase=phase)

    def announce(self, step: int, text: str, seconds: float) -> None:
        """Print a line about a step that begins, if it will take more than half a minute, or if nothing was printed for so long.

        Args:
            step: the step.
            text: the text of the line.
            seconds: the expected duration of the step.
        """
        if max(seconds, time.monotonic() - self._last_printed_at) > _SILENT_SECONDS:
            self.print(self._step_line(step, text))

    def _show(self, step: int, text: str, **fields: Any) -> None:
        """Update fields of the progress bar. Without a bar, print ``text`` as a line if nothing was printed for half a minute."""
        if self._task is not None:
            with self.attempt("the progress bar"):
                self._bar.update(self._task, **fields)
        elif self._bar is None and time.monotonic() - self._last_printed_at > _SILENT_SECONDS:
            self.print(self._step_line(step, text))

    def _step_line(self, step: int, text: str) -> str:
        return f"step {step}/{self._num_steps}  {text}"

    def write(self, line: dict[str, Any]) -> None:
        """Write a line of metrics to disk and show it, then pass it on to ``logged`` (`begin`).

        If it cannot be written, the file keeps it and writes it with the next one (`LineFile`).
        """
        if self._file is not None:
            with self.attempt(str(self._file.path)):
                self._file.append(json.dumps(line))
        with self.attempt("the line of metrics"):
            self.show(line)
        self._logged(line)

    def show(self, line: dict[str, Any]) -> None:
        """Print a line of metrics or samples without writing it to ``metrics.jsonl``."""
        width = None if self._bar is None else self._bar.console.width
        self.print(format_line(line, self._num_steps, width))

    @contextmanager
    def progress(self, label: str) -> Iterator[Callable[[int, int], None]]:
        """Context manager: show the progress of long work between steps. Yield a function to call with done and total.

        Where there is no bar, lines are printed now and then. If any were, the last one says that all work is done.
        """
        task, printed_at = None, time.perf_counter()
        printed: tuple[int, int] | None = None  # done and total in the last line

        def advance(done: int, total: int) -> None:
            nonlocal task, printed_at, printed
            if self._bar is not None:
                with self.attempt("the progress bar"):
                    if task is None:
                        task = self._bar.add_task(label, total=total, loss="", phase="")
                        self._bar.start()
                    self._bar.update(task, completed=done)
            elif time.perf_counter() - printed_at > _PROGRESS_SECONDS:
                printed_at, printed = time.perf_counter(), (done, total)
                self.print(f"{label}: {done:,} of {total:,}")

        yield advance
        if printed is not None and printed[0] < printed[1]:
            self.print(f"{label}: {printed[1]:,} of {printed[1]:,}")
        if task is not None:
            with self.attempt("the progress bar"):
                self._bar.remove_task(task)

    def stop_bar(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            with self.attempt("the progress bar"):
                self._bar.stop()


def _progress_bar(console: Any) -> Any:
    """Return a progress bar of rich with the last loss."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[loss]}"),
        TextColumn("{task.fields[phase]}"), TimeRemainingColumn(), console=console, transient=True,
    )  # fmt: skip
