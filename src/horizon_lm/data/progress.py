"""Bars while rows are read and tokenized, where somebody looks at them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def progress_bars() -> Iterator[None]:
    """Inside, `datasets` shows how far it is on a terminal, and nothing elsewhere."""
    from datasets.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

    before = is_progress_bar_enabled()
    (enable_progress_bar if sys.stderr.isatty() else disable_progress_bar)()
    try:
        yield
    finally:
        (enable_progress_bar if before else disable_progress_bar)()
