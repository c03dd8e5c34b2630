"""Outline a model once for all runs of a process: the outline takes most of the time of a tiny run."""

from collections.abc import Callable
from typing import Any

from horizon_lm.cost import model_outline

Outliner = Callable[..., Any]


def remember(outline_model: Outliner) -> Outliner:
    """Return the function that outlines a model, with a memory for calls with equal arguments."""
    known: dict[Any, Any] = {}

    def outline(source: Any, **options: Any) -> Any:
        config = source.config.to_json_string(use_diff=False)
        key = (config, source.place, source.attn_implementation, *options.values())
        if key not in known:
            known[key] = outline_model(source, **options)
        return known[key]

    return outline


def remember_for_good() -> None:
    """Do so in this process until its end."""
    model_outline.outline_model = remember(model_outline.outline_model)  # type: ignore[assignment]
