"""Find the rows of blocks' inputs, by running the model's outer code once more, for a batch with one more row.

The row dimension of an input cannot be determined from one shape: a rope table may be (1, T, D) or (B, T, D), M-RoPE
positions are (3, B, T). The dimension that grows with the batch has the rows.

Shapes: B batch rows, T tokens of a row, D size of an attention head.
"""

from collections.abc import Callable
from typing import Any

import torch

from horizon_lm.common.streaming_options import WHOLE_BATCHES
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.micro_batches import BlockCall, BlockCalls, RowDim, cut_batches
from horizon_lm.engine.passes.tree import Path, Tree
from horizon_lm.errors import HorizonError, ModelNotSupportedError
from horizon_lm.model.image_inputs import MARKS
from horizon_lm.model.trial import TrialDoneError, answering, answers_of


class RowDims:
    """The row dimensions of blocks' inputs, which are found when a block is first called with such inputs.

    Which inputs a block has may depend on values: transformers makes no mask for a batch without padding, for example. So they are
    known only within the pass.

    Args:
        engine: the engine of the model.
        call_model: the model's own forward method.
    """

    def __init__(self, engine: Engine, call_model: Callable[..., Any]) -> None:
        self._engine, self._call_model = engine, call_model
        self._known: dict[tuple[Any, Path], int | None] = {}  # by the kind of call, and the path of the input

    def of(self, index: int, calls: BlockCalls) -> list[RowDim]:
        """Return the row dimension of each tensor input of a block; None if it has none, or if its batch has a single micro-batch."""
        cut = cut_batches(calls.cut.parts)
        dims: list[RowDim] = []
        for batch, call in enumerate(calls.calls):
            dims += self._of_batch(index, batch, call) if batch in cut else [None] * len(call.paths)
        return dims

    def _of_batch(self, index: int, batch: int, call: BlockCall) -> list[int | None]:
        """Return the row dimension of each input of one batch."""
        arguments = self._engine.forward.batches[batch].call
        kind = tuple(sorted((name, _rank(value)) for name, value in arguments.items()))
        # Without the number of the block: one trial serves all blocks whose inputs have the same names and ranks.
        keys = [(kind, path) for path in call.paths]
        if any(key not in self._known for key in keys):
            self._known.update(zip(keys, self._find_by_trial(index, batch, call), strict=True))
        return [self._known[key] for key in keys]

    def _find_by_trial(self, index: int, batch: int, call: BlockCall) -> list[int | None]:
        """Return the dimension of each input that has one more entry for one more row.

        Raises:
            ModelNotSupportedError: a shape changes other than by one in one dimension, or the model computes no rows without images.
        """
        rows, dims = self._engine.forward.num_rows[batch], list[int | None]()
        try:
            shapes = self._larger_shapes(index, batch)
        except Exception as error:  # any error of the model's own code
            modal = self._engine.forward.batches[batch].modal
            if not modal or isinstance(error, HorizonError):
                raise
            raise ModelNotSupportedError(
                f"the model does not compute rows without {modal[0]} ({error}), so its rows cannot be cut into micro-batches; {WHOLE_BATCHES}"
            ) from error
        for (path, _), tensor in zip(call.paths, call.tensors, strict=True):
            shape = tensor.shape
            larger = shapes.get(path, shape)  # an argument with images, which some models hand on to blocks, is not cut
            changed = [dim for dim in range(len(shape)) if shape[dim] != larger[dim]]
            # Exactly one dimension may follow the rows, and by one entry for each row: otherwise a slice would cut a row in two.
            if changed and (len(changed) > 1 or (shape[changed[0]], larger[changed[0]]) != (rows, rows + 1)):
                raise ModelNotSupportedError(
                    f"the block input {path} has shape {tuple(shape)} for {rows} rows and {tuple(larger)} for {rows + 1}, so it "
                    f"cannot be cut into micro-batches; {WHOLE_BATCHES}"
                )
            dims.append(changed[0] if changed else None)
        return dims

    def _larger_shapes(self, index: int, batch: int) -> dict[str, torch.Size]:
        """Return the shapes of the inputs of a block for a batch of the pass with one more row, by their places among its arguments."""
        forward = self._engine.forward
        # Without images, of which the new row would need its own: blocks get inputs of the same shapes for the tokens that stand for them.
        left_out = forward.batches[batch].modal
        given = {name: value for name, value in forward.batches[batch].call.items() if name not in left_out}
        if left_out:  # nor the marks of these tokens, each group of which some models match with an image
            given |= {name: torch.zeros_like(value) for name, value in given.items() if name in MARKS}
        rows, arguments = forward.num_rows[batch], Tree(given)
        pairs = zip(arguments.paths, arguments.tensors, strict=True)
        call = arguments.rebuild([_repeat_first_row(path, tensor, rows) for (path, _), tensor in pairs])
        outputs = forward.outputs
        return shapes_at(
            self._engine, self._call_model, index, call, lambda reached: outputs[reached][batch].zeros(rows + 1)
        )


def shapes_at(
    engine: Engine, call_model: Callable[..., Any], index: int, call: dict[str, Any], output: Callable[[int], Any]
) -> dict[str, torch.Size]:
    """Run the model's outer code as far as a block. Return the shapes of the block's inputs, by their places among its arguments.

    Args:
        engine: the engine of the model, in a pass.
        call_model: the model's own forward method.
        index: the block's index.
        call: the arguments of the model.
        output: function that returns an output in place of that of an earlier block.
    """
    parts, shapes = engine.parts, dict[str, torch.Size]()

    def answer(reached: int, *args: Any, **kwargs: Any) -> Any:
        """Answer the call of an earlier block. At the block itself, take the shapes of its inputs, and end the trial."""
        if reached == index:
            found = BlockCall(args, kwargs)
            shapes.update((path, each.shape) for (path, _), each in zip(found.paths, found.tensors, strict=True))
            raise TrialDoneError
        return output(reached)

    def embed(ids: torch.Tensor) -> torch.Tensor:
        """Return zeros for the hidden states (B, T, H) of ids (B, T)."""
        size = (*ids.shape, parts.hidden)
        return torch.zeros(size, dtype=engine.options.compute_dtype, device=engine.device.torch_device)

    answers = answers_of(parts.blocks, answer) | {parts.embed: embed}
    # The trial must not draw the numbers of the pass that it interrupts.
    with engine.device.rng_state_restored(), answering(answers), torch.no_grad():
        call_model(**call)  # whose end, by TrialDoneError, is the end of this context
        raise AssertionError(f"block {index} was not reached")
    return shapes


def _rank(value: Any) -> Any:
    """Return the number of dimensions of a tensor, or the type of another value."""
    return value.ndim if isinstance(value, torch.Tensor) else type(value).__name__


def _repeat_first_row(path: str, value: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a tensor among the model's arguments, at this path, with its first row repeated at the end."""
    # One-dimensional arguments, such as cache positions, count tokens.
    if value.ndim < 2:
        return value
    # Rows are dimension 0, except in positions with several coordinates (M-RoPE), which are (3, B, T).
    dim = 1 if path == "['position_ids']" and value.ndim == 3 else 0
    if value.shape[dim] != rows:
        return value
    return torch.cat([value, value.narrow(dim, 0, 1)], dim)
