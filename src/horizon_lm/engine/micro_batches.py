"""Slicing the inputs of a block into device micro-batches.

Which dimension of an input runs over the rows of the batch cannot be told from one shape (a rope table may be (1, T, D)
or (B, T, D), M-RoPE positions are (3, B, T)). It is found once per kind of call by running the model's outer forward
with one more row and comparing shapes.

"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from horizon_lm.engine.tree import Path, Tree
from horizon_lm.errors import ModelNotSupportedError


class BlockCall(Tree):
    """The arguments of one block call, with their tensors apart."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__((args, kwargs))
        # The hidden states are the first positional argument, or named so.
        self.hidden = 0 if args else next(i for i, p in enumerate(self.paths) if "hidden_states" in p[0])

    def containers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return what is in the containers among a block's arguments, as comparable values: it may put something there."""
        return [_contents(value) for value in (*args, *kwargs.values()) if not isinstance(value, _IMMUTABLE)]


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
        self._tree: Tree | None = None  # of the first micro-batch
        self.tensors: list[torch.Tensor] = []
        self._like: list[tuple[torch.Size, torch.dtype, torch.device]] = []

    def add(self, start: int, stop: int, output: Any) -> None:
        tree = Tree(output)
        if self._tree is None:
            self._tree = tree
            if stop - start == self._num_rows:
                self.tensors = tree.tensors
            else:
                self.tensors = [self._empty_whole(t, stop - start) for t in tree.tensors]
            self._like = [(t.shape, t.dtype, t.device) for t in self.tensors]
        if stop - start != self._num_rows:
            self._put(start, stop, tree.tensors)
        tree.drop_tensors()

    def _put(self, start: int, stop: int, tensors: list[torch.Tensor]) -> None:
        for whole, part in zip(self.tensors, tensors, strict=True):
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
        self.tensors = []

    def imitate(self, num_rows: int) -> list[torch.Tensor]:
        """Zeros in the shape that these outputs would have with another number of rows."""
        return [
            torch.zeros(
                (shape[0] // self._num_rows * num_rows, *shape[1:]) if shape else (), dtype=dtype, device=device
            )
            for shape, dtype, device in self._like
        ]  # fmt: skip

    def rebuild(self, tensors: Iterable[torch.Tensor]) -> Any:
        """Return the output structure with these tensors in it."""
        assert self._tree is not None
        return self._tree.rebuild(tensors)
