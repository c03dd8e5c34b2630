"""Compile the code of blocks with torch.compile, and run wide feed-forward layers in chunks of tokens."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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


_current = threading.local()  # of the thread that computes: whether its block is compiled


def chunk_mlps(block: nn.Module, tokens: int) -> int:
    """Make a block compute its feed-forward layers so many tokens at a time. Returns how many layers it has.

    A feed-forward layer is a module named ``...MLP`` that treats every token alike: linear maps and functions of single
    numbers. Experts, and layers with dropout, are left as they are.
    """
    layers = [part for part in block.modules() if type(part).__name__.endswith("MLP") and _treats_tokens_alike(part)]
    for part in layers:
        part._chunk_tokens = tokens  # type: ignore[assignment]
        part.forward = MethodType(_forward, part)  # a method, so that a copy of the block chunks its own layers
    return len(layers)


def _treats_tokens_alike(part: nn.Module) -> bool:
    for child in part.modules():
        parameters = [p for p in child._parameters.values() if p is not None]
        if parameters and not (isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D"):
            return False
        if isinstance(child, nn.Dropout) and child.p > 0:
            return False
    return True


@contextmanager
def compiling_chunks() -> Iterator[None]:
    """Inside, chunks are computed by compiled code: one graph for the chunks of all rows."""
    before = getattr(_current, "compiling", False)
    _current.compiling = True
    try:
        yield
    finally:
        _current.compiling = before


@torch.compiler.disable  # or each number of chunks would be a graph of its own, with all of them in it
def _forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """In the place of the layer's forward. hidden (B, T, H)."""
    function = type(self).forward
    if getattr(_current, "compiling", False):
        function = compile_function(function)
    size = max(1, self._chunk_tokens // hidden.shape[0])
    if hidden.ndim != 3 or hidden.shape[1] <= size:
        return _marked(function(self, _marked(hidden)))
    bound = [(module, dict(module._parameters)) for module in self.modules()]

    def compute(piece: torch.Tensor) -> torch.Tensor:
        # The layer has its parameters back in host memory by the time that the backward computes a piece again.
        present = [(module, dict(module._parameters)) for module, _ in bound]
        try:
            for module, parameters in bound:
                module._parameters.update(parameters)
            output: torch.Tensor = function(self, _marked(piece))
            return output
        finally:
            for module, parameters in present:
                module._parameters.update(parameters)

    # Of nearly one length: a last one of a single token would be a graph of its own. And contiguous, or matmul rounds
    # differently without a graph.
    pieces = [piece.contiguous() for piece in hidden.tensor_split(-(-hidden.shape[1] // size), dim=1)]
    if not torch.is_grad_enabled():
        return _marked(torch.cat([compute(piece) for piece in pieces], dim=1))
    return _marked(
        torch.cat(
            [checkpoint(compute, piece, use_reentrant=False, preserve_rng_state=False) for piece in pieces], dim=1
        )
    )


def _marked(hidden: torch.Tensor) -> torch.Tensor:
    mark_lengths([hidden])
    return hidden
