"""Show text on a terminal, such as what a command is doing while it shows nothing else for some seconds.

Text is made fit to print: control characters could move the cursor, retitle a window or hide words, and long lines are cut anywhere.
"""

import re
import shutil
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

# Controls of ASCII and Latin-1 except tab and newline, and the marks that reorder the text around them (Unicode bidi).
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Return a text with each control character as its escape, such as ``\x1b``. Tabs and newlines stay."""
    return _CONTROLS.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


_WIDTH = 80  # of the lines for a terminal, at most
_TABLE = re.compile(r" *\S.*\S {2,}(?=\S)")  # the columns of a line but the last one


def fitted(text: str, stream: Any) -> str:
    """Return a text as `visible` does and, for a terminal, with lines of at most 80 characters, or fewer if it is narrower."""
    text = visible(text)
    if stream is None or not stream.isatty():
        return text
    return wrapped(text, min(_WIDTH, shutil.get_terminal_size().columns))


def wrapped(text: str, width: int) -> str:
    """Return a text whose long lines are broken at spaces. The rest of a line begins below its last column or, if it is no row of a table,
    two characters further to the right than the line itself.

    Words are left whole: they may be names of files.
    """
    return "\n".join(part for line in text.split("\n") for part in _wrapped_line(line, width))


def _wrapped_line(line: str, width: int) -> list[str]:
    """Return a line as one or several: further ones begin below its last column or, if it is no row of a table, two further to the right."""
    if len(line) <= width:
        return [line]
    columns = _TABLE.match(line)
    indent = len(line) - len(line.lstrip()) + 2
    if columns is not None and len(columns[0]) <= 2 * width // 3:  # which leaves a third to the last column
        indent = len(columns[0])
    # textwrap keeps the spaces between the columns of the first line.
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


_SECONDS = 3.0  # of silence, after which a command says what it does
_ERASE = "\r\x1b[K"  # the line of a terminal


def _ignore(text: str) -> None:
    """Show nothing."""


@contextmanager
def announced(text: str) -> Iterator[Callable[[str], None]]:
    """Context manager: show a text on the terminal while the block lasts, once it has taken some seconds. Nothing goes to a log.

    Its value is a function that replaces the text by another.
    """
    stream = sys.stderr
    if stream is None or not stream.isatty():
        yield _ignore
        return

    lock, is_shown = threading.Lock(), False

    def show() -> None:
        nonlocal is_shown
        with lock:
            stream.write(text)
            stream.flush()
            is_shown = True

    def replace(other: str) -> None:
        nonlocal text
        with lock:
            text = other
            if is_shown:
                stream.write(_ERASE + text)
                stream.flush()

    timer = threading.Timer(_SECONDS, show)
    timer.daemon = True
    timer.start()
    try:
        yield replace
    finally:
        timer.cancel()
        timer.join()  # it may be writing
        if is_shown:
            stream.write(_ERASE)
            stream.flush()
