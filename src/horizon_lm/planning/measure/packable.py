"""Check that packed rows are computed as they would be one by one, by the arguments that the model's code makes for its blocks."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from itertools import accumulate
from typing import Any

import torch
from torch.utils import _pytree as pytree

from horizon_lm.errors import ModelNotSupportedError, first_line
from horizon_lm.model import attention
from horizon_lm.model.outer_trial import require_causal_images, seen, seen_in
from horizon_lm.model.packed_positions import packed_positions, rope_index_of
from horizon_lm.model.parts import ModelParts
from horizon_lm.planning.measure.block_calls import call_of_each_block

_FIRST, _SECOND = 5, 8  # tokens of the two sequences in a packed row


def require_packable(parts: ModelParts, used: str) -> None:
    """Raise ModelNotSupportedError if tokens could attend to earlier sequences of a packed row.

    The model's outer code is run on a row of two packed sequences, and the arguments of each block are examined.

    Args:
        parts: parts of a skeleton.
        used: attention implementation of the run.
    """
    name = type(parts.model).__name__
    if "position_ids" not in inspect.signature(type(parts.model).forward).parameters:
        raise ModelNotSupportedError(f"{name}: packing is not possible: the model takes no position_ids")
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])[None]
    ids, rope_index = torch.zeros_like(positions), rope_index_of(parts.model)
    if rope_index is not None:
        with _tried(parts):
            positions = packed_positions(rope_index, ids, positions, {})
    if used == attention.NAME:
        attention.require_varlen(parts.model)
        if rope_index is None:
            return
    with _tried(parts), attention.making_masks(parts.model) if used == attention.NAME else nullcontext():
        calls = call_of_each_block(parts, torch.float32, {"input_ids": ids, "position_ids": positions})
    for index in parts.decoder_blocks:
        # Flash attention in transformers finds the sequences of a row by its positions.
        finds_sequences = used.startswith("flash") and calls[index][1].get("position_ids") is not None
        if not finds_sequences and not any(map(_keeps_apart, seen_in(calls[index], _FIRST + _SECOND))):
            raise ModelNotSupportedError(
                f"{_not_possible(parts, index)} gets no mask that separates packed rows with attn_implementation={used!r}; remove packing"
            )


@contextmanager
def _tried(parts: ModelParts) -> Iterator[None]:
    """Context manager: raise ModelNotSupportedError for any exception, which the model's own code may raise on stand-ins."""
    try:
        yield
    except Exception as error:
        raise ModelNotSupportedError(
            f"{type(parts.model).__name__}: packing is not possible: its code cannot be tried on packed rows ({first_line(error)}); remove packing"
        ) from error


def _not_possible(parts: ModelParts, index: int) -> str:
    """Return the beginning of a message about a block."""
    block, number = type(parts.blocks[index]).__name__, index - parts.decoder_blocks.start
    return f"{type(parts.model).__name__}: packing is not possible: block {number} ({block})"


def _keeps_apart(mask: torch.Tensor) -> bool:
    """Return whether tokens of the second sequence see their own, but not the first. ``mask``: as from `seen_in`."""
    return not mask[..., _FIRST:, :_FIRST].any() and bool(mask[..., _FIRST:, _FIRST:].any())


def require_packable_images(
    parts: ModelParts, used: str, apart: Mapping[str, torch.Tensor], packed: Mapping[str, torch.Tensor]
) -> None:
    """Raise ModelNotSupportedError if a model computes rows with images in another way once they are packed.

    The model's outer code is run on both; each block must get the same for the tokens of a row, and no mask may show them other rows.

    Args:
        parts: parts of a skeleton.
        used: attention implementation of the run.
        apart: arguments of the model for several rows as a batch with an ``attention_mask``.
        packed: arguments of the model for the same rows, packed into one.
    """
    if used == attention.NAME:
        require_causal_images(parts)
    lengths = apart["attention_mask"].sum(1).tolist()
    with attention.making_masks(parts.model), _tried(parts):
        calls = [call_of_each_block(parts, torch.float32, inputs, shares_outputs=True) for inputs in (apart, packed)]
    same = set[tuple[int, int]]()  # pairs of arguments, which blocks share
    for index in parts.decoder_blocks:
        of_batch, of_packed = (dict(pytree.tree_leaves_with_path(each[index])) for each in calls)
        for path in of_batch.keys() | of_packed.keys():
            pair = of_batch.get(path), of_packed.get(path)
            if (id(pair[0]), id(pair[1])) in same:
                continue
            same.add((id(pair[0]), id(pair[1])))
            if not _is_same(*pair, lengths):
                raise ModelNotSupportedError(
                    f"{_not_possible(parts, index)} gets {_name(path)} for images in packed rows that differ from those of the rows themselves; "
                    "remove packing"
                )


def _name(path: Sequence[Any]) -> str:
    """Return the name of an argument of a block, as the subject of a plural."""
    names = [str(entry.key) for entry in path if isinstance(entry, pytree.MappingKey)]
    return f"other {names[0]}" if names else "other inputs"


def _is_same(apart: Any, packed: Any, lengths: Sequence[int]) -> bool:
    """Return whether an argument of a block is the same for some rows as a batch, and packed into one row.

    Args:
        apart, packed: the argument.
        lengths: tokens of each row.
    """
    starts = [0, *accumulate(lengths)]
    if not isinstance(packed, torch.Tensor):
        return not isinstance(apart, torch.Tensor)
    if not isinstance(
        apart, torch.Tensor
    ):  # positions of texts, by which transformers finds the borders of packed rows
        return packed.tolist() == [[place for length in lengths for place in range(length)]]
    of_tokens = [dim for dim, size in enumerate(packed.shape) if size == starts[-1]]
    if apart.ndim != packed.ndim or not of_tokens:
        return torch.equal(apart, packed)
    if len(of_tokens) == 2:
        apart, packed = seen(apart), seen(packed)
    sizes = enumerate(zip(apart.shape, packed.shape, strict=True))
    of_rows = next((dim for dim, size in sizes if size == (len(lengths), 1)), None)
    for row, (start, length) in enumerate(zip(starts, lengths, strict=False)):
        one = apart if of_rows is None else apart.narrow(of_rows, row, 1)
        part = packed
        for dim in of_tokens:
            one, part = one.narrow(dim, 0, length), part.narrow(dim, start, length)
        if not torch.equal(one, part):
            return False
        if len(of_tokens) == 2:  # a mask
            around = packed.narrow(of_tokens[0], start, length)
            if around.sum() != part.sum():  # other rows are seen
                return False
    return True
