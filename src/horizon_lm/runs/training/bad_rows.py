"""Find the rows of a step that make its loss or its gradient NaN or infinite, by computing parts of the batch again."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from horizon_lm.common.units import EMBED, HEAD, Unit, block
from horizon_lm.engine.streamed import engine_of
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.data.loader import collate
from horizon_lm.runs.data.token_dataset import Row
from horizon_lm.runs.objective.base import CustomObjective, Objective

_MOST_SHOWN = 8  # rows, or micro-batches, in a sentence
_MOST_PASSES = 32  # over the model; one bad row among 64 takes 13


@dataclass(frozen=True, slots=True)
class BadRows:
    """The rows of a step that are not finite by themselves.

    Attributes:
        rows: their positions in the batch, from 0.
        micro_batches: the device micro-batches that hold their sequences, from 0.
        num_micro_batches: the number of device micro-batches in the step.
        is_complete: every row was tried, alone or with others.
        unit: the first unit whose output is not finite, for a loss; None for a gradient, or if no single row is at fault.
    """

    rows: Sequence[int]
    micro_batches: Sequence[int]
    num_micro_batches: int
    is_complete: bool
    unit: Unit | None = None

    def describe(self, places: Sequence[str]) -> str:
        """Return a sentence about the rows, with their origins out of ``places``; empty if no row was found, but not all were tried."""
        if not self.rows:
            return "No single row causes it by itself." if self.is_complete else ""
        shown = ", ".join(f"{row + 1} ({places[row]})" for row in self.rows[:_MOST_SHOWN])
        more = "" if self.is_complete and len(self.rows) <= _MOST_SHOWN else " and perhaps others"
        held_by = ", ".join(str(number + 1) for number in self.micro_batches[:_MOST_SHOWN])
        word = "micro-batch" if len(self.micro_batches) == 1 else "micro-batches"
        return f"It comes from row {shown}{more} of {len(places)}, in {word} {held_by} of {self.num_micro_batches}."


def find_bad_rows(
    model: Any, objective: Objective, batch: Batch, table: Sequence[Row], *, with_gradient: bool
) -> BadRows | None:
    """Return the rows that make a step's loss, or its gradient, not finite. Gradients are empty afterwards.

    The batch is computed again with the present weights, and then the halves of each part that is not finite, down to single rows.

    Args:
        model: the streamed model.
        objective: the objective of the step.
        batch: the batch of the step.
        table: the rows of its dataset.
        with_gradient: look at the gradient, not only at the loss.

    Returns:
        None if the rows cannot be told apart: a user's own loss is not called again, and with ``update_in_backward`` a
        backward would change the weights.
    """
    updates_in_backward = engine_of(model).updates.optimizer_in_backward is not None
    if isinstance(objective, CustomObjective) or (with_gradient and updates_in_backward):
        return None

    def part_of(rows: Sequence[int]) -> Batch:
        """Return a batch of some rows of the batch, with the same padding."""
        indices = [batch.rows[row] for row in rows]
        return collate([table[index] for index in indices], indices, batch.input_ids.shape[1])

    model.zero_grad()  # a backward pass would add to the gradients of the step
    is_finite = _gradient_is_finite if with_gradient else _loss_is_finite

    def is_bad(rows: Sequence[int]) -> bool:
        """Return whether the loss or the gradient of a batch of these rows is not finite."""
        part = part_of(rows)
        if not part.num_trained:  # its loss is a mean over nothing
            return False
        try:
            return not is_finite(model, objective, part)
        finally:
            model.zero_grad()

    rows, is_complete = search_by_halving(len(batch.places), is_bad, max_calls=_MOST_PASSES)
    num_sequences = len(batch.input_ids)
    micro_batch_size = engine_of(model).options.rows_at_once(num_sequences)
    micro_batches = sorted({index // micro_batch_size for index in _sequence_indices(batch, rows)})
    unit = _first_bad_unit(model, objective, part_of(rows[:1])) if rows and not with_gradient else None
    return BadRows(rows, micro_batches, -(-num_sequences // micro_batch_size), is_complete, unit)


def search_by_halving(num_rows: int, is_bad: Callable[[Sequence[int]], bool], max_calls: int) -> tuple[list[int], bool]:
    """Return the rows that are bad by themselves, in order, and whether ``max_calls`` of ``is_bad`` sufficed to try all."""
    bad_rows: list[int] = []
    untried_parts: list[Sequence[int]] = [range(num_rows)]  # a stack; a bad part is replaced by its halves
    calls_left = max_calls
    while untried_parts and calls_left:
        rows, calls_left = untried_parts.pop(), calls_left - 1
        if not is_bad(rows):
            continue
        if len(rows) == 1:
            bad_rows.append(rows[0])
        else:
            middle = len(rows) // 2
            untried_parts += [rows[middle:], rows[:middle]]  # the first half is searched first
    return bad_rows, not untried_parts


def _sequence_indices(batch: Batch, rows: Sequence[int]) -> list[int]:
    """Return the indices of the sequences of some rows: one for each row, or a chosen and a rejected one, all chosen ones first."""
    num_rows = len(batch.places)
    return [start + row for start in range(0, len(batch.input_ids), num_rows) for row in rows]


def _loss_is_finite(model: Any, objective: Objective, batch: Batch) -> bool:
    with torch.no_grad():
        return math.isfinite(float(objective(model, batch).value.item()))


def _gradient_is_finite(model: Any, objective: Objective, batch: Batch) -> bool:
    """Return whether the gradients of a batch are finite, by their sums of squares. The caller removes them."""
    engine = engine_of(model)
    objective(model, batch).value.backward()
    engine.access.wait_for_grads()
    # None: a slab without a gradient.
    squared_norms = map(engine.grads.squared_norms.of, engine.store.slabs)
    return all(norm is None or math.isfinite(norm) for norm in squared_norms)


def _first_bad_unit(model: Any, objective: Objective, batch: Batch) -> Unit:
    """Return the first unit whose output for a token is not finite in a forward pass: the head if all other outputs are."""
    mask = batch.attention_mask
    bad_units: list[Unit] = []  # in the order in which they are computed

    def check(unit: Unit, hidden: torch.Tensor) -> None:
        """Append the unit to ``bad_units`` if its output (B, T, H) has values that are not finite."""
        finite = torch.isfinite(hidden).all(-1).cpu()
        if mask is not None and mask.shape == finite.shape:
            finite |= mask == 0  # nothing depends on what a block computes for padding
        if not finite.all():
            bad_units.append(unit)

    def check_output(unit: Unit, _block: nn.Module, _args: Any, output: Any) -> None:
        check(unit, output[0] if isinstance(output, tuple) else output)

    parts = engine_of(model).parts
    # The input of the decoder's first block is the output of the embedding.
    first = parts.blocks[parts.decoder_blocks.start]
    handles = [first.register_forward_pre_hook(lambda _block, args: check(EMBED, args[0]) if args else None)]
    for index, module in enumerate(parts.blocks):
        handles.append(module.register_forward_hook(partial(check_output, block(index))))
    try:
        _loss_is_finite(model, objective, batch)
    finally:
        for handle in handles:
            handle.remove()
    return bad_units[0] if bad_units else HEAD
