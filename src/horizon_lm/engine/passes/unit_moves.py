"""The data movements of an operation: a table of functions by kind of operation.

Movements that depend on the batch are bound later, by the code that knows them:

- rows of the embedding, in both directions, and the update of these rows: `engine.units.embedding`,
- boundaries to offload: `BlockComputation._bind_offload`,
- experts that tokens are routed to: `engine.units.tiled_computation`,
- updates of a backward pass: `BackwardPass.note_written`.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import ClassVar

import torch

from horizon_lm.common.units import EMBED, Unit
from horizon_lm.device.transfers import Copy, Move
from horizon_lm.distributed.collectives import Gather, Reduce
from horizon_lm.engine.passes.engine_state import EngineState
from horizon_lm.engine.passes.forward_state import ForwardState
from horizon_lm.schedule.ops import Kind, Op


class UnitMoves:
    """The movements of the operations of a starting pass.

    Called with an operation, it returns its moves; None if they depend on the batch, and are bound later (`Cursor.bind`).

    Args:
        engine: the parts of the engine.
        differentiated: the forward pass that a backward pass belongs to; None for a forward pass.
        routed: blocks of whose experts only those are streamed that tokens are routed to.
    """

    def __init__(
        self, engine: EngineState, differentiated: ForwardState | None = None, routed: Collection[Unit] = ()
    ) -> None:
        self._engine, self._differentiated, self._routed = engine, differentiated, routed

    def __call__(self, op: Op) -> Sequence[Move] | None:
        moves_of = self._BY_KIND.get(op.kind)
        if moves_of is None or (op.unit == EMBED and op.kind != Kind.UPDATE):  # the rows depend on the batch
            return None
        return moves_of(self, op)

    def _stream_in(self, op: Op) -> list[Move] | None:
        """Return the moves that stream a unit into its slot: copies, and the decoding of quantized tensors. Low halves of fp32 masters stay
        on the host. If the block is routed, only its core is moved here, and its tiles are bound later.
        """
        engine, is_routed = self._engine, op.unit.owner in self._routed
        if is_routed and op.unit.is_tile:  # bound when it is known which experts its tokens are routed to
            return None
        part = engine.tiles.cores[op.unit] if is_routed else engine.part_of(op.unit)
        slot = engine.memory.weights_of(op.unit)
        # Each of several ranks copies its own ranges, also of codes and scales, which are decoded once they are gathered. The last cut
        # is the length of what is gathered; 0 if nothing is quantized, or for a single rank.
        if part.packed_cuts[-1]:
            return [*part.copies(slot), *part.copies_of_codes(engine.memory.packed_of(op.unit))]
        return part.moves(slot, engine.tiles.decoded(op.unit))

    def _gather(self, op: Op) -> list[Move]:
        """Return the moves that gather a unit from all ranks in its slot, and decode its quantized tensors there."""
        engine, part = self._engine, self._engine.part_of(op.unit)
        slot, group = engine.memory.weights_of(op.unit), engine.mesh.gather
        moves: list[Move] = [
            Gather(group, buffer[: cuts[-1]], cuts) for buffer, cuts in zip(slot, part.cuts, strict=True) if cuts[-1]
        ]
        if not part.packed_cuts[-1]:
            return moves
        packed = engine.memory.packed_of(op.unit)[: part.packed_cuts[-1]]
        decoding = part.decoding_there(slot, packed, engine.tiles.decoded(op.unit))
        return [*moves, Gather(group, packed, part.packed_cuts), *decoding]

    def _fetch(self, op: Op) -> list[Move]:
        """Return the copy of an activation checkpoint from host memory into the ring; none for a block that had no inputs on this rank."""
        assert self._differentiated is not None
        index = op.unit.block_index
        if index not in self._differentiated.boundaries:
            return []
        host = self._differentiated.boundary(index)
        # Blocks alternate between two buffers, so the next boundary is fetched while this one is in use.
        return [Copy(self._engine.memory.ring.get(host.numel(), torch.uint8, index % 2), host, host.numel())]

    def _reduce(self, op: Op) -> list[Move]:
        """Return the moves that sum a unit's gradients over the ranks."""
        engine = self._engine
        pairs = zip(engine.memory.grads_of(op.unit), engine.part_of(op.unit).grad_cuts, strict=True)
        return [Reduce(engine.mesh.reduce, buffer, cuts) for buffer, cuts in pairs if cuts[-1]]

    def _stream_out(self, op: Op) -> list[Move]:
        """Return the landing of a unit's gradients in host memory, and begin the sums of their squares unless a part of the unit
        lands earlier in this pass.
        """
        engine, owner = self._engine, self._engine.slab_unit(op.unit.owner)
        if engine.tiles.lands_first(op.unit):
            engine.grads.begin_landings(owner)
        return engine.grads.moves(owner, engine.memory.grads_of(op.unit), engine.part_of(op.unit))

    def _update(self, op: Op) -> Sequence[Move] | None:
        """Return what is left of the embedding's update, in a forward pass. In a backward pass, the update of a unit is bound
        when its gradients are complete.
        """
        table = self._engine.updates.table
        return None if table is None or self._differentiated is not None else table.rest()

    # Functions, not bound methods: an object that refers to itself keeps the engine until the garbage collector runs.
    _BY_KIND: ClassVar[Mapping[Kind, Callable[["UnitMoves", Op], Sequence[Move] | None]]] = {
        Kind.STREAM_IN: _stream_in,
        Kind.GATHER: _gather,
        Kind.FETCH: _fetch,
        Kind.REDUCE: _reduce,
        Kind.STREAM_OUT: _stream_out,
        Kind.UPDATE: _update,
    }
