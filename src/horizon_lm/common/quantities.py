"""Parse, format and round sizes, durations, rates and counts, and print them as items of a table or of a sentence."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from horizon_lm.common.constants import PAGE
from horizon_lm.errors import ConfigError

_FACTORS = {
    "": 1, "b": 1,
    "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9, "t": 10**12, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


def parse_bytes(text: str | int) -> int:
    """Convert a size such as ``"64MiB"``, ``"1.5 TB"`` or ``1024`` to bytes.

    Raises:
        ConfigError: the text is not a number with a known unit.
    """
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*([0-9]{0,18}\.?[0-9]{1,18})\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2].lower() not in _FACTORS:
        raise ConfigError(f"{text!r} is not a size; write for example 64MiB, 12GiB or 1.5TB")
    return int(float(match[1]) * _FACTORS[match[2].lower()])


def parse_size(text: str | int) -> int:
    """Convert a size as `parse_bytes` does. Raise ConfigError, too, for less than a page: almost always a number whose unit was forgotten."""
    num_bytes = parse_bytes(text)
    if num_bytes < PAGE:
        has_unit = isinstance(text, str) and text.strip()[-1].isalpha()
        remedy = "" if has_unit else f"; write a unit, such as {max(1, num_bytes)}GiB"
        raise ConfigError(f"must be at least {PAGE} bytes{remedy}")
    return num_bytes


def format_bytes(num_bytes: float) -> str:
    """Format a size in the largest binary unit in which it is at least one, for example ``"1.25 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.2f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.2f} TiB"


def counted(number: int, noun: str) -> str:
    """Format a number of things, for example ``"1 row"`` or ``"2,000 rows"``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def page_aligned(num_bytes: int) -> int:
    """Round a number of bytes up to whole pages of host memory."""
    return -(-num_bytes // PAGE) * PAGE


def format_seconds(seconds: float) -> str:
    """Format a duration, for example ``"12 s"``, ``"3 min 20 s"`` or ``"2 h 05 min"``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def format_duration(seconds: float) -> str:
    """Format seconds with three digits, from microseconds to hours."""
    if seconds >= 100:
        return format_seconds(seconds)
    seconds = three_digits(seconds)
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 or seconds == 0 else f"{seconds * 1e6:.3g} µs"


def format_count(number: float) -> str:
    """Format a number of parameters or tokens with three digits, such as ``"7.62B"``."""
    number = three_digits(number)
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.0f}"


def format_rate(rate: float) -> str:
    """Format a number of tokens per second with a thousands separator, below 100 with one decimal."""
    return f"{rate:.1f}" if rate < 99.95 else f"{rate:,.0f}"


def three_digits(number: float) -> float:
    """Round to three digits. This is done before choosing a unit, since 999.9 ms is 1 s."""
    return float(f"{number:.3g}")


@dataclass(frozen=True, slots=True)
class Item:
    """A number to print, in a table or in a sentence.

    Attributes:
        name: its label.
        value: the number.
        unit: function that formats the number with its unit, such as `format_bytes`.
        note: an explanation or a comparison.
    """

    name: str
    value: float
    unit: Callable[[float], str]
    note: str = ""

    @property
    def text(self) -> str:
        """The number with its unit."""
        return self.unit(self.value)


def table_lines(items: Sequence[Item]) -> list[str]:
    """Return the rows of a table of items for a terminal: name, value and note."""
    width = max(len(item.name) for item in items)
    return [f"  {item.name:{width}} {item.text:>12}  {item.note}".rstrip() for item in items]


def listed(items: Iterable[Item]) -> str:
    """Return items as a part of a sentence, without their notes: ``"processors 0.1 J, GPU 0.3 J"``."""
    return ", ".join(f"{item.name} {item.text}" for item in items)
