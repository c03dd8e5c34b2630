"""Tiles of experts in a plan: the sizes that a run may choose, and the work and traffic of a core and of each tile."""

from dataclasses import replace

from horizon_lm.common.optimizers import NO_MATRICES_OF_TILES
from horizon_lm.errors import ConfigError, ModelNotSupportedError
from horizon_lm.planning.arithmetic.outline import BlockKind, CoreCosts, Linear, ModelOutline, Work
from horizon_lm.planning.arithmetic.request import Request
from horizon_lm.planning.arithmetic.step import Step
from horizon_lm.schedule.ops import Kind, Op

NOT_COMPILED = "compile=True compiles whole blocks, which expert_tile cuts; leave one of them unset"


def no_experts(name: str) -> str:
    """Return why a model's blocks cannot be cut."""
    return (
        f"expert_tile: {name} has no experts that can be cut into tiles (only those of transformers' experts interface can, without "
        "weights that they share and without adapters of their biases); leave it unset"
    )


def require_tiles(outline: ModelOutline, request: Request) -> None:
    """Raise ConfigError if a run cannot have the tiles that it asks for, and ModelNotSupportedError if its model cannot."""
    if request.expert_tile is None:
        return
    if problem := _excluding_setting(request):
        raise ConfigError(problem)
    if not outline.layout.experts:
        raise ModelNotSupportedError(no_experts(outline.name))


def _excluding_setting(request: Request) -> str:
    """Return the reason why a setting of the run excludes tiles; empty if none does."""
    if request.compile is True:
        return NOT_COMPILED
    return NO_MATRICES_OF_TILES if request.optimizer.orthogonalizes else ""


def tile_sizes(outline: ModelOutline, request: Request) -> list[int]:
    """Return the numbers of experts in a tile to try, largest first: powers of two that make at most `_MOST_TILES` tiles. None if a run
    cannot have tiles, or if the costs of the model are unknown.
    """
    if _excluding_setting(request) or outline.unknown:
        return []
    num_experts = max((each.count for each in outline.layout.experts.values()), default=0)
    powers = (2**exponent for exponent in reversed(range(num_experts.bit_length())))
    return [size for size in powers if num_experts / _MOST_TILES <= size < num_experts]


_MOST_TILES = 64  # of a block: smaller tiles are slower, and if these do not fit, something else is too large


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
        # In BACKWARD. With several micro-batches, each graph is computed a second time here, since only one at a time has room.
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
