"""Parse, format and round sizes, durations and counts."""

import re

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
