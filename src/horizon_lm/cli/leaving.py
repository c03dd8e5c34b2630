"""The end of a command's process, without the interpreter's teardown.

Teardown collects the garbage of all libraries, which takes two seconds and frees nothing useful. Excluding it from collection
(``gc.freeze``) would be as fast, but nanobind, by which triton is bound to Python, reports what is left as leaks.
"""

import atexit
import errno
import os
import sys
import threading
from typing import NoReturn

from horizon_lm.errors import ConfigError
from horizon_lm.runs.training.reporter import drop_stdout, print_to_stderr


def leave(code: int) -> NoReturn:
    """Wait for all threads, run the functions that are registered for the end, and end the process, as `multiprocessing` ends a child."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    code = code or flush_stdout("")
    if sys.stderr is not None:  # it was closed before the start
        sys.stderr.flush()
    os._exit(code)


def flush_stdout(text: str) -> int:
    """Write a last text and all that is buffered to standard output. Return 0, or another exit code if that fails, and print the reason on
    standard error.

    If the reader has closed the pipe, nothing is printed and the code is 1, as it is for click's own errors of this kind.
    """
    if sys.stdout is None:  # it was closed before the start
        return 0
    try:
        print(text, end="", flush=True)
    except OSError as error:
        drop_stdout()
        if error.errno == errno.EPIPE:
            return 1
        print_to_stderr(f"error: standard output cannot be written to: {error.strerror}")
        return ConfigError.exit_code
    return 0
