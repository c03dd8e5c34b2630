"""Try a tiny model once in a process: the trials of its blocks take most of the time of a tiny run."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from horizon_lm.model.adapters import Adapters
from horizon_lm.model.block_template import structure_key
from horizon_lm.model.generation import Generation
from horizon_lm.planning.measure import block_probe, model_outline
from horizon_lm.planning.measure.cache_probe import CacheProbe

Outliner = Callable[..., Any]


def remember(outline_model: Outliner) -> Outliner:
    """Return the function that outlines a model, with a memory for calls with equal arguments."""
    known: dict[Any, Any] = {}

    def outline(source: Any, **options: Any) -> Any:
        if not isinstance(options.get("adapters"), Adapters | None):  # those of a model, which would be kept
            return outline_model(source, **options)
        key = (*_identity(source), *options.values())
        if key not in known:
            known[key] = outline_model(source, **options)
        return known[key]

    return outline


def _identity(source: Any) -> tuple[Any, ...]:
    """Return what decides which model a source builds."""
    return source.config.to_json_string(use_diff=False), source.place, *source._options.values()


def remember_for_good() -> None:
    """Do so in this process until its end."""
    model_outline.outline_model = remember(model_outline.outline_model)  # type: ignore[assignment]
    block_probe._written = remember_written(block_probe._written)
    CacheProbe.cache_bytes = remember_cache_bytes(CacheProbe.cache_bytes)  # type: ignore[method-assign]


def remember_cache_bytes(measure: Callable[..., int]) -> Callable[..., int]:
    """Return the method that measures a key-value cache, with a memory for equal models and generations."""
    known: dict[Any, int] = {}

    def cache_bytes(probe: CacheProbe, generation: Generation) -> int:
        key = (*_identity(probe._source), probe._dtype, probe._accelerated, generation)
        if key not in known:
            known[key] = measure(probe, generation)
        return known[key]

    return cache_bytes


def remember_written(find: Callable[..., frozenset[str]]) -> Callable[..., frozenset[str]]:
    """Return the function that finds what a block's forward writes, with a memory for equal blocks called with equal arguments."""
    known: dict[Any, frozenset[str]] = {}

    def written(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
        code = tuple((type(part).forward, part.__dict__.get("forward")) for part in block.modules())
        given = tuple(map(_described, tree_leaves((args, tuple(sorted(kwargs.items()))))))
        key = (structure_key(block), code, given)
        if key not in known:
            known[key] = find(block, args, kwargs)
        return known[key]

    return written


def _described(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return leaf.shape, leaf.dtype
    return leaf if isinstance(leaf, str | int | float | None) else type(leaf)
