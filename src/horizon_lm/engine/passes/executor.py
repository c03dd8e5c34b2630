"""The executor: runs the passes of a training step and the updates between them.

``docs/architecture.md`` has a training step line by line. Shapes do not occur here: the executor moves whole slabs, and the
modules that compute a unit know its tensors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch.autograd import Variable

from horizon_lm.common.units import Unit
from horizon_lm.device.base import Device
from horizon_lm.distributed.mesh import Mesh
from horizon_lm.engine.host.parameters import call_after_grad
from horizon_lm.engine.passes.backward_pass import BackwardPass, Running, require_possible
from horizon_lm.engine.passes.device_buffers import CHANGEABLE, DeviceBuffers, EngineOptions
from horizon_lm.engine.passes.engine_state import EngineState
from horizon_lm.engine.passes.faults import abandon, settle_without_device
from horizon_lm.engine.passes.forward_pass import ForwardPass, ForwardRequest
from horizon_lm.engine.passes.forward_state import ForwardState
from horizon_lm.engine.passes.host_access import HostAccess
from horizon_lm.engine.passes.update_pass import UpdateMoves, UpdatePass, compute_on_device
from horizon_lm.errors import StreamingError
from horizon_lm.memory.store import Store
from horizon_lm.model.parts import ModelParts
from horizon_lm.planning.arithmetic.residency import ExpectedBatch, Residency
from horizon_lm.schedule.ops import Kind


class Engine(EngineState):
    """The executor of a streamed model, which runs its passes on a device.

    Autograd and the model's forward method drive the engine. The modules of this package that compute a unit
    (embedding, blocks, LM head, outer parameters) take buffers from the engine and report computations to its cursor;
    the passes build their schedules and provide the data movements of their copies.

    Attributes:
        running: the passes that are running.
        access: access by other code to weights and gradients.
        after_next_backward: called once, after the next backward pass.
    """

    def __init__(self, parts: ModelParts, store: Store, device: Device, options: EngineOptions, mesh: Mesh) -> None:
        super().__init__(parts, store, device, options, mesh)
        self.running = Running()
        self.access = HostAccess(self, self.running)
        self.after_next_backward: Callable[[], None] | None = None
        self._set_residency(options.residency or Residency(0))

    # Passes

    @contextmanager
    def forward_pass(self, request: ForwardRequest) -> Iterator[None]:
        """Context manager: run a forward pass of the model."""
        self.resume_interrupted()
        self._abandon_unfinished()
        # Before the pass compares versions, to stream in again what has changed.
        self.foreign_writes.follow()
        # Made and begun in two steps, so that `abandon` finds the pass if it fails at its begin.
        running = self.running.forward = ForwardPass(self, request)
        try:
            running.begin()
            yield
            running.end()
        except BaseException as error:
            abandon(self, self.running, error)
            raise
        finally:
            # Also after a fault: the caller's generators must not stay replaced.
            running.randomness.restore()
            self.running.forward = None

    def _abandon_unfinished(self) -> None:
        """Abandon a backward pass that failed in foreign code, or a forward pass inside of which another one begins."""
        if self.cursor.active:
            unfinished = StreamingError("the backward pass before this forward pass was not finished")
            abandon(self, self.running, unfinished)

    @property
    def forward(self) -> ForwardPass:
        """The forward pass that is running."""
        assert self.running.forward is not None
        return self.running.forward

    @property
    def backward(self) -> BackwardPass:
        """The backward pass that is running."""
        assert self.running.backward is not None
        return self.running.backward

    @property
    def recording(self) -> ForwardState | None:
        """The state that the running forward pass keeps for its backward pass; None if no backward pass can follow."""
        return None if self.running.forward is None else self.running.forward.state

    @property
    def anchor(self) -> torch.Tensor:
        """The tensor that autograd nodes of the running forward pass depend on."""
        assert self.forward.anchor is not None
        return self.forward.anchor

    def trained_names(self, unit: Unit) -> list[str]:
        """Return the full names of a unit's parameters that require a gradient in the running pass."""
        running = self.running.backward or self.running.forward
        return [] if running is None else running.trained.get(self.slab_unit(unit), [])

    @contextmanager
    def backward_of(self, state: ForwardState) -> Iterator[None]:
        """Context manager: run a node of the backward pass of a forward pass. The first of them begins the backward pass."""
        self.resume_interrupted()
        running = self.running
        if running.backward is None:
            # Outside of the try block: nothing has begun that an error raised here could leave half done.
            require_possible(self, state)
        try:
            # Nodes of several forward passes may be in one graph: a node of another forward pass ends the running backward pass.
            if running.backward is None or running.backward.state is not state:
                if running.backward is not None:
                    require_possible(self, state)
                    self._end_backward()
                self._begin_backward(state)
            yield
        except BaseException as error:
            abandon(self, self.running, error)
            raise

    def _begin_backward(self, state: ForwardState) -> None:
        """Begin the backward pass of a forward pass, which ends with the graph."""
        if self.cursor.active:
            raise StreamingError("backward was called inside the forward pass of the same model")
        self.grads.clear_error_if_no_grads()
        # Before the pass exists, because it may reject a second backward pass of a step, and then nothing has begun.
        if self.updates.optimizer_in_backward is not None:
            self.updates.optimizer_in_backward.begin()
        # Made and begun in two steps, so that `abandon` finds the pass if it fails at its begin.
        self.running.backward = BackwardPass(self, state)
        self.running.backward.begin()
        # No node knows that it is the last one; autograd calls back when its graph is finished.
        Variable._execution_engine.queue_callback(self._end_of_graph)

    def _end_backward(self) -> None:
        """End the running backward pass, if there is one."""
        running = self.running.backward
        if running is None:
            return
        try:
            running.end()
        except BaseException as error:
            # Autograd calls `_end_of_graph` outside of all nodes, so no other code abandons the pass.
            abandon(self, self.running, error)
            raise
        self.running.backward = None

    def _end_of_graph(self) -> None:
        """End the pass, and call hooks of parameters whose gradients are published. Autograd calls this when its graph is finished."""
        self._end_backward()
        # Cleared before it is called, since it may raise an error and must not be called again.
        callback, self.after_next_backward = self.after_next_backward, None
        if callback is not None:
            callback()
        names, self.between.after_grad = self.between.after_grad, {}
        for name in names:
            call_after_grad(self.refs[name].param)

    def issue_update(self, update: UpdatePass) -> None:
        """Issue an update pass, and compute its parts on the device. If a fault interrupts it, the remaining operations stay in the
        cursor, and `resume_interrupted` continues them; with a part on the device, the update is partial.

        The updates of the step before must be done (`PendingUpdates.finish`).
        """
        # Before anything is issued: after an interrupt some updates may run, and no graph of the old weights may be used.
        self.store.weights_changed(blocks=update.changes_blocks)
        self.updates.table = update.table
        with self._partial_if_cut_off() if update.on_device else nullcontext():
            try:
                self.cursor.start(update.schedule, UpdateMoves(self, update))
                compute_on_device(self, update)
            finally:
                # Also after an interrupt: what was issued runs to its end, and has to be waited for.
                self.updates.add(self.cursor.tasks_of(Kind.UPDATE))
        self.cursor.finish()  # issues the updates that no computation stands before

    @contextmanager
    def _partial_if_cut_off(self) -> Iterator[None]:
        """Context manager: record a partial update and abandon the pass if the computations of an update pass are cut off."""
        try:
            yield
        except BaseException as error:  # matrices are in the place of gradients, so the pass cannot be continued later
            self.updates.partial_update.record(error)
            self.cursor.abandon()
            raise

    def settle_without_device(self) -> None:
        """Bring the host's state to the end of the last step that counts, after the device has failed (`faults`)."""
        settle_without_device(self, self.running)

    # Between passes

    def expect_batch(self, batch: ExpectedBatch) -> None:
        """Announce the largest expected batch, so that buffers that grow with the batch are allocated once, with that size."""
        self.expected = batch

    def change_residency(self, residency: Residency) -> None:
        """Change which weights and graphs stay on the device between passes."""
        if residency != self.residency:
            self.drain()
            self._set_residency(residency)

    def reconfigure(self, options: EngineOptions) -> None:
        """Use other options from the next forward on. All buffers on the device are freed, so an unfinished pass is abandoned, and
        forward passes that await their backward pass are given up.

        Raises:
            StreamingError: an option differs that is fixed once a model is streamed.
        """
        changed = [name for name in options.names() if getattr(options, name) != getattr(self.options, name)]
        if fixed := [name for name in changed if name not in CHANGEABLE]:
            raise StreamingError(f"{', '.join(fixed)} cannot be changed once a model is streamed; stream it again")
        self._abandon_unfinished()
        self.between.give_up_recorded()
        self.drain()
        self.memory.release()
        self.device.trim()
        self.options = options
        self.between.structure = ()  # so the next recorded pass drains (`ForwardPass._drain_if_reshaped`)
        self.memory = DeviceBuffers(self.store, self.device, options, self.tiles)
        self._set_residency(options.residency or Residency(0))

    def _set_residency(self, residency: Residency) -> None:
        """Keep the weights of the last blocks on the device from the next pass on, which streams them in."""
        self.residency = residency
        self.memory.set_resident(range(self.parts.num_blocks - residency.weights, self.parts.num_blocks))
        self.between.forget_weights()

    def synchronize(self) -> None:
        """Block until all updates are done, and take over weights written by other code."""
        self.resume_interrupted()
        self.drain()
        self.foreign_writes.follow()

    def retire(self, store: Store) -> None:
        """Free the memory that is not used any more, because the model is attached again with another store. No pass may be running."""
        self.retired = True
        self.memory.release()
        self.boundaries.close()
        # The new store has taken over the slabs that have the same parameters as before: all but those of the outer parameters, and so
        # all codes. The rest is freed. Low halves are not page-locked, so nothing is to be undone for them.
        taken_over = {slab.weights.data_ptr() for slab in store.slabs}
        for slab in self.store.slabs:
            # The own ranges, as they were registered: on most ranks they begin in the middle of a slab.
            self.device.free_host(slab.grads[slab.own_grads])
            if slab.weights.data_ptr() not in taken_over:
                self.device.free_host(slab.weights[slab.own])
        self.device.trim()
