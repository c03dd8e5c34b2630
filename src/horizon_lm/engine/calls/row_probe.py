"""Find the rows of a block's inputs, by running the model once with one more row.

A block's input may have its rows in any dimension, or none; the dimension that grows with the batch has them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.micro_batches import BlockCall
from horizon_lm.engine.passes.tree import Tree
from horizon_lm.engine.units.blocks import Blocks
from horizon_lm.engine.units.embedding import StreamedEmbedding
from horizon_lm.model.trial import TrialDoneError, answering, answers_of


class RowProbe:
    """A probe of the running forward pass."""

    def __init__(
        self, engine: Engine, blocks: Blocks, tables: Sequence[StreamedEmbedding], call_model: Callable[..., Any]
    ) -> None:
        self._engine, self._blocks, self._tables, self._call_model = engine, blocks, tables, call_model
        self._calls: Sequence[dict[str, Any]] = []  # the arguments of the running forward pass, by batch

    @contextmanager
    def of(self, calls: Sequence[dict[str, Any]]) -> Iterator[None]:
        """Context manager: keep the arguments of the running forward pass, by batch."""
        self._calls = calls
        try:
            yield
        finally:
            self._calls = []

    def shapes(self, index: int, batch: int) -> list[torch.Size]:
        """Return the shapes of the inputs of a block, by its index, for a batch of the pass with one more row."""
        rows = self._engine.forward.num_rows[batch]
        arguments = Tree(self._calls[batch])
        pairs = zip(arguments.paths, arguments.tensors, strict=True)
        call = arguments.rebuild([_one_more_row(path, tensor, rows) for (path, _), tensor in pairs])
        shapes: list[torch.Size] = []

        def answer(reached: int, *args: Any, **kwargs: Any) -> Any:
            """Return zeros for an earlier block. At the block to probe, take the shapes of its inputs, and end the probe."""
            if reached == index:
                shapes.extend(t.shape for t in BlockCall(args, kwargs).tensors)
                raise TrialDoneError
            # Earlier blocks have been computed in the running pass, so the structure of their outputs is known.
            outputs = self._blocks.outputs[reached][batch]
            # The second part of a block's outputs is those captured inside of it (`run_block`); a probe captures none.
            output, _ = outputs.rebuild(outputs.imitate(rows + 1))
            return output

        # Embedding and earlier blocks answer with zeros in the right shapes, so a probe needs no weights on the device.
        answers = answers_of(self._engine.parts.blocks, answer) | {
            table.module: partial(self._zeros, table.width) for table in self._tables
        }
        # Code outside of blocks runs a second time here, and must not draw the numbers of the pass that it interrupts.
        with self._engine.device.rng_state_restored(), answering(answers), torch.no_grad():
            self._call_model(**call)  # whose end, by TrialDoneError, is the end of this context
            raise AssertionError(f"block {index} was not reached by the probe")
        return shapes

    def _zeros(self, width: int, ids: torch.Tensor) -> torch.Tensor:
        """Return zeros for the hidden states (B, T, H) of ids (B, T)."""
        engine = self._engine
        return torch.zeros((*ids.shape, width), dtype=engine.options.compute_dtype, device=engine.device.torch_device)


def _one_more_row(path: str, value: torch.Tensor, rows: int) -> torch.Tensor:
    """Return a tensor among the model's arguments, at this path, with its first row repeated at the end."""
    # One-dimensional arguments, such as cache positions, count tokens.
    if value.ndim < 2:
        return value
    # Rows are dimension 0, except in positions with several coordinates (M-RoPE), which are (3, B, T).
    dim = 1 if path == "['position_ids']" and value.ndim == 3 else 0
    if value.shape[dim] != rows:
        return value
    return torch.cat([value, value.narrow(dim, 0, 1)], dim)
