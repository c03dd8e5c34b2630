"""Find the arguments with which a model calls its blocks, for batches of any shape, without weights.

The model's outer code (masks, positions, rotary tables) runs on the CPU over a few zero tokens, three times, with
different numbers of rows and tokens. The dimensions that change with each of them give the shapes for any batch.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.utils import _pytree as pytree

from horizon_lm.common.units import EMBED, OUTER
from horizon_lm.model.block_template import structure_key
from horizon_lm.model.parts import ModelParts, ParamRef
from horizon_lm.model.routed_experts import RoutedExperts
from horizon_lm.model.skeletons import meta_copy
from horizon_lm.model.trial import Call, TrialDoneError, answers_of, outer_weights, trial
from horizon_lm.planning.measure.block_probe import BlockRun, output_on_meta, run_on_meta
from horizon_lm.planning.measure.core_probe import CoreRun, run_core_on_meta

_ROWS, _LENGTH = (3, 5), (22, 26)  # unlikely to be dimensions of a model, and not multiples of each other
_WINDOW = 8  # shorter than the probe's rows, because only longer rows get the mask of a sliding window


@dataclass(frozen=True, slots=True)
class BlockCalls:
    """Blocks of one structure, and the arguments with which the model calls them.

    Attributes:
        block: one of these blocks.
        indices: indices of all of them.
        in_float32: weights that they compute with in float32, by their names inside the block.
        dtype: dtype of hidden states.
        length: tokens of a sequence, T.
        accelerated: assume the kernels of a GPU.
    """

    block: nn.Module
    indices: tuple[int, ...]
    in_float32: frozenset[str]
    dtype: torch.dtype
    length: int
    accelerated: bool
    _spec: Any
    _leaves: tuple[Any, ...]  # each tensor replaced by None
    _tensors: Mapping[int, tuple[tuple["_Extent", ...], torch.dtype]]
    _identities: Mapping[int, int]  # identities of tensors, equal if several structures are called with the same tensor

    def arguments(self, rows: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments for a micro-batch of this many rows, with tensors on the meta device."""
        leaves = list(self._leaves)
        for index, (extents, dtype) in self._tensors.items():
            leaves[index] = torch.empty([e.at(rows, self.length) for e in extents], dtype=dtype, device="meta")
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def run(self, rows: int) -> BlockRun:
        """Run a block's forward and backward pass for a micro-batch on the meta device."""
        return run_on_meta(self.block, *self.arguments(rows), self.dtype, self.accelerated, self.in_float32)

    def run_core(self, experts: RoutedExperts, rows: int) -> CoreRun:
        """Run the block without its experts, and the experts alone, as `run` does for the whole block."""
        args, kwargs = self.arguments(rows)
        return run_core_on_meta(self.block, experts, args, kwargs, self.dtype, self.accelerated, self.in_float32)

    def shared_bytes(self, rows: int) -> dict[int, int]:
        """Return the bytes of each input shared with other blocks (masks, rotary tables), by the identity of the tensor."""
        args, kwargs = self.arguments(rows)
        hidden = args[0] if args else kwargs["hidden_states"]
        leaves = pytree.tree_flatten((args, kwargs), is_leaf=_is_leaf)[0]
        return {
            self._identities[index]: leaf.numel() * leaf.element_size()
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf is not hidden
        }


def shared_bytes(calls: Iterable[BlockCalls], rows: int) -> int:
    """Return the bytes of inputs that all blocks of a model share. Structures of blocks may differ in their masks; a tensor counts once."""
    bytes_of: dict[int, int] = {}
    for each in calls:
        bytes_of |= each.shared_bytes(rows)
    return sum(bytes_of.values())


@dataclass(frozen=True, slots=True)
class _Extent:
    """The size of one dimension: a constant, multiplied by the rows, the length, or both."""

    factor: int
    by_rows: bool
    by_length: bool

    def at(self, rows: int, length: int) -> int:
        """Return the size of the dimension for a batch of this shape."""
        return self.factor * (rows if self.by_rows else 1) * (length if self.by_length else 1)


def find_calls(parts: ModelParts, dtype: torch.dtype, length: int, masked: bool, accelerated: bool) -> list[BlockCalls]:
    """Return the arguments with which a model on the meta device calls its decoder's blocks, for each structure that these have.

    Args:
        parts: parts of a skeleton.
        dtype: dtype of hidden states.
        length: length of the batches, T: sequences longer than a sliding window have a different mask.
        masked: rows are padded, which requires a mask.
        accelerated: assume the kernels of a GPU.
    """
    alike: dict[Any, list[int]] = {}  # indices of blocks, by their structure
    for index in parts.decoder_blocks:
        alike.setdefault(structure_key(parts.blocks[index]), []).append(index)
    copies = {first: meta_copy(parts.blocks[first]) for first, *_ in alike.values()}  # without replaced forward methods
    copy_of_each = {index: copies[indices[0]] for indices in alike.values() for index in indices}
    with _short_window(parts, length):
        recorded = [
            _record(parts, copy_of_each, dtype, _batch(rows, tokens, masked), _zeros) for rows, tokens in _shapes()
        ]
    return [
        _generalize(
            [calls[indices[0]] for calls in recorded], block=copies[indices[0]], indices=tuple(indices),
            in_float32=_float32_weights(parts, indices[0]), dtype=dtype, length=length, accelerated=accelerated,
        )
        for indices in alike.values()
    ]  # fmt: skip


def _shapes() -> list[tuple[int, int]]:
    """Return the rows and tokens of the batches that are compared: one, one with more rows, and one with more tokens."""
    return [(_ROWS[0], _LENGTH[0]), (_ROWS[1], _LENGTH[0]), (_ROWS[0], _LENGTH[1])]


def _float32_weights(parts: ModelParts, index: int) -> frozenset[str]:
    """Return the weights that a block computes with in float32, by their names inside the block."""
    return parts.in_float32_inside(parts.block_names[index])


def _generalize(calls: list[Call], **known: Any) -> BlockCalls:
    """Return the arguments for batches of any shape, from the calls of a block in the batches of `_shapes`.

    ``known`` has the fields of `BlockCalls` that do not depend on the calls.
    """
    flat_calls = [pytree.tree_flatten(call, is_leaf=_is_leaf) for call in calls]
    (leaves, spec), (more_rows, _), (more_tokens, _) = flat_calls
    tensors = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            shapes = (leaf.shape, more_rows[index].shape, more_tokens[index].shape)
            tensors[index] = tuple(map(_extent, *shapes)), leaf.dtype
    without_tensors = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    identities = {index: id(leaves[index]) for index in tensors}  # distinct, because all these tensors are alive
    return BlockCalls(**known, _spec=spec, _leaves=without_tensors, _tensors=tensors, _identities=identities)


def _is_leaf(value: Any) -> bool:
    """Return whether pytree must leave a value whole: only tuples, lists and dictionaries are opened."""
    return not isinstance(value, tuple | list | dict)


def _extent(number: int, more_rows: int, more_tokens: int) -> _Extent:
    """Return the extent of a dimension, from its sizes in the batches of `_shapes`.

    A size that grows in proportion to the rows or the tokens depends on them. Raise ValueError if it changes in any other way.
    """
    by_rows = more_rows * _ROWS[0] == number * _ROWS[1]
    by_length = more_tokens * _LENGTH[0] == number * _LENGTH[1]
    if (not by_rows and more_rows != number) or (not by_length and more_tokens != number):
        raise ValueError(
            f"a block's input has {number} entries for {_ROWS[0]} rows of {_LENGTH[0]} tokens, {more_rows} for "
            f"{_ROWS[1]} rows and {more_tokens} for rows of {_LENGTH[1]}; its size in larger batches cannot be derived"
        )
    return _Extent(number // (_ROWS[0] if by_rows else 1) // (_LENGTH[0] if by_length else 1), by_rows, by_length)


def call_of_each_block(
    parts: ModelParts, dtype: torch.dtype, inputs: Mapping[str, torch.Tensor], shares_outputs: bool = False
) -> dict[int, Call]:
    """Return the arguments of each block in one forward pass, as tensors with values.

    Args:
        parts: parts of a skeleton.
        dtype: dtype of hidden states.
        inputs: inputs of the model.
        shares_outputs: outputs of one shape are the same zeros, so that long rows take little memory in a deep model.
    """
    kinds = {index: meta_copy(module) for index, module in enumerate(parts.blocks)}
    known: dict[Any, torch.Tensor] = {}

    def shared(leaf: Any) -> Any:
        """Return zeros on the CPU in place of a tensor, and anything else as it is."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if (key := (leaf.shape, leaf.dtype)) not in known:
            known[key] = _zeros(leaf)
        return known[key]

    return _record(parts, kinds, dtype, inputs, shared if shares_outputs else _zeros)


def _batch(rows: int, tokens: int, masked: bool) -> dict[str, torch.Tensor]:
    """Return inputs of the model. A padded token lets transformers make a mask, which it leaves out if nothing is masked."""
    ids = torch.zeros((rows, tokens), dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, -1] = 0 if masked else 1
    return {"input_ids": ids, "attention_mask": mask}


def _record(
    parts: ModelParts,
    kinds: Mapping[int, nn.Module],
    dtype: torch.dtype,
    inputs: Mapping[str, torch.Tensor],
    make_zeros: Callable[[Any], Any],
) -> dict[int, Call]:
    """Return the arguments of each block in one forward pass, which ends at the last block.

    Args:
        parts: parts of a skeleton.
        kinds: for the index of each block, a block of the same structure, which is run on the meta device for the shape of its output.
        dtype: dtype of hidden states.
        inputs: inputs of the model.
        make_zeros: function from a leaf of a block's output on the meta device to what stands for it.
    """
    calls: dict[int, Call] = {}
    outputs: dict[nn.Module, Any] = {}

    def answer(index: int, *args: Any, **kwargs: Any) -> Any:
        """Record the arguments of a block, and return zeros like the output of its kind."""
        calls[index] = args, kwargs
        if index == parts.num_blocks - 1:
            raise TrialDoneError
        kind = kinds[index]
        if kind not in outputs:
            output = output_on_meta(kind, args, kwargs, dtype, _float32_weights(parts, index))
            outputs[kind] = pytree.tree_map(make_zeros, output)
        return outputs[kind]

    def zero(ref: ParamRef) -> torch.Tensor:
        # One zero that is read everywhere: adapters of a large model would take seconds to write.
        value = torch.zeros((), dtype=parts.computed_dtype(ref.name, dtype))
        return nn.Parameter(value.expand(ref.param.shape))

    answers = answers_of(parts.blocks, answer)
    answers[parts.embed] = lambda ids: torch.zeros((*ids.shape, parts.hidden), dtype=dtype)
    # Some models look the embedding of padding up by themselves.
    with trial(answers, outer_weights(parts, zero, units=(OUTER, EMBED))), torch.no_grad():
        parts.model(**{"use_cache": False, **inputs})  # the last block ends this context by TrialDoneError
        raise AssertionError("the last block was not reached")
    return calls


def _zeros(leaf: Any) -> Any:
    """Return zeros on the CPU in place of a tensor, and anything else as it is."""
    return torch.zeros_like(leaf, device="cpu") if isinstance(leaf, torch.Tensor) else leaf


def _short_window(parts: ModelParts, length: int) -> AbstractContextManager[Any]:
    """Context manager: shorten a sliding window, so that it cuts rows of the probe if it cuts rows of ``length`` tokens."""
    config = parts.model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is None:
        return nullcontext()
    return patch.object(config, "sliding_window", _WINDOW if window < length else 10 * max(_LENGTH))
