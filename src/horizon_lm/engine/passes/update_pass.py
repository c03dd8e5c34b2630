"""The update pass of the optimizer, and the part of it that is computed on the device, between two parts in host memory.

The first part leaves a matrix in the gradient's place. It is streamed into the slot of the unit's gradients, which have landed, is
replaced there, and returns to the same place, where the second part finds it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from horizon_lm.common.units import Unit
from horizon_lm.device.transfers import Copy, Move
from horizon_lm.distributed.collectives import Gather
from horizon_lm.engine.host.updates import TableUpdate
from horizon_lm.engine.passes.engine_state import EngineState
from horizon_lm.schedule.ops import Kind, Op, Schedule


class DevicePart(NamedTuple):
    """The first part of a unit's update, and the computation on the device that follows it.

    Attributes:
        moves: the first part, in host memory.
        names: full names of the matrices that it leaves in place of their gradients.
        compute: replaces one of them, on the device.
    """

    moves: Sequence[Move]
    names: Sequence[str]
    compute: Callable[[torch.Tensor], None]


class UpdatePass(NamedTuple):
    """The update of all units.

    Attributes:
        schedule: the pass over all units except the embedding.
        moves: the pieces of each unit's update, or of its second part.
        table: the embedding's update (`PendingUpdates`).
        on_device: the first part and the computation on the device, of the units that have these.
    """

    schedule: Schedule
    moves: Mapping[Unit, Sequence[Move]]
    table: TableUpdate | None
    on_device: Mapping[Unit, DevicePart]

    @property
    def changes_blocks(self) -> bool:
        """True if weights of blocks are updated."""
        return any(pieces and unit.is_block for unit, pieces in self.moves.items())


class UpdateMoves:
    """The movements of the operations of an update pass.

    Args:
        engine: the parts of the engine.
        update: the pass.
    """

    def __init__(self, engine: EngineState, update: UpdatePass) -> None:
        self._engine, self._update = engine, update

    def __call__(self, op: Op) -> Sequence[Move]:
        """Return the moves of an operation: a part of an update, or copies of matrices to the device, between ranks, or back."""
        if op.kind == Kind.UPDATE:
            return self._update.moves[op.unit]
        if op.kind == Kind.ADVANCE:
            return self._update.on_device[op.unit].moves
        # Weights that are kept in float32 are no matrices.
        slab, buffer = self._engine.slabs(op.unit).plain, self._engine.memory.grads_of(op.unit)[0]
        if op.kind == Kind.GATHER_MATRICES:
            return [Gather(self._engine.mesh.gather, buffer[: slab.grad_cuts[-1]], slab.grad_cuts)]
        on_host, on_device = slab.grads[slab.own_grads], buffer[slab.own_grads]
        num_bytes = on_host.numel() * on_host.element_size()
        returns = op.kind == Kind.RETURN_MATRICES
        return [Copy(on_host, on_device, num_bytes) if returns else Copy(on_device, on_host, num_bytes)]


@torch.no_grad()
def compute_on_device(engine: EngineState, update: UpdatePass) -> None:
    """Run the computations of an update pass that has been started."""
    for op in update.schedule.ops:
        if op.kind == Kind.ORTHOGONALIZE:
            part, layout = update.on_device[op.unit], engine.slabs(op.unit).grad_layout
            slot = engine.memory.grads_of(op.unit)
            with engine.cursor.compute(op.kind, op.unit), torch.autocast(slot[0].device.type, enabled=False):
                for name in part.names:
                    part.compute(layout.view(slot, name))
