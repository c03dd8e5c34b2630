"""A backward pass of the model, which owns its state from its first autograd node to its last, or its failure.

An error outside of the engine's nodes, as in a hook, is noticed by the next forward pass (`Engine._abandon_unfinished`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from horizon_lm.common.units import EMBED, HEAD, OUTER, Unit, block
from horizon_lm.device.transfers import Move, chained
from horizon_lm.engine.host.updates import UnitOptimizer
from horizon_lm.engine.passes.engine_state import EngineState
from horizon_lm.engine.passes.forward_pass import ForwardPass, config_of
from horizon_lm.engine.passes.forward_state import ForwardState
from horizon_lm.engine.passes.unit_moves import UnitMoves
from horizon_lm.errors import StreamingError
from horizon_lm.schedule import build
from horizon_lm.schedule.ops import Kind


class BackwardPass:
    """A backward pass.

    Attributes:
        state: the state of the forward pass.
        ready: full names of the parameters whose gradients the enqueued computation has written, by unit.
        adapters: full names of the ready adapters inside blocks, which are landed with the outer parameters.
        has_updated: the pass has ended after it had issued updates, of which the cursor knows nothing any more.
    """

    def __init__(self, engine: EngineState, state: ForwardState) -> None:
        self._engine, self.state = engine, state
        self.ready: dict[Unit, list[str]] = {}
        self.adapters: set[str] = set()
        self.has_updated = False

    @property
    def trained(self) -> Mapping[Unit, list[str]]:
        """The full names of the parameters that required a gradient in the forward pass, by unit."""
        return self.state.trained

    def begin(self) -> None:
        """Start the pass: make its tasks. Autograd's nodes compute the units; the first one issues the copies before it."""
        engine, state = self._engine, self.state
        units = [EMBED, *map(block, range(engine.parts.num_blocks)), HEAD, OUTER]
        # By the unit that has the slab: a tied head is trained if the table is.
        trainable = [unit for unit in units if self.trained.get(engine.slab_unit(unit))]
        self._free_head_grads()
        schedule = build.backward(
            engine.layout, order=self._differentiated(), trainable=trainable, head_grads=state.has_head_grads
        )
        engine.mesh.require_same("the start of a pass", schedule.digest)
        engine.cursor.start(schedule, UnitMoves(engine, state))

    def _differentiated(self) -> list[Unit]:
        """Return the embedding and the blocks that the pass differentiates, on any rank, in the order of the forward pass."""
        engine, executed = self._engine, self.state.executed()
        if engine.mesh.size == 1 or not engine.parts.towers:
            return executed
        # A rank without images executes the nodes of all absent blocks; what another rank does not differentiate, it leaves out.
        own = [str(unit) for unit in executed if unit.is_block and unit.block_index not in self.state.order.absent]
        everywhere = {name for names in engine.mesh.exchange("the blocks of a backward pass", own) for name in names}
        return [unit for unit in self.state.order.units if unit == EMBED or str(unit) in everywhere]

    def visits(self, unit: Unit) -> bool:
        """Return whether the pass differentiates a block."""
        return self._engine.cursor.has(Kind.BACKWARD, unit)

    def _free_head_grads(self) -> None:
        """Free the head's gradient buffer for this pass.

        Gradients that another forward pass has left there are lost; its backward pass recomputes them.
        """
        lease = self._engine.between.head_grads_lease
        holder = lease.holder
        if holder is not None and holder is not self.state:
            holder.has_head_grads = False
        lease.release()

    def note_written(self, unit: Unit, names: list[str]) -> None:
        """Record that the enqueued computation has written these parameters' gradients, before they are landed. With
        ``update_in_backward``, all ranks call this together, and the unit's update is bound.
        """
        engine, optimizer = self._engine, self._engine.updates.optimizer_in_backward
        # A batch may leave a parameter unused, such as an expert; if another rank uses it, all of them update it alike.
        if optimizer is not None:
            names = self._written_anywhere({unit: names})[unit]
        self.ready[unit] = names
        # The table's update comes with the next forward pass, and a tied head's gradient is added to the table's.
        if optimizer is not None and unit != EMBED and engine.slab_unit(unit) == unit:
            engine.cursor.bind(Kind.UPDATE, unit, self._update_moves(optimizer, unit, names))

    def _update_moves(self, optimizer: UnitOptimizer, unit: Unit, names: list[str]) -> Sequence[Move]:
        """Return the update of these parameters of a unit, whose gradients land in slots."""
        slots, slabs = self._engine.grads.slots, self._engine.store.units[unit].saved
        assert slots is not None
        # Not strict, because `saved` leaves out a float32 slab without tensors, for which the slot has an empty buffer.
        moves = [
            optimizer.moves(slab, [name for name in names if name in slab.layout], grads)
            for slab, grads in zip(slabs, slots.slot_of(unit), strict=False)
        ]
        return chained(moves)

    def _written_anywhere(self, ready: dict[Unit, list[str]]) -> dict[Unit, list[str]]:
        """Return the parameters whose gradient any rank has written, by unit. All ranks call this together, for the same units."""
        own = {str(unit): names for unit, names in ready.items()}
        everywhere = self._engine.mesh.exchange("gradients of " + ", ".join(own), own)
        return {unit: [*dict.fromkeys(name for each in everywhere for name in each[str(unit)])] for unit in ready}

    def end(self) -> None:
        """End the pass. Its gradients are still landing, or are being applied."""
        engine = self._engine
        engine.grads.track_landings(engine.cursor.tasks_of(Kind.STREAM_OUT))
        engine.updates.add(engine.cursor.tasks_of(Kind.UPDATE))
        self.has_updated = engine.cursor.update_begun()
        engine.cursor.finish()
        self.state.consumed = True
        optimizer = engine.updates.optimizer_in_backward
        if optimizer is not None:
            engine.store.weights_changed()
            if self.ready.get(EMBED) or (engine.parts.tied and self.ready.get(HEAD)):
                assert engine.grads.slots is not None
                engine.updates.table = optimizer.table(engine.grads.slots.table_grads())
            return
        # The same parameters on all ranks: a rank whose batch has left one out still owns a part of the sum of the others.
        landed = [name for names in self._written_anywhere(self.ready).values() for name in names]
        engine.grads.publish(landed)
        # Not called here: other backward passes of the same graph may add to these gradients.
        engine.between.after_grad |= dict.fromkeys(landed)


@dataclass(slots=True)
class Running:
    """The passes that are running: a forward pass, or the backward pass of a graph, or neither."""

    forward: ForwardPass | None = None
    backward: BackwardPass | None = None


def require_possible(engine: EngineState, state: ForwardState) -> None:
    """Raise StreamingError for a backward pass that would compute wrong gradients."""
    engine.require_device()
    # Autograd runs the nodes of a backward pass with gradients enabled only for create_graph.
    if torch.is_grad_enabled():
        raise StreamingError("create_graph=True is not supported: a streamed model has no second derivatives")
    if not state.anchor.sees_whole_backward():
        raise StreamingError(
            "all gradients of a streamed model go to host memory, so backward(inputs=...) and torch.autograd.grad are not "
            "supported; call backward() and read param.grad, and freeze the other parameters (requires_grad_(False)) "
            "before the forward pass"
        )
    with torch._C.DisableTorchFunctionSubclass():
        trained = [name for names in state.trained.values() for name in names]
        frozen = next((name for name in trained if not engine.refs[name].param.requires_grad), None)
    # Plain autograd gives a frozen parameter no gradient; here its gradient would land with its unit, and count in the norm.
    if frozen is not None:
        raise StreamingError(
            f"{frozen} was frozen between this forward pass and its backward pass; set requires_grad before the forward pass"
        )
    # A write since the forward pass raises the version that is compared next.
    engine.foreign_writes.follow()
    state.check_usable(engine.store.version, config_of(engine))
