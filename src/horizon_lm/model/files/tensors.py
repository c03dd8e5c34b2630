"""Named tensors that are in memory only while they are needed, and the groups in which they are written to a folder."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from transformers.core_model_loading import revert_weight_conversion


class Tensors(Protocol):
    """Named tensors of a folder or of a model: what they will be, and the tensors.

    A class that changes the tensors of another source (decodes, merges or casts them) takes that source, and is one itself.
    """

    def meta(self, name: str) -> torch.Tensor:
        """Return a meta tensor with the shape and dtype of a tensor that `read` returns."""
        ...

    def read(self, names: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return these tensors by name, in this order. They are in memory together."""
        ...


# Converts tensors of a source to tensors of a folder, by name. Meta tensors give meta tensors.
Convert = Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]]


class Group(NamedTuple):
    """Tensors of a folder that are in memory together while the folder is written.

    Attributes:
        meta: meta tensors by their names in the folder, in the order in which they are written.
        read: a function that returns the tensors by these names.
    """

    meta: Mapping[str, torch.Tensor]
    read: Callable[[], Mapping[str, torch.Tensor]]


class Contents(NamedTuple):
    """The weights of a folder that is to be written.

    Attributes:
        groups: all tensors.
        dtype: the dtype of the model, as its config has it.
        num_params: number of elements of the model's parameters.
    """

    groups: Sequence[Group]
    dtype: torch.dtype
    num_params: int


def as_stored(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return tensors of a model with the names and in the layout that they have in a folder. Meta tensors give meta tensors."""
    found: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return found


def group_of(tensors: Tensors, names: Sequence[str], convert: Convert) -> Group:
    """Return the group of some tensors, which are converted to what a folder has once they are read."""
    return Group(convert({name: tensors.meta(name) for name in names}), lambda: convert(tensors.read(names)))
