"""Find the encoding of a text file by its byte order mark, and the place that is not text."""

import codecs
import shlex
from pathlib import Path

from horizon_lm.runs.data.local_files import COMPRESSED_SUFFIXES

_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig", codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip  # UTF-32 before UTF-16, whose mark is the beginning of its own


def encoding_of(file: Path) -> str:
    """Return the encoding that the byte order mark of a file names; utf-8 without a mark."""
    with file.open("rb") as stream:
        first = stream.read(4)
    return next((encoding for mark, encoding in _MARKS.items() if first.startswith(mark)), "utf-8")


def not_utf8(file: Path, name: str | None = None) -> str | None:
    """Return a message with the line and column of the first byte of a file that is not UTF-8; None if there is none."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return (
                    f"{name or file}:{number}:{error.start + 1}: not UTF-8 text; save the file as UTF-8{_command(file)}"
                )
    return None


def _command(file: Path) -> str:
    """Return the hint at a command that converts a file, whose copy keeps the suffix by which it is read; empty if it is compressed."""
    if file.suffix in COMPRESSED_SUFFIXES:
        return ""
    source, copy = (shlex.quote(str(each)) for each in (file, file.with_suffix(f".utf8{file.suffix}")))
    return f", as Latin-1 for example: iconv -f LATIN1 -t UTF-8 {source} > {copy}"
