"""Make text of others safe to print: control characters could move the cursor, retitle a window or hide words."""

import re

# Controls of ASCII and Latin-1 except tab and newline, and the marks that reorder the text around them (Unicode bidi).
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ud800-\udfff]")


def visible(text: str) -> str:
    r"""Return a text with each control character as its escape, such as ``\x1b``. Tabs and newlines stay."""
    return _CONTROLS.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found.group())
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
