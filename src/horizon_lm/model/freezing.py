"""Freeze the weights that a run does not train, by patterns of their names or by components of the model."""

import difflib
import re
from collections.abc import Collection, Sequence
from typing import Any

from horizon_lm.errors import ConfigError
from horizon_lm.model.components import Component, component_of_params


def freeze(model: Any, trainable: str | None, frozen: Collection[Component] = ()) -> None:
    """Freeze every weight whose name matches no pattern or, without patterns, every weight of some components.

    Args:
        model: transformers model, possibly on the meta device.
        trainable: patterns separated by ``|``. A pattern matches whole parts of a name, and ``*`` matches anything:
            ``layers.20.*`` matches ``model.layers.20.mlp.up_proj.weight``, ``layers.2.*`` does not. None trains all weights but those of ``frozen``.
        frozen: the components of the model that are frozen.

    Raises:
        ConfigError: a pattern matches nothing.
    """
    if trainable is None:
        components = component_of_params(model) if frozen else {}
        for name, param in model.named_parameters():
            param.requires_grad_(param.requires_grad and components.get(name) not in frozen)
        return
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]  # a tied weight has several names
    chosen: set[int] = set()
    for pattern in (part.strip() for part in trainable.split("|") if part.strip()):
        expression = _compile(pattern)
        named = model.named_parameters(remove_duplicate=False)
        found = {id(param) for name, param in named if expression.search(name)}
        if not found:
            meant = _nearest(pattern, names)
            hint = f"; did you mean {meant}?" if meant else f"; names are like {names[0]}"
            raise ConfigError(f"trainable: {pattern!r} fits no weight of the model{hint}")
        chosen |= found
    for param in model.parameters():
        param.requires_grad_(id(param) in chosen)


def _nearest(pattern: str, names: Sequence[str]) -> str | None:
    """Return the pattern with each of its parts replaced by the most similar part of a name; None if the result still fits no name."""
    parts = sorted({part for name in names for part in name.split(".") if not part.isdigit()})

    def most_similar(part: re.Match[str]) -> str:
        """Return the part of a name that is most similar to a part of the pattern; the part itself if none is, or if it is a number."""
        return part[0] if part[0].isdigit() else next(iter(difflib.get_close_matches(part[0], parts, n=1)), part[0])

    nearest = re.sub(r"[^.*]+", most_similar, pattern)
    return nearest if any(map(_compile(nearest).search, names)) else None


def _compile(pattern: str) -> re.Pattern[str]:
    """Return the regular expression of a pattern in which ``*`` stands for any text. It matches whole parts between dots."""
    first, *others = map(re.escape, pattern.split("*"))
    # Each part but the last keeps the first place where it is found (`(?>...)`), or a pattern with many stars would take for ever.
    inner = first + "".join(f"(?>.*?{part})" for part in others[:-1]) + "".join(f".*{part}" for part in others[-1:])
    return re.compile(rf"(?:^|\.){inner}(?:\.|$)")
