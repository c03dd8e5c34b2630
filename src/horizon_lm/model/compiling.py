"""Compile blocks and the loss with torch.compile, and run wide feed-forward layers in chunks of tokens."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from inspect import isfunction
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from horizon_lm.model.compiled_block import CompiledBlock
from horizon_lm.model.of_thread import OfThread

_RECOMPILE_LIMIT = 64
_BACKEND = "inductor"


def compile_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the compiled version of a function, cached by function."""
    return _compile(function, _BACKEND)


def compile_block(function: Callable[..., Any]) -> CompiledBlock:
    """Return the compiled version of the forward method of a class of blocks, cached by function."""
    return _compile_block(function, _BACKEND)


@cache
def _compile(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    _raise_recompile_limit()
    return torch.compile(function, backend=backend)


@cache
def _compile_block(function: Callable[..., Any], backend: str) -> CompiledBlock:
    _raise_recompile_limit()
    return CompiledBlock(function, backend)


def _raise_recompile_limit() -> None:
    """Raise torch's limit of recompilations if it is lower than ours."""
    # Each structure needs several graphs: with and without segments, for one row and for several.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)


def mark_lengths(tensors: Iterable[torch.Tensor]) -> None:
    """Mark for torch.compile that rows and tokens vary between batches, so that one graph serves all of them.

    A single row needs a separate graph, because torch.compile treats sizes of one as constants.

    Args:
        tensors: inputs of the code; the first one is the hidden states (B, T, H).
    """
    tensors = list(tensors)
    varying = {size for tensor in tensors[:1] for size in tensor.shape[:2] if size > 1}  # B and T
    for tensor in tensors:  # of which each dimension with one of these sizes counts as rows or tokens
        # The last of three dimensions is a width, for hidden states and rotary embeddings alike.
        sizes = tensor.shape[:2] if tensor.ndim == 3 else tensor.shape
        mark_varying(tensor, [dim for dim, size in enumerate(sizes) if size in varying])


def mark_varying(tensor: torch.Tensor, dims: list[int]) -> None:
    """Mark for torch.compile that these dimensions vary. Code that specializes on a dimension nevertheless gets a graph for each size."""
    torch._dynamo.maybe_mark_dynamic(tensor, dims)


_is_compiled = OfThread(False)  # this thread computes a compiled block


def chunk_mlps(block: nn.Module, tokens: int) -> int:
    """Make a block compute its feed-forward layers in chunks of tokens, and return the number of these layers.

    A feed-forward layer is a module named ``...MLP`` that treats every token alike: linear maps and elementwise functions.
    Experts, and layers with dropout, are not changed.
    """
    layers = [part for part in block.modules() if type(part).__name__.endswith("MLP") and _treats_tokens_alike(part)]
    for part in layers:
        part._chunk_tokens = tokens  # type: ignore[assignment]
        # A bound method, so that a copy of the block chunks its own layers.
        part.forward = MethodType(_forward_in_chunks, part)
    return len(layers)


def _treats_tokens_alike(part: nn.Module) -> bool:
    """Return whether a module computes each token on its own: linear layers and functions, without dropout."""
    for child in part.modules():
        parameters = [p for p in child._parameters.values() if p is not None]
        if parameters and not (isinstance(child, nn.Linear) or type(child).__name__ == "Conv1D"):
            return False
        if isinstance(child, nn.Dropout) and child.p > 0:
            return False
    return True


def compiling_chunks() -> AbstractContextManager[None]:
    """Context manager: compute the chunks of `chunk_mlps` with compiled code in this thread."""
    return _is_compiled.replaced(True)


@torch.compiler.disable  # otherwise each number of chunks would get a graph that contains all of them
def _forward_in_chunks(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Run a layer in chunks of tokens, each of which the backward pass recomputes. ``hidden``: (B, T, H)."""
    function = type(self).forward
    if _is_compiled.value:
        function = compile_function(function)
    size = max(1, self._chunk_tokens // hidden.shape[0])  # tokens of each row
    if hidden.ndim != 3 or hidden.shape[1] <= size:
        return _marked(function(self, _marked(hidden)))
    bound = {module: dict(module._parameters) for module in self.modules()}  # on the device

    def compute(piece: torch.Tensor) -> torch.Tensor:
        # When the backward pass recomputes a chunk, the layer has its host parameters again.
        with _with_parameters(bound):
            output: torch.Tensor = function(self, _marked(piece))
        return output

    # Chunks (B, size, H) of nearly equal length, because a last chunk of a single token would need a separate graph.
    # With the strides of a tensor of their own, because matmul rounds differently otherwise when no autograd graph is
    # recorded. `contiguous` leaves a piece of a single row as it is.
    pieces = [
        piece.clone(memory_format=torch.contiguous_format)
        for piece in hidden.tensor_split(-(-hidden.shape[1] // size), dim=1)
    ]
    checkpointed = partial(checkpoint, compute, use_reentrant=False, preserve_rng_state=False)
    run = checkpointed if torch.is_grad_enabled() else compute
    return _marked(torch.cat([run(piece) for piece in pieces], dim=1))


@contextmanager
def _with_parameters(parameters: Mapping[nn.Module, Mapping[str, nn.Parameter | None]]) -> Iterator[None]:
    """Context manager: put tensors into the places of the parameters of some modules."""
    before = {module: dict(module._parameters) for module in parameters}
    try:
        for module, tensors in parameters.items():
            module._parameters.update(tensors)
        yield
    finally:
        for module, tensors in before.items():
            module._parameters.update(tensors)


def _marked(hidden: torch.Tensor) -> torch.Tensor:
    """Return hidden states (B, T, H), after `mark_lengths` has marked them."""
    mark_lengths([hidden])
    return hidden


@contextmanager
def compiled_loss(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: let the model's forward compute its loss over a chunk with the compiled version of its loss function.

    It adds up in another order than the function itself, so bits may differ.
    """
    function = model.loss_function

    def compute(*args: Any, **kwargs: Any) -> Any:
        for tensor in (*args, *kwargs.values()):
            if isinstance(tensor, torch.Tensor) and tensor.ndim > 1:  # logits (1, N, V) and labels (1, N)
                mark_varying(tensor, [1])
        return compile_function(function)(*args, **kwargs)

    with loss_computed_by(model, compute):
        yield


@contextmanager
def loss_computed_by(model: PreTrainedModel, compute: Callable[..., Any]) -> Iterator[None]:
    """Context manager: let the model's forward compute its loss with this function.

    Nothing is changed if the model's loss function is not a plain function, such as a module with weights.
    """
    if not isfunction(model.loss_function):
        yield
        return
    before = vars(model).get("_loss_function")  # which transformers' property returns, if it was set
    model.loss_function = compute
    try:
        yield
    finally:
        if before is None:
            del model._loss_function
        else:
            model.loss_function = before
