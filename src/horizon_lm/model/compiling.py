"""Compiling code of blocks with torch.compile, once for batches of all shapes."""

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch

_RECOMPILE_LIMIT = 64
_BACKEND = "inductor"


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled function; the same one for the same function."""
    return _compile(function, _BACKEND)


@cache
def _compile(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    # Every structure has code of its own to compile, for batches with and without segments, of one row and of several.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    return torch.compile(function, backend=backend)


def mark_lengths(tensors: Iterable[torch.Tensor]) -> None:
    """Tell torch.compile that rows and tokens vary from batch to batch, so that it makes one graph for all of them.

    A single row has a graph of its own: torch.compile takes sizes of one for constants.

    Args:
        tensors: that the code is given; the first one are hidden states (B, T, H).
    """
    varying: set[int] | None = None
    for tensor in tensors:
        if varying is None:
            varying = {size for size in tensor.shape[:2] if size > 1}
        # Dimension 2 of three is a width, of hidden states and rotary embeddings alike.
        sizes = enumerate(tensor.shape[:2] if tensor.ndim == 3 else tensor.shape)
        mark_varying(tensor, [dim for dim, size in sizes if size in varying])


def mark_varying(tensor: torch.Tensor, dims: list[int]) -> None:
    """Tell torch.compile that these dimensions vary. Where code fixes one after all, it has a graph for each size."""
    torch._dynamo.maybe_mark_dynamic(tensor, dims)
