"""Make text fit to print: control characters could move the cursor, retitle a window or hide words, and long lines are cut anywhere."""

import re
import shutil
import textwrap
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
    """Return a text whose long lines go on in further ones, below their last column; a line that is no row of a table is indented by two more.

    Words are left whole: they may be names of files.
    """
    return "\n".join(part for line in text.split("\n") for part in _wrapped_line(line, width))


def _wrapped_line(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    columns = _TABLE.match(line)
    indent = len(line) - len(line.lstrip()) + 2
    if columns is not None and len(columns[0]) <= 2 * width // 3:
        indent = len(columns[0])
    # The spaces between columns are those of the first line, which textwrap keeps.
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
