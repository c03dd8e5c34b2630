"""What a model's own forward gives to its blocks, found by running it without weights.

The outer code of the model (masks, positions, rotary tables) runs on the CPU over a few tokens of zeros, three times: with
other numbers of rows and of tokens. What of a shape changes with which tells the shapes for any batch.

"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from horizon_lm.cost.block_probe import BlockRun, output_on_meta, run_on_meta
from horizon_lm.model.block_template import structure_key
from horizon_lm.model.hub import meta_copy
from horizon_lm.model.outer_trial import forwards
from horizon_lm.model.units import ModelParts
from horizon_lm.schedule.ops import EMBED, OUTER

_ROWS, _LENGTH = (3, 5), (22, 26)  # numbers that no shape of a model has by chance, and no multiples of each other
_WINDOW = 8  # shorter than the rows of a probe: masks of a sliding window are made only for longer rows


@dataclass(frozen=True, slots=True)
class BlockCalls:
    """Blocks of one structure, and how the model calls them.

    Attributes:
        block: one of them.
        indices: of all of them.
    """

    block: nn.Module
    indices: tuple[int, ...]
    _spec: Any
    _leaves: tuple[Any, ...]  # None where there is a tensor
    _tensors: Mapping[int, tuple[tuple["_Extent", ...], torch.dtype]]
    _identities: Mapping[int, int]  # of tensors, equal where blocks of several kinds are given the same one

    def arguments(self, rows: int, length: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for a batch of that shape, with tensors on the meta device."""
        leaves = list(self._leaves)
        for index, (extents, dtype) in self._tensors.items():
            leaves[index] = torch.empty([e.at(rows, length) for e in extents], dtype=dtype, device="meta")
        args, kwargs = pytree.tree_unflatten(leaves, self._spec)
        return args, kwargs

    def run(self, rows: int, length: int, dtype: torch.dtype, accelerated: bool) -> BlockRun:
        """A block's forward and backward for a micro-batch of that shape, on the meta device."""
        return run_on_meta(self.block, *self.arguments(rows, length), dtype, accelerated)

    def shared_bytes(self, rows: int, length: int) -> dict[int, int]:
        """Bytes of the inputs that other blocks have as well (masks, rotary tables), by what tells them apart."""
        args, kwargs = self.arguments(rows, length)
        hidden = args[0] if args else kwargs["hidden_states"]
        leaves = pytree.tree_flatten((args, kwargs), is_leaf=_is_leaf)[0]
        return {
            self._identities[index]: leaf.numel() * leaf.element_size()
            for index, leaf in enumerate(leaves)
            if isinstance(leaf, torch.Tensor) and leaf is not hidden
        }


@dataclass(frozen=True, slots=True)
class _Extent:
    """One number of a shape: a constant times rows, length, or both."""

    factor: int
    by_rows: bool
    by_length: bool

    def at(self, rows: int, length: int) -> int:
        return self.factor * (rows if self.by_rows else 1) * (length if self.by_length else 1)


def find_calls(parts: ModelParts, dtype: torch.dtype, length: int, masked: bool) -> list[BlockCalls]:
    """How a model without weights calls its blocks, one entry for each structure of blocks.

    Args:
        parts: of a skeleton.
        dtype: of hidden states.
        length: tokens of a row of the batches to come: rows longer than a sliding window are masked in another way.
        masked: rows are padded, so that there is a mask.
    """
    indices: dict[Any, list[int]] = {}
    for index, block in enumerate(parts.blocks):
        indices.setdefault(structure_key(block), []).append(index)
    copies = [meta_copy(parts.blocks[same[0]]) for same in indices.values()]  # with forwards of their own
    kinds = {index: copy for copy, same in zip(copies, indices.values(), strict=True) for index in same}
    seen = [_record(parts, kinds, dtype, _batch(rows, tokens, masked), length) for rows, tokens in _shapes()]
    return [
        _compare(copy, [calls[same[0]] for calls in seen], tuple(same))
        for copy, same in zip(copies, indices.values(), strict=True)
    ]


def _shapes() -> list[tuple[int, int]]:
    return [(_ROWS[0], _LENGTH[0]), (_ROWS[1], _LENGTH[0]), (_ROWS[0], _LENGTH[1])]


Call = tuple[tuple[Any, ...], dict[str, Any]]


def _compare(block: nn.Module, calls: list[Call], indices: tuple[int, ...]) -> BlockCalls:
    flat = [pytree.tree_flatten(call, is_leaf=_is_leaf) for call in calls]
    leaves, spec = flat[0]
    more_rows, more_tokens = flat[1][0], flat[2][0]
    tensors = {}
    for index, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            shapes = (leaf.shape, more_rows[index].shape, more_tokens[index].shape)
            tensors[index] = tuple(map(_extent, *shapes)), leaf.dtype
    plain = tuple(None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves)
    identities = {index: id(leaves[index]) for index in tensors}  # of one forward, whose tensors are all there
    return BlockCalls(block, indices, spec, plain, tensors, identities)


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, tuple | list | dict)


def _extent(number: int, more_rows: int, more_tokens: int) -> _Extent:
    by_rows = more_rows * _ROWS[0] == number * _ROWS[1]
    by_length = more_tokens * _LENGTH[0] == number * _LENGTH[1]
    if (not by_rows and more_rows != number) or (not by_length and more_tokens != number):
        raise ValueError(
            f"a block's input has {number} entries for {_ROWS[0]} rows of {_LENGTH[0]} tokens, {more_rows} for "
            f"{_ROWS[1]} rows and {more_tokens} for rows of {_LENGTH[1]}; what larger batches take cannot be told"
        )
    return _Extent(number // (_ROWS[0] if by_rows else 1) // (_LENGTH[0] if by_length else 1), by_rows, by_length)


def call_of_each_block(parts: ModelParts, dtype: torch.dtype, inputs: Mapping[str, torch.Tensor]) -> dict[int, Call]:
    """What each block is called with in one forward; tensors of a few tokens, with their values.

    Args:
        parts: of a skeleton.
        inputs: of the model's forward, ``input_ids`` (B, T) among them.
    """
    kinds = {index: meta_copy(block) for index, block in enumerate(parts.blocks)}
    return _record(parts, kinds, dtype, inputs, inputs["input_ids"].shape[1])


def _batch(rows: int, tokens: int, masked: bool) -> dict[str, torch.Tensor]:
    ids = torch.zeros((rows, tokens), dtype=torch.long)
    mask = torch.ones_like(ids)
    mask[0, -1] = 0 if masked else 1
    return {"input_ids": ids, "attention_mask": mask}


class _DoneError(Exception):
    """Ends a forward at its last block."""


def _record(
    parts: ModelParts,
    kinds: Mapping[int, nn.Module],
    dtype: torch.dtype,
    inputs: Mapping[str, torch.Tensor],
    length: int,
) -> dict[int, Call]:
    """The arguments of each block in one forward of the model. ``kinds``: a block of the same structure for each."""
    calls: dict[int, Call] = {}
    outputs: dict[nn.Module, Any] = {}

    def stand_in(index: int) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            calls[index] = args, kwargs
            if index == parts.num_blocks - 1:
                raise _DoneError
            kind = kinds[index]
            if kind not in outputs:
                outputs[kind] = pytree.tree_map(_zeros, output_on_meta(kind, args, kwargs, dtype))
            return outputs[kind]

        return forward

    (table,) = parts.units[EMBED]
    replaced: dict[nn.Module, Any] = {block: stand_in(index) for index, block in enumerate(parts.blocks)}
    replaced[parts.embed] = lambda ids: torch.zeros((*ids.shape, table.param.shape[1]), dtype=dtype)
    with _outer_parameters(parts, dtype), forwards(replaced), _short_window(parts, length), torch.no_grad():
        try:
            parts.model(**inputs, use_cache=False)
        except _DoneError:
            return calls
    raise AssertionError("the last block was not reached")


def _zeros(leaf: Any) -> Any:
    return torch.zeros_like(leaf, device="cpu") if isinstance(leaf, torch.Tensor) else leaf


@contextmanager
def _outer_parameters(parts: ModelParts, dtype: torch.dtype) -> Iterator[None]:
    """Inside, parameters outside of blocks, table and head are zeros instead of being on the meta device."""
    refs = parts.units[OUTER]
    for ref in refs:
        for module, attribute in ref.places:
            module._parameters[attribute] = nn.Parameter(torch.zeros(ref.param.shape, dtype=dtype))
    try:
        yield
    finally:
        for ref in refs:
            for module, attribute in ref.places:
                module._parameters[attribute] = ref.param


@contextmanager
def _short_window(parts: ModelParts, length: int) -> Iterator[None]:
    """Inside, the config's sliding window is to the probe's rows as it is to those of the batches to come."""
    config = parts.model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    if window is None:
        yield
        return
    config.sliding_window = _WINDOW if window < length else 10 * max(_LENGTH)
    try:
        yield
    finally:
        config.sliding_window = window
