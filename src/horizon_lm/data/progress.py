"""Bars while rows are read and tokenized, where somebody looks at them; and no logs, which errors say better."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def progress_bars() -> Iterator[None]:
    """Inside, `datasets` shows how far it is on a terminal, and nothing elsewhere."""
    from datasets.utils.logging import (
        CRITICAL,
        disable_progress_bar,
        enable_progress_bar,
        get_verbosity,
        is_progress_bar_enabled,
        set_verbosity,
    )  # fmt: skip

    before, verbosity = is_progress_bar_enabled(), get_verbosity()
    set_verbosity(CRITICAL)
    (enable_progress_bar if sys.stderr.isatty() else disable_progress_bar)()
    try:
        yield
    finally:
        set_verbosity(verbosity)
        (enable_progress_bar if before else disable_progress_bar)()
