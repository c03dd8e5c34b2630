"""The cost of a block whose experts are moved in tiles: work and traffic of its core and of each tile."""

from collections.abc import Sequence
from dataclasses import replace

from horizon_lm.planning.experts import ExpertSizes
from horizon_lm.planning.outline import BlockKind, CoreCosts, Linear, Work
from horizon_lm.planning.step import Step
from horizon_lm.ranges import length, overlap
from horizon_lm.schedule.ops import Kind, Op
from horizon_lm.slabs import UnitCuts


class TileCost:
    """The cost of the operations of such blocks.

    Args:
        step: the step, with tiles.
    """

    def __init__(self, step: Step) -> None:
        self._step, self._slices = step, step.settings.slices

    def experts(self, op: Op) -> ExpertSizes | None:
        """Return the experts of the block of an operation; None if it is not cut into tiles."""
        if not (op.unit.is_block or op.unit.is_tile):
            return None
        return self._step.tiled_experts(op.unit.block_index)

    def share(self, op: Op, experts: ExpertSizes) -> float:
        """Return the share of a block's experts that an operation moves or computes; 0 for one of the block's core."""
        size = self._step.settings.expert_tile
        assert size is not None
        return experts.share(size, op.unit.tile_number) if op.unit.is_tile else 0.0

    def elements(self, op: Op, experts: ExpertSizes, tensors: Sequence[int]) -> float:
        """Return the elements that an operation moves, of the ``tensors`` of a block: those of its tile, or all but the experts'."""
        if op.unit.is_tile:
            return self.share(op, experts) * sum(experts.of(tensors))
        return sum(experts.others(tensors))

    def largest_part(self, op: Op) -> float:
        """Return the share of the busiest rank in what all of them move in an operation: the others wait for it.

        Codes and scales are taken to be cut as the weights that they stand for.
        """
        shard, experts = self._step.settings.shard, self.experts(op)
        if experts is None or shard.is_whole:
            return 1 / shard.count
        tensors, size = self._step.outline.sizes.units[op.unit.owner], self._step.settings.expert_tile
        assert size is not None
        moved = experts.ranges(tensors, size, op.unit.tile_number if op.unit.is_tile else None)
        ranges = UnitCuts(tensors, shard=shard).ranges
        of_ranks = [sum(length(overlap(part, own)) for part in moved) for own in ranges]
        return max(of_ranks) / sum(of_ranks)

    def work(self, op: Op, kind: BlockKind, experts: ExpertSizes) -> Work:
        """Return the work of the block's own code in an operation of its core or of a tile, summed over micro-batches."""
        core, total = kind.core, Work()
        assert core is not None  # or the block would have no experts that can be cut into tiles
        if op.kind == Kind.STAGE:  # only rounds gradients, whose bytes `StepCost` adds
            return total
        for rows in self._slices:
            total += self._of_tile(op, kind, core, rows, experts) if op.unit.is_tile else self._of_core(op, core, rows)
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

    def _of_tile(self, op: Op, kind: BlockKind, core: CoreCosts, rows: int, experts: ExpertSizes) -> Work:
        """Return the work of a tile for a micro-batch of ``rows``. Its backward pass computes its forward pass again."""
        of_experts = _difference(kind.forward, core.forward, rows)
        if op.kind == Kind.BACKWARD:
            of_experts += _difference(kind.backward, core.backward, rows)
        # Each tile launches as many kernels as all experts at once.
        return replace(of_experts * self.share(op, experts), num_ops=of_experts.num_ops)

    def rows_bytes(self, op: Op, experts: ExpertSizes) -> float:
        """Return the device bytes that the engine reads and writes around a tile: rows (H,) of the tokens that it computes."""
        # In the forward pass inputs are gathered, and outputs put in their place and added; in the backward pass the gradients of outputs
        # are gathered, too.
        accesses = 7 if op.kind == Kind.BACKWARD else 5
        return accesses * self.share(op, experts) * experts.per_token * self._step.hidden


def _difference(whole: Linear[Work], core: Linear[Work], rows: int) -> Work:
    """Return the work of all experts of a block: that of the whole block without that of its core."""
    return whole.at(rows) - core.at(rows)
