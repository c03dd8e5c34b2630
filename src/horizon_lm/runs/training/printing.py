"""Print lines so that no failure of printing ends a run: a closed pipe, a full disk, a terminal that only has ASCII."""

import os
import sys
from collections.abc import Callable
from contextlib import suppress

from horizon_lm.errors import first_line


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
