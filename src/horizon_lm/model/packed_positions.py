"""Compute the positions of packed rows for models that give the tokens of images positions of their own (M-RoPE).

These models find the positions of a row by themselves, but of packed rows they take them as one row. transformers expects
the positions of their texts before those of the axes, and finds the borders of packed rows in them.

Shapes: B batch, T tokens.
"""

import inspect
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from horizon_lm.model.image_inputs import takes_images

_KINDS = "mm_token_type_ids"


def rope_index_of(model: nn.Module) -> Callable[..., Any] | None:
    """Return the method that gives the tokens of rows with images their positions; None if a model has none, or reads only text."""
    if not takes_images(model):
        return None
    found = (getattr(module, "get_rope_index", None) for module in model.modules())
    return next(filter(None, found), None)


def packed_positions(
    rope_index: Callable[..., Any], input_ids: torch.Tensor, position_ids: torch.Tensor, arguments: Mapping[str, Any]
) -> torch.Tensor:
    """Return the positions of packed rows: those of their texts, and then those of each axis, (1 + axes, B, T).

    Args:
        rope_index: as from `rope_index_of`.
        input_ids: the rows (B, T).
        position_ids: positions (B, T) that restart at 0 with each packed row and with the padding.
        arguments: the arguments of the model for images.
    """
    borders = [*(position_ids == 0).flatten().nonzero().squeeze(1).tolist(), position_ids.numel()]
    lengths = [stop - start for start, stop in pairwise(borders)]

    def rows(tokens: torch.Tensor) -> torch.Tensor:
        """Return each packed row as a row of its own, with padding."""
        return pad_sequence(tokens.flatten().split(lengths), batch_first=True)

    mask, kinds = rows(torch.ones_like(input_ids)), arguments.get(_KINDS, torch.zeros_like(input_ids))
    takes = inspect.signature(rope_index).parameters
    given = {name: value for name, value in arguments.items() if name in takes}
    axes, _ = rope_index(**given | {"input_ids": rows(input_ids), "attention_mask": mask, _KINDS: rows(kinds)})
    return torch.cat([position_ids[None], axes[:, mask.bool()].unflatten(1, position_ids.shape)])
