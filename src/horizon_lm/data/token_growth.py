"""Reject tokenizers that multiply a text before they split it: a kilobyte of replacements can make petabytes of a word."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horizon_lm.errors import ConfigError

_MAX_GROWTH = 64  # characters made of one; published normalizers make up to three
_MAX_PARSED_BYTES = 2**22  # of a tokenizer.json that is parsed before it is loaded; longer ones are checked afterwards


def require_little_growth_of_file(path: Path) -> None:
    """Raise ConfigError if the normalizer in a short ``tokenizer.json`` makes too many characters of one."""
    if not path.is_file() or path.stat().st_size > _MAX_PARSED_BYTES:
        return
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return  # reported when it is loaded
    if isinstance(content, dict):
        _require_little_growth(content.get("normalizer"), path)


def require_little_growth(tokenizer: Any, place: object) -> None:
    """Raise ConfigError, naming ``place``, if the normalizer of a loaded tokenizer makes too many characters of one."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and backend.normalizer is not None:
        _require_little_growth(json.loads(backend.normalizer.__getstate__()), place)


def _require_little_growth(normalizer: Any, place: object) -> None:
    """Raise ConfigError if a normalizer could make a text much longer."""
    if (growth := _growth(normalizer)) > _MAX_GROWTH:
        shown = f"{growth:,.0f}" if growth < 1e15 else f"{growth:.0e}"
        raise ConfigError(
            f"{place}: its normalizer makes up to {shown} characters of one, more than {_MAX_GROWTH}; download it again"
        )


def _growth(normalizer: Any) -> float:
    """Return a bound on the number of characters that a normalizer makes of one."""
    if not isinstance(normalizer, Mapping):
        return 1.0
    parts = normalizer.get("normalizers")
    growth = 1.0
    for part in parts if isinstance(parts, list) else ():
        growth = min(growth * _growth(part), 1e300)
    content, pattern = normalizer.get("content"), normalizer.get("pattern")
    if isinstance(content, str) and isinstance(pattern, Mapping):
        text = pattern.get("String")
        growth *= max(1.0, len(content) / len(text) if isinstance(text, str) and text else len(content) + 1.0)
    return growth
