"""Find the rows of a block's inputs, by running the model once with one more row.

A block's input may have its rows in any dimension, or none; the dimension that grows with the batch has them.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.micro_batches import ProbeDoneError
from horizon_lm.engine.units.blocks import Blocks
from horizon_lm.engine.units.embedding import StreamedEmbedding


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
        call = {k: _one_more_row(k, v, rows) for k, v in self._calls[batch].items()}
        shapes: list[torch.Size] = []
        # Code outside of blocks runs a second time here, and must not draw the numbers of the pass that it interrupts.
        state = self._engine.device.rng_state()
        self._probe((index, batch, shapes), rows + 1)
        try:
            # Embedding and earlier blocks answer with zeros in the right shapes, so a probe needs no weights on the
            # device.
            with torch.no_grad():
                self._call_model(**call)
        except ProbeDoneError:
            return shapes
        finally:
            # Also after an error, or the next call of a block would be taken for a probe.
            self._probe(None, None)
            self._engine.device.set_rng_state(state)
        raise AssertionError(f"block {index} was not reached by the probe")

    def _probe(self, probing: tuple[int, int, list[torch.Size]] | None, rows: int | None) -> None:
        """Let blocks and embeddings answer with shapes alone, or compute again.

        Args:
            probing: the block and the batch to probe, and the list that receives the shapes; None to compute again.
            rows: rows of the embeddings' answers; None to compute again.
        """
        self._blocks.probing = probing
        for table in self._tables:
            table.probe_rows = rows


def _one_more_row(name: str, value: Any, rows: int) -> Any:
    """Return an argument of the model with its first row repeated at the end."""
    # One-dimensional arguments, such as cache positions, count tokens.
    if not isinstance(value, torch.Tensor) or value.ndim < 2:
        return value
    # Rows are dimension 0, except in positions with several coordinates (M-RoPE), which are (3, B, T).
    dim = 1 if name == "position_ids" and value.ndim == 3 else 0
    if value.shape[dim] != rows:
        return value
    return torch.cat([value, value.narrow(dim, 0, 1)], dim)
