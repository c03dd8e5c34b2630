"""Which weights of a model are trained, by patterns of their names."""

import difflib
import re
from typing import Any

from horizon_lm.errors import ConfigError


def freeze(model: Any, trainable: str | None) -> None:
    """Freeze every weight whose name no pattern fits.

    Args:
        model: of transformers; its parameters may be on the meta device.
        trainable: patterns with ``|`` between them. A pattern is some parts of a name, in which ``*`` stands for anything:
            ``layers.20.*`` fits ``model.layers.20.mlp.up_proj.weight``, and ``layers.2.*`` does not. None for all weights.

    Raises:
        ConfigError: a pattern fits nothing.
    """
    if trainable is None:
        return
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]  # a tied weight has several
    chosen: set[int] = set()
    for pattern in (part.strip() for part in trainable.split("|") if part.strip()):
        fits = _compile(pattern)
        found = {id(param) for name, param in model.named_parameters(remove_duplicate=False) if fits.search(name)}
        if not found:
            parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})
            close = difflib.get_close_matches(re.split(r"[.*]", pattern)[0] or pattern, parts, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else f"; names are like {names[0]}"
            raise ConfigError(f"trainable: {pattern!r} fits no weight of the model{hint}")
        chosen |= found
    for param in model.parameters():
        param.requires_grad_(id(param) in chosen)


def _compile(pattern: str) -> re.Pattern[str]:
    inner = ".*".join(re.escape(part) for part in pattern.split("*"))
    return re.compile(rf"(?:^|\.){inner}(?:\.|$)")
