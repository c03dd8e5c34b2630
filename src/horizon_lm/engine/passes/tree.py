"""Take the tensors out of nested tuples, lists and dicts, and put other tensors in.

torch's pytree does the same, but takes 0.1 ms for the arguments of one block, more than all other Python code of the
engine in the block's forward pass. Here plain containers take a tenth of that; other containers are left to pytree.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

Path = tuple[str, tuple[bool, ...]]  # the path to a tensor in its tree, and whether each of its dimensions is one

_TENSOR = object()  # marks the position of a tensor in a template


class _Other:
    """A container of a class that pytree has registered, such as an output of transformers."""

    def __init__(self, spec: Any, leaves: list[Any]) -> None:
        self.spec, self.leaves = spec, leaves


class Tree:
    """The tensors of a tree, and its structure without them.

    Attributes:
        tensors: the tensors, in the order of the tree.
        paths: their places, in the same order.
    """

    def __init__(self, tree: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.paths: list[Path] = []
        self._template = self._take(tree, "")

    def rebuild(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return a tree of this structure with these tensors."""
        return _fill(self._template, iter(tensors))

    def drop_tensors(self) -> None:
        """Drop the tensors and keep only the structure."""
        self.tensors = []

    def _take(self, value: Any, path: str) -> Any:
        """Return a value with a marker instead of each tensor, and append the tensors and their paths."""
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            # Row dimensions are cached by path, and in another call the same argument may have another form: a mask of all rows
            # is (1, 1, T, T), and masks of each row are (B, 1, T, T).
            self.paths.append((path, tuple([size == 1 for size in value.shape])))
            return _TENSOR
        # Exact types: pytree rebuilds a subclass, such as a named tuple or an output of transformers, as what it is.
        kind = type(value)
        if kind is tuple:
            return tuple([self._take(item, f"{path}[{index}]") for index, item in enumerate(value)])
        if kind is list:
            return [self._take(item, f"{path}[{index}]") for index, item in enumerate(value)]
        if kind is dict:
            return {key: self._take(item, f"{path}[{key!r}]") for key, item in value.items()}
        if not isinstance(value, (tuple, list, dict)):
            return value
        leaves, spec = pytree.tree_flatten(value, is_leaf=_is_leaf)
        if len(leaves) == 1 and leaves[0] is value:  # a class that pytree does not know
            return value
        return _Other(spec, [self._take(leaf, f"{path}[{index}]") for index, leaf in enumerate(leaves)])


def _fill(template: Any, tensors: Iterator[torch.Tensor]) -> Any:
    """Return a template with its markers replaced by the next tensors."""
    if template is _TENSOR:
        return next(tensors)
    kind = type(template)
    if kind is tuple:
        return tuple([_fill(item, tensors) for item in template])
    if kind is list:
        return [_fill(item, tensors) for item in template]
    if kind is dict:
        return {key: _fill(item, tensors) for key, item in template.items()}
    if kind is _Other:
        return pytree.tree_unflatten([_fill(leaf, tensors) for leaf in template.leaves], template.spec)
    return template


def _is_leaf(value: Any) -> bool:
    return not isinstance(value, (tuple, list, dict))
