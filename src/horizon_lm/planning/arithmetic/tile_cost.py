"""The cost of a block whose experts are moved in tiles: work and traffic of its core and of each tile."""

from dataclasses import replace

from horizon_lm.planning.arithmetic.outline import BlockKind, CoreCosts, Linear, Work
from horizon_lm.planning.arithmetic.step import Step
from horizon_lm.schedule.ops import Kind, Op


class TileCost:
    """The cost of the operations of blocks with tiles.

    Args:
        step: the step, with tiles.
    """

    def __init__(self, step: Step) -> None:
        self._step, self._slices = step, step.settings.slices

    def share(self, op: Op) -> float:
        """Return the share of a block's experts that an operation moves or computes; 0 for one of the block's core."""
        return self._step.tiled.share(op.unit) if op.unit.is_tile else 0.0

    def work(self, op: Op, kind: BlockKind) -> Work:
        """Return the work of the block's own code in an operation of its core or of a tile, summed over micro-batches."""
        core, total = kind.core, Work()
        assert core is not None  # or the block would have no experts that can be cut into tiles
        if op.kind == Kind.STAGE:  # only rounds gradients, whose bytes `StepCost` adds
            return total
        for rows in self._slices:
            total += self._of_tile(op, kind, core, rows) if op.unit.is_tile else self._of_core(op, core, rows)
        return total

    def _of_core(self, op: Op, core: CoreCosts, rows: int) -> Work:
        """Return the work of an operation of the block's core for a micro-batch of ``rows``."""
        if op.kind == Kind.ROUTE:
            return core.before.at(rows)
        if op.kind == Kind.FORWARD:
            return core.forward.at(rows) - core.before.at(rows)
        recompute = core.recompute.at(rows)
        if op.kind == Kind.RECOMPUTE:
            return recompute
        # With several micro-batches, each graph is computed again here: only one at a time has room.
        return core.backward.at(rows) + (recompute if len(self._slices) > 1 else Work())

    def _of_tile(self, op: Op, kind: BlockKind, core: CoreCosts, rows: int) -> Work:
        """Return the work of a tile for a micro-batch of ``rows``. Its backward pass computes its forward pass again."""
        of_experts = _work_of_experts(kind.forward, core.forward, rows)
        if op.kind == Kind.BACKWARD:
            of_experts += _work_of_experts(kind.backward, core.backward, rows)
        # Each tile launches as many kernels as all experts at once.
        return replace(of_experts * self.share(op), num_ops=of_experts.num_ops)

    def rows_bytes(self, op: Op) -> float:
        """Return the device bytes that the engine reads and writes around a tile: rows (H,) of the tokens that it computes."""
        # In the forward pass inputs are gathered, and outputs put in their place and added; in the backward pass the gradients of outputs
        # are gathered, too.
        accesses = 7 if op.kind == Kind.BACKWARD else 5
        experts = self._step.tiled.model.experts[op.unit.block_index]
        return accesses * self.share(op) * experts.per_token * self._step.hidden


def _work_of_experts(whole: Linear[Work], core: Linear[Work], rows: int) -> Work:
    """Return the work of all experts of a block: the work of the whole block, less the work of its core."""
    return whole.at(rows) - core.at(rows)
