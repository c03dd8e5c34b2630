"""Slicing the inputs of a block into device micro-batches.

Which dimension of an input runs over the rows of the batch cannot be told from one shape (a rope table may be (1, T, D)
or (B, T, D), M-RoPE positions are (3, B, T)). It is found once per kind of call by running the model's outer forward
with one more row and comparing shapes.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree as pytree

from horizon_lm.errors import ModelNotSupportedError

Path = tuple[str, int]  # where a tensor is among a call's arguments, and its number of dimensions


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves of nested tuples, lists and dicts; anything else (a cache, a config) is a leaf."""
    return pytree.tree_flatten(tree, is_leaf=lambda x: not isinstance(x, (tuple, list, dict)))


class BlockCall:
    """The arguments of one block call, with their tensors apart."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tree = (args, kwargs)
        with_path, self._spec = pytree.tree_flatten_with_path(
            tree, is_leaf=lambda x: not isinstance(x, (tuple, list, dict))
        )  # fmt: skip
        self._leaves = [leaf if not isinstance(leaf, torch.Tensor) else None for _, leaf in with_path]
        self._where = [i for i, (_, leaf) in enumerate(with_path) if isinstance(leaf, torch.Tensor)]
        self.tensors: list[torch.Tensor] = [with_path[i][1] for i in self._where]
        self.paths: list[Path] = [
            (pytree.keystr(with_path[i][0]), with_path[i][1].ndim) for i in self._where
        ]  # fmt: skip
        # The hidden states are the first positional argument, or named so.
        self.hidden = 0 if args else next(i for i, p in enumerate(self.paths) if "hidden_states" in p[0])

    def rebuild(self, tensors: list[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with these tensors in place of the original ones."""
        leaves = list(self._leaves)
        for index, tensor in zip(self._where, tensors, strict=True):
            leaves[index] = tensor
        return pytree.tree_unflatten(leaves, self._spec)

    def containers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return what is in the containers among a block's arguments, as comparable values: it may put something there."""
        return [_contents(value) for value in (*args, *kwargs.values()) if not isinstance(value, _IMMUTABLE)]

    def drop_tensors(self) -> None:
        """Keep the structure only; tensors that a backward needs are autograd's to hold."""
        self.tensors = []


def compare_rows(
    paths: list[Path], shapes: list[torch.Size], more: list[torch.Size], rows: int
) -> dict[Path, int | None]:
    """For each path the dimension that went from ``rows`` to ``rows + 1``, or None if none did.

    Raises:
        ModelNotSupportedError: a shape changed in another way.
    """
    dims: dict[Path, int | None] = {}
    for path, a, b in zip(paths, shapes, more, strict=True):
        changed = [d for d in range(len(a)) if a[d] != b[d]]
        if changed and (len(changed) > 1 or (a[changed[0]], b[changed[0]]) != (rows, rows + 1)):
            raise ModelNotSupportedError(
                f"the block input {path[0]} has shape {tuple(a)} for {rows} rows and {tuple(b)} for {rows + 1}, so it "
                "cannot be cut into micro-batches; leave device_micro_batch_size unset"
            )
        dims[path] = changed[0] if changed else None
    return dims


_IMMUTABLE = (torch.Tensor, bool, int, float, str, tuple, type(None))


def _contents(value: Any) -> Any:
    if isinstance(value, Mapping):
        return [(key, id(item)) for key, item in value.items()]
    if isinstance(value, list):
        return list(map(id, value))
    return [(name, id(item)) for name, item in getattr(value, "__dict__", {}).items()]


class ProbeDoneError(Exception):
    """Ends a forward that was only to reach a block, and to see what that is given."""


def slice_rows(tensor: torch.Tensor, dim: int | None, start: int, stop: int) -> torch.Tensor:
    """Rows ``[start, stop)`` of a tensor; all of it when it has no row dimension."""
    return tensor if dim is None else tensor.narrow(dim, start, stop - start)


class RowOutputs:
    """Outputs of micro-batches, assembled to those of the whole batch. Row-major: dimension 0 runs over rows."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows
        self._spec: Any = None
        self._leaves: list[Any] = []
        self._tensors: list[torch.Tensor] = []
        self._is_tensor: list[bool] = []
        self._like: list[tuple[torch.Tensor, torch.device]] = []

    def add(self, start: int, stop: int, output: Any) -> None:
        leaves, spec = flatten(output)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if self._spec is None:
            self._spec = spec
            self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
            self._is_tensor = [isinstance(leaf, torch.Tensor) for leaf in leaves]
            if stop - start == self._num_rows:
                self._tensors = tensors
            else:
                self._tensors = [self._empty_whole(t, stop - start) for t in tensors]
            self._like = [(t.to("meta"), t.device) for t in self._tensors]
        if stop - start == self._num_rows:
            return
        for whole, part in zip(self._tensors, tensors, strict=True):
            per_row = part.shape[0] // (stop - start)
            whole[start * per_row : stop * per_row] = part

    def _empty_whole(self, part: torch.Tensor, rows: int) -> torch.Tensor:
        if part.ndim == 0 or part.shape[0] % rows:
            raise ModelNotSupportedError(
                f"a block's output of shape {tuple(part.shape)} does not follow the rows of the batch, so it cannot be "
                "put together from micro-batches; leave device_micro_batch_size unset"
            )
        return part.new_empty((part.shape[0] // rows * self._num_rows, *part.shape[1:]))

    def release(self) -> None:
        """Keep the structure only."""
        self._tensors = []

    def imitate(self, num_rows: int) -> list[torch.Tensor]:
        """Zeros in the shape that these outputs would have with another number of rows."""
        return [
            torch.zeros(
                (t.shape[0] // self._num_rows * num_rows, *t.shape[1:]) if t.ndim else (), dtype=t.dtype, device=device
            )
            for t, device in self._like
        ]  # fmt: skip

    @property
    def tensors(self) -> list[torch.Tensor]:
        return self._tensors

    def rebuild(self, tensors: list[torch.Tensor] | tuple[torch.Tensor, ...]) -> Any:
        """The output structure with these tensors in it."""
        remaining = iter(tensors)
        leaves = [next(remaining) if is_t else leaf for leaf, is_t in zip(self._leaves, self._is_tensor, strict=True)]
        return pytree.tree_unflatten(leaves, self._spec)
