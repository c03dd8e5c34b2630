"""Whether packed rows stay apart in a model: found by looking at the masks that its own code makes for them."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model import attention
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.probe import call_of_each_block

_FIRST, _SECOND = 5, 8  # tokens of two rows in one


def require_packable(parts: ModelParts, used: str) -> None:
    """ModelNotSupportedError for a model in which a token could see the rows before its own.

    The model's outer code runs over two rows packed into one, and what each block is given is looked at.

    Args:
        parts: of a skeleton.
        used: the attention implementation that the run will have.
    """
    name = type(parts.model).__name__
    if "position_ids" not in inspect.signature(type(parts.model).forward).parameters:
        raise ModelNotSupportedError(f"{name}: packing is not possible: the model takes no position_ids")
    if used == attention.NAME:
        attention.require_varlen(parts.model)
        return
    positions = torch.cat([torch.arange(_FIRST), torch.arange(_SECOND)])[None]
    inputs = {"input_ids": torch.zeros_like(positions), "position_ids": positions}
    for index, (args, kwargs) in call_of_each_block(parts, torch.float32, inputs).items():
        if not (_is_masked(args, kwargs) or (used.startswith("flash") and kwargs.get("position_ids") is not None)):
            raise ModelNotSupportedError(
                f"{name}: packing is not possible: block {index} ({type(parts.blocks[index]).__name__}) is given no mask that "
                f"keeps packed rows apart with attn_implementation={used!r}; remove packing"
            )


def _is_masked(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether some input is a mask (..., T, T) in which the second row does not see the first, and sees itself."""
    length = _FIRST + _SECOND
    for leaf in pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, torch.Tensor) and leaf.ndim == 4 and leaf.shape[-2:] == (length, length):
            seen = leaf if leaf.dtype == torch.bool else leaf > torch.finfo(leaf.dtype).min / 2
            if not seen[..., _FIRST:, :_FIRST].any() and seen[..., _FIRST:, _FIRST:].any():
                return True
    return False
