"""The end of a command's process, without the interpreter's teardown.

Teardown collects the garbage of all libraries, which takes two seconds and frees nothing useful. Excluding it from collection
(``gc.freeze``) would be as fast, but nanobind, by which triton is bound to Python, reports what is left as leaks.
"""

import atexit
import os
import sys
import threading
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """Wait for all threads, run what is registered for the end, and end the process, as `multiprocessing` ends a child."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # it was closed before the start
            stream.flush()
    os._exit(code)
