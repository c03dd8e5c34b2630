"""The executor: runs the passes of a training step, and provides the data movements of their operations.

A training step, and the module of each line (docs/architecture.md has the picture and the glossary):

    model(**batch)                                       engine/model_forward.py
      plan what stays resident, once per batch size      engine/residency_planner.py
      schedule = build.forward(layout), cached           schedule/build.py: operations and their waits
      copy in the batch's distinct embedding rows        engine/embedding.py
      for each block, when the model's forward calls it: engine/blocks.py
        prefetch the next block into the other slot      schedule/build.py -> engine/cursor.py
        wait for this block's weights                    an event between streams; no thread waits
        compute its micro-batches, without a graph       model/block_template.py
        keep its input: the activation checkpoint        engine/forward_state.py
      norm, LM head and loss over chunks of tokens       engine/chunked_lm_head.py
    loss.backward()                                      one autograd node per unit, last to first
      schedule = build.backward(layout)                  schedule/build.py
      land the LM head's gradient in host memory         engine/lm_head.py
      for each block, last to first:                     engine/block_autograd.py
        prefetch the previous block and its input        schedule/build.py -> engine/cursor.py
        recompute and differentiate each micro-batch     engine/recompute.py, engine/grad_sink.py
        land its gradient: copy, or add to the host's    engine/host_grads.py -> device/cuda_link.py
      sum and land the row gradients of the embedding    engine/embedding.py
    optimizer.step()                                     optim/adamw.py
      clip by the norm, which was summed while landing   engine/host_grads.py
      for each unit, in the order of the next forward:   optim/update_tasks.py
        run AdamW in pieces on host threads              device/host_threads.py, kernels/adamw.py
      return; the next forward waits unit by unit        engine/executor.py: Engine.run_update

Shapes do not occur here: the executor moves whole slabs, and the modules that compute a unit know its tensors.
"""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from horizon_lm.device.base import Device, Task
from horizon_lm.device.transfers import Copy, Decode, DecodeThere, Move
from horizon_lm.distributed.collectives import Gather, Reduce
from horizon_lm.distributed.mesh import Mesh
from horizon_lm.engine.cursor import Cursor, MovesOf
from horizon_lm.engine.device_buffers import DeviceBuffers, EngineOptions
from horizon_lm.engine.foreign_writes import ForeignWrites
from horizon_lm.engine.forward_state import (
    Anchor,
    BoundaryPool,
    BufferLease,
    ForwardState,
    RunningBackward,
    RunningForward,
)
from horizon_lm.engine.host_grads import HostGrads, LandingSlots
from horizon_lm.engine.micro_batches import split_batches
from horizon_lm.engine.parameters import call_after_grad, landing_grad
from horizon_lm.engine.recompute import MicroBatchRandomness
from horizon_lm.engine.updates import PendingUpdates, RunningSave, TableUpdate, UnitOptimizer
from horizon_lm.errors import ConfigError, StreamingError
from horizon_lm.model.block_template import comparable
from horizon_lm.model.units import ModelParts, ParamRef
from horizon_lm.planning.residency import ExpectedBatch, Residency
from horizon_lm.schedule import build
from horizon_lm.schedule.ops import Kind, Op, Pass, Stream
from horizon_lm.store.store import Store
from horizon_lm.store.unit_slabs import UnitSlabs
from horizon_lm.units import EMBED, HEAD, IDLE, OUTER, Unit, block


class Engine:
    """The executor of a streamed model, which runs its passes on a device.

    Autograd and the model's forward method drive the engine. The modules of this package that compute a unit
    (embedding, blocks, LM head, outer parameters) take buffers from the engine and report computations to its cursor;
    the engine builds the schedule of each pass and provides the data movements of its copies.
    """

    def __init__(
        self, parts: ModelParts, store: Store, device: Device, options: EngineOptions, mesh: Mesh | None = None
    ) -> None:
        self.parts, self.store, self.device, self.options, self.mesh = parts, store, device, options, mesh
        self.refs: dict[str, ParamRef] = {ref.name: ref for refs in parts.units.values() for ref in refs}
        self._name_of = {id(ref.param): name for name, ref in self.refs.items()}
        self.cursor = Cursor(device)
        self.memory = DeviceBuffers(parts, store, device, options)
        self.boundaries = BoundaryPool(device)
        self.grads = HostGrads(self.refs, store, device)
        self.updates = PendingUpdates(device)
        self.foreign_writes = ForeignWrites(self.refs, store)
        self.counts: Counter[str] = Counter()  # rows computed by blocks, by kind of computation
        self.expected = ExpectedBatch()  # the largest batch for which buffers are made

        self.forward: RunningForward | None = None
        self.backward: RunningBackward | None = None
        self.head_grads_lease = BufferLease()
        self._graphs_lease = BufferLease()
        self.after_next_backward: Callable[[], None] | None = None  # called once
        self.saves: list[Task] = []  # of the last checkpoint; other code must not write weights meanwhile
        self._table_moves: Sequence[Move] | None = None  # the embedding's part of it, if that was not issued yet
        self.running_save: RunningSave | None = None
        self._after_grad: dict[str, None] = {}  # parameters with hooks to call when autograd's graph is finished
        self._recorded: weakref.WeakSet[ForwardState] = weakref.WeakSet()
        self._anchor: Anchor | None = None
        self._last_structure: tuple[
            Any, ...
        ] = ()  # kept blocks, residency and trained parameters of the last recorded pass

        self._retired = False  # the model was attached again, with other adapters
        self.device_lost = False  # the device has failed, and host memory was settled without it
        self._outer_version, self._resident_version = -1, -1  # versions of outer parameters and of resident blocks
        self._set_residency(options.residency or Residency(0))

    # Units and parameters

    def slab_unit(self, unit: Unit) -> Unit:
        """Return the unit whose slabs hold this unit: the embedding for a tied head."""
        return EMBED if unit == HEAD and self.parts.tied else unit

    def slabs(self, unit: Unit) -> UnitSlabs:
        """Return the host slabs that hold a unit."""
        return self.store.units[self.slab_unit(unit)]

    def trained(self, unit: Unit) -> list[str]:
        """Return the full names of a unit's parameters that require a gradient in the running pass."""
        running = self.backward or self.forward
        return [] if running is None else running.trained.get(self.slab_unit(unit), [])

    def trainable(self) -> dict[str, list[str]]:
        """Return the full names of the parameters that currently require a gradient, by the unit that owns
        their slab.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return {
                unit: [name for name in slabs.layout if self.refs[name].param.requires_grad]
                for unit, slabs in self.store.units.items()
            }

    def allocate_grads(self) -> None:
        """Allocate host gradients for the parameters that are currently trainable, unless already done."""
        trainable = [name for names in self.trainable().values() for name in names]
        if not self.store.has_grads:
            kept = () if self.updates.optimizer_in_backward is not None else self.store.units
            self.grads.allocate(trainable, [*kept, *([EMBED] if self.parts.tied else [])])
        late = [name for name in trainable if name not in self.store.units[self.store.unit_of[name]].grad_layout]
        if late:
            raise StreamingError(
                f"{late[0]} was frozen when training began, so no memory was allocated for its gradient; set requires_grad "
                "before the first training step"
            )

    def trains_other_adapters(self) -> bool:
        """Return whether an adapter requires a gradient for which no memory was allocated when training began, or a table
        of the embedding that was not to be trained.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if any(ref.param.requires_grad for ref in self.parts.units.get(IDLE, ())):
                return True
        if not self.store.has_grads or not self.parts.adapters:
            return False
        layout = self.store.units[OUTER].grad_layout
        with torch._C.DisableTorchFunctionSubclass():
            return any(name not in layout and self.refs[name].param.requires_grad for name in self.parts.adapter_names)

    def update_in_backward(self, optimizer: UnitOptimizer) -> None:
        """Update each unit as soon as its gradient has landed, from now on. Raise ConfigError if gradients are
        allocated already.
        """
        if self.store.has_grads:
            raise ConfigError(
                "update_in_backward keeps no gradients, but this model has been trained with gradients in host memory; create "
                "the optimizer before the first training step"
            )
        self.updates.optimizer_in_backward = optimizer
        self.allocate_grads()
        self.grads.slots = LandingSlots(self.store, self.device, self.parts)

    def name_of(self, param: nn.Parameter) -> str | None:
        """Return the full name of a parameter; None for one that is not the model's."""
        return self._name_of.get(id(param))

    # Properties that determine the schedule

    @property
    def layout(self) -> build.Layout:
        """The properties of the model and its settings that determine its schedules."""
        return build.Layout(
            num_blocks=self.parts.num_blocks,
            tied=self.parts.tied,
            offloaded=self.parts.num_blocks - self.residency.boundaries,
            resident=self.residency.weights,
            accumulate=self.memory.accumulates,
            update_in_backward=self.updates.optimizer_in_backward is not None,
            adapters=bool(self.parts.adapters),
            sharded=self.mesh is not None,
            packed=self.memory.gathers_packed,
        )

    def expect(self, batch: ExpectedBatch) -> None:
        """Announce the largest expected batch, so that buffers that grow with the batch are allocated once, with that
        size.
        """
        self.expected = batch

    def awaits_backward(self) -> bool:
        """Return whether the backward pass of a recorded forward pass has not run yet."""
        return not all(state.consumed for state in self._recorded)

    def reside(self, residency: Residency) -> None:
        """Change which weights and graphs stay on the device between passes."""
        if residency != self.residency:
            self.drain()
            self._set_residency(residency)

    def reconfigure(self, options: EngineOptions) -> None:
        """Use other options from the next forward on. No pass may be running; all buffers on the device are freed."""
        assert not self.cursor.active
        self.drain()
        self.memory.release()
        self.device.trim()
        self.options, self._last_structure = options, ()
        self.memory = DeviceBuffers(self.parts, self.store, self.device, options)
        self._set_residency(options.residency or Residency(0))

    def _set_residency(self, residency: Residency) -> None:
        self.residency = residency
        self.memory.set_resident(range(self.parts.num_blocks - residency.weights, self.parts.num_blocks))
        self._outer_version = self._resident_version = -1  # resident weights must be streamed in again

    def _drain_if_reshaped(self, keeps: frozenset[int], trained: Mapping[str, list[str]]) -> None:
        """Drain if the training passes that follow have a different layout, which rarely happens.

        The waits between passes are proven sufficient only for passes of the same layout.
        """
        structure = (keeps, self.residency, [name for names in trained.values() for name in names])
        if keeps and structure != self._last_structure:
            self.drain()
            self._last_structure = structure

    # Forward

    @contextmanager
    def forward_pass(
        self, *, recording: bool, rows: Sequence[int], embed: bool, inputs_need_grad: bool, head_grads: bool, draws: bool,
        whole_batch: bool = False,
    ) -> Iterator[None]:  # fmt: skip
        """Context manager: run a forward pass of the model.

        Args:
            recording: a backward pass may follow.
            rows: rows of each batch that the pass computes.
            embed: token ids are looked up in the embedding; False if the caller passes ``inputs_embeds``.
            inputs_need_grad: the input of the first block needs a gradient.
            head_grads: the head's gradients may be computed in the forward pass.
            draws: the pass may advance the global random generators.
            whole_batch: blocks compute all rows together, regardless of `EngineOptions.device_micro_batch_size`.
        """
        self.check_alive()
        if self.cursor.active:  # a backward pass that failed in foreign code, or a nested call
            self.fault(StreamingError("the backward pass before this forward pass was not finished"))
        self.foreign_writes.follow()
        keeps = self._kept_blocks(inputs_need_grad) if recording else frozenset()
        trained = self.trainable()
        state = self._record(keeps, trained, head_grads) if recording else None
        self._drain_if_reshaped(keeps, trained)
        schedule = build.forward(
            self.layout,
            keeps=keeps,
            embed=embed,
            changed=self._outer_version != self.store.version,
            blocks_changed=self._resident_version != self.store.block_version,
            table_update=self.updates.table is not None,
            head_grads=head_grads and bool(trained[self.slab_unit(HEAD)]),
        )
        micro_batches = split_batches(rows, None if whole_batch else self.options.device_micro_batch_size)
        before, everywhere = self._agree_on_forward(schedule, len(micro_batches))
        randomness = MicroBatchRandomness(self.device, len(micro_batches), draws, before, everywhere)
        anchor = None if state is None else state.anchor.tensor
        self.forward = RunningForward(state, trained, rows, micro_batches, randomness, anchor)
        try:
            self.cursor.start(schedule, self._moves)
            yield
            self.updates.add(self.cursor.update_tasks())  # the embedding's remaining rows, still being updated
            self.cursor.finish()
            randomness.finish()
            self._outer_version, self._resident_version = self.store.version, self.store.block_version
            self.updates.table = None
            self._save_table()
        except BaseException as error:
            self.fault(error)
            raise
        finally:
            randomness.restore()
            self.forward = None

    def _agree_on_forward(self, schedule: Pass, num_micro_batches: int) -> tuple[int, int | None]:
        """Return the number of micro-batches of the ranks before this one, and of all ranks; None for one rank.

        Raises:
            DisagreementError: the ranks are about to run different passes.
        """
        if self.mesh is None:
            return 0, None
        gradients = "with gradients" if schedule.keeps else "without gradients"
        self.mesh.require_same("the start of a pass", f"{schedule.digest} {gradients}")
        counts = self.mesh.exchange("its micro-batches", num_micro_batches)
        return sum(counts[: self.mesh.rank]), sum(counts)

    @property
    def running(self) -> RunningForward:
        """The forward pass that is running."""
        assert self.forward is not None
        return self.forward

    @property
    def recording(self) -> ForwardState | None:
        """The state that the running forward pass keeps for its backward pass; None if no backward pass can follow."""
        return None if self.forward is None else self.forward.state

    @property
    def anchor(self) -> torch.Tensor:
        """The tensor that autograd nodes of the running forward pass depend on."""
        assert self.running.anchor is not None
        return self.running.anchor

    def require_forward(self, what: str) -> None:
        """Raise StreamingError if a part of the model is called outside of the model's forward pass."""
        if not self.cursor.active:
            raise StreamingError(
                f"{what} of a streamed model cannot be called on its own: its weights are on the device only while "
                "the whole model runs. Call model(...); with output_hidden_states=True it also returns the hidden states."
                f"{self.advice()}"
            )

    def advice(self) -> str:
        """Return advice for a model whose forward method was replaced, as TRL's trainers do; empty for others."""
        forward = vars(self.parts.model).get("forward")
        if forward is None or forward.__module__.startswith("horizon_lm."):
            return ""
        return (
            " The model's forward method was replaced after it was streamed, as trainers of TRL do; create them with "
            "horizon_lm.trainer(SFTTrainer)(...)."
        )

    def _record(self, keeps: frozenset[int], trained: dict[str, list[str]], head_grads: bool) -> ForwardState:
        """Return the state of a forward pass that a backward pass may follow."""
        self.allocate_grads()
        state = ForwardState(self.store.version, keeps, trained, self._config(), self._find_anchor(trained))
        self._recorded.add(state)
        state.head_grads = head_grads
        # There is room for the graphs of one forward pass; another forward pass before its backward pass recomputes all
        # blocks.
        if self._graphs_lease.holder is None:
            first = self.parts.num_blocks - self.residency.graphs
            state.graphs = frozenset(index for index in keeps if index >= first)
            self._graphs_lease.take(state)
        return state

    def _find_anchor(self, trained: Mapping[str, list[str]]) -> Anchor:
        """Return the anchor of the trained parameters: the last anchor, unless it belongs to other parameters."""
        params = [self.refs[name].param for names in trained.values() for name in names]
        if self._anchor is None or list(map(id, params)) != list(map(id, self._anchor.params)):
            with torch.enable_grad():
                self._anchor = Anchor(params)
        return self._anchor

    def _config(self) -> Any:
        config = dict(vars(self.parts.model.config.get_text_config()))
        # A classifier sets this in its first forward pass with labels; no block reads it.
        config.pop("problem_type", None)
        return comparable(config)

    def _kept_blocks(self, inputs_need_grad: bool) -> frozenset[int]:
        """Return the blocks that a gradient passes through, starting with the first trainable unit."""
        with torch._C.DisableTorchFunctionSubclass():
            first = 0 if inputs_need_grad else self.parts.first_differentiated()
        return frozenset(range(first, self.parts.num_blocks))

    # Backward

    @contextmanager
    def backward_of(self, state: ForwardState) -> Iterator[None]:
        """Context manager: run one node of a backward pass. The first node of a forward pass begins the
        backward pass.
        """
        self.check_alive()
        if self.backward is None:
            self._require_possible(state)  # outside of the try block: an error raised here is no fault of the pass
        try:
            # Nodes of several forward passes may be in one graph: a node of another forward pass ends the running
            # backward pass.
            if self.backward is None or self.backward.state is not state:
                if self.backward is not None:
                    self._require_possible(state)
                    self._finish_backward()
                self._start_backward(state)
            yield
        except BaseException as error:
            self.fault(error)
            raise

    def _require_possible(self, state: ForwardState) -> None:
        """Raise StreamingError for a backward pass that would compute wrong gradients."""
        self.require_device()
        if torch.is_grad_enabled():
            raise StreamingError("create_graph=True is not supported: a streamed model has no second derivatives")
        if not state.anchor.sees_whole_backward():
            raise StreamingError(
                "all gradients of a streamed model go to host memory, so backward(inputs=...) and torch.autograd.grad are not "
                "supported; call backward() and read param.grad, and freeze the other parameters (requires_grad_(False)) "
                "before the forward pass"
            )
        self.foreign_writes.follow()
        state.check_usable(self.store.version, self._config())

    def _start_backward(self, state: ForwardState) -> None:
        if self.cursor.active:
            raise StreamingError("backward was called inside the forward pass of the same model")
        self.grads.clear_error_if_no_grads()
        if self.updates.optimizer_in_backward is not None:
            self.updates.optimizer_in_backward.begin()
        self.backward = RunningBackward(state)
        units = [EMBED, *map(block, range(self.parts.num_blocks)), HEAD, OUTER]
        trainable = [unit for unit in units if self.trained(unit)]
        self._free_head_grads(state)
        schedule = build.backward(self.layout, blocks=state.keeps, trainable=trainable, head_grads=state.head_grads)
        if self.mesh is not None:
            self.mesh.require_same("the start of a pass", schedule.digest)
        self.cursor.start(schedule, self._moves)
        # No node knows that it is the last one; autograd calls back when its graph is finished.
        Variable._execution_engine.queue_callback(self._end_of_graph)

    def _free_head_grads(self, state: ForwardState) -> None:
        """Free the head's gradient buffer for a backward pass.

        Gradients that another forward pass has left there are lost; its backward pass recomputes them.
        """
        holder = self.head_grads_lease.holder
        if holder is not None and holder is not state:
            holder.head_grads = False
        self.head_grads_lease.release()

    def gradients_ready(self, unit: Unit, names: list[str]) -> None:
        """Record that these parameters' gradients are complete on the device, before they are landed."""
        assert self.backward is not None
        if self.mesh is not None and self.updates.optimizer_in_backward is not None:
            names = self._agreed({unit: names})[unit]
        self.backward.ready[unit] = names
        optimizer = self.updates.optimizer_in_backward
        # The embedding's update is issued by the next forward pass, and a tied head's gradient is added to the
        # embedding's.
        if optimizer is not None and unit != EMBED and self.slab_unit(unit) == unit:
            assert self.grads.slots is not None
            self.cursor.bind(Kind.UPDATE, unit, optimizer.moves(unit, names, self.grads.slots.of(unit)))

    def _agreed(self, ready: dict[str, list[str]]) -> dict[str, list[str]]:
        """Return the parameters that have a gradient on any rank, by unit."""
        if self.mesh is None:
            return ready
        everywhere = self.mesh.exchange("gradients of " + ", ".join(ready), ready)
        return {unit: [*dict.fromkeys(name for each in everywhere for name in each[unit])] for unit in ready}

    def adapters_ready(self, names: Iterable[str]) -> None:
        """Record that the gradients of these adapters in a block are complete on the device."""
        assert self.backward is not None
        self.backward.adapters.update(names)

    @property
    def ready_adapters(self) -> Collection[str]:
        """The full names of the adapters whose gradients are complete in the running backward pass."""
        return () if self.backward is None else self.backward.adapters

    def has_gradients(self, unit: Unit) -> bool:
        """Return whether the gradients of a unit are complete in the running backward pass."""
        return self.backward is not None and unit in self.backward.ready

    def _end_of_graph(self) -> None:
        """End the pass and call hooks. Autograd calls this when its graph is finished."""
        self._finish_backward()
        callback, self.after_next_backward = self.after_next_backward, None
        if callback is not None:
            callback()
        names, self._after_grad = self._after_grad, {}
        for name in names:
            call_after_grad(self.refs[name].param)

    def _finish_backward(self) -> None:
        """End the running backward pass, if there is one. Its gradients are still landing, or are being applied."""
        running, self.backward = self.backward, None
        if running is None:
            return
        self.grads.track_landings(self.cursor.landing_tasks())  # they continue to land while the host goes on
        self.updates.add(self.cursor.update_tasks())
        self.cursor.finish()
        running.state.consumed = True
        optimizer = self.updates.optimizer_in_backward
        if optimizer is not None:
            self.store.weights_changed()
            if EMBED in running.ready or (self.parts.tied and HEAD in running.ready):
                assert self.grads.slots is not None
                self.updates.table = optimizer.table(self.grads.slots.table_grads())
            return
        landed = [name for names in self._agreed(running.ready).values() for name in names]
        self.grads.publish(landed)
        self._after_grad |= dict.fromkeys(landed)

    # Update

    def run_update(self, schedule: Pass, moves: Mapping[Unit, Sequence[Move]], table: TableUpdate | None) -> None:
        """Issue an update pass. If a fault interrupts it, the remaining operations stay pending until the next use.

        The updates of the step before must be done (`PendingUpdates.finish`).

        Args:
            schedule: the pass over all units except the embedding.
            moves: the pieces of each unit's update.
            table: the embedding's update, which the next forward pass issues.
        """
        self.store.weights_changed(blocks=any(pieces and unit.is_block for unit, pieces in moves.items()))
        self.updates.table = table
        try:
            self.cursor.start(schedule, lambda op: moves[op.unit])
        finally:
            self.updates.add(self.cursor.update_tasks())
        self.cursor.finish()

    def run_save(self, moves: Mapping[Unit, Sequence[Move]]) -> list[Task]:
        """Issue the pass that writes a checkpoint. Later updates of a unit wait for its task.

        The embedding is written after the next forward pass if its update is left to that pass.

        Args:
            moves: the moves that write each unit's slabs.

        Returns:
            The tasks; that of the embedding is added later.
        """
        self.check_alive()
        self.saves, self._table_moves, units = [], None, set(moves)
        if self.updates.table is not None:
            self._table_moves = moves[EMBED]
            units.remove(EMBED)
        self._issue_save(build.save(self.layout, units), lambda op: moves[op.unit])
        return self.saves

    def _issue_save(self, schedule: Pass, moves_of: MovesOf) -> None:
        try:
            self.cursor.start(schedule, moves_of)
        finally:
            self.saves += self.cursor.save_tasks()
        self.cursor.finish()

    def _save_table(self) -> None:
        """Issue the writing of the embedding, whose update is issued, if a checkpoint lacks it."""
        moves, self._table_moves = self._table_moves, None
        if moves is not None:
            self._issue_save(build.save_table(self.layout), lambda op: moves)

    def issue_saves(self) -> None:
        """Issue what is left of a checkpoint, between two passes."""
        if self._table_moves is not None and not self.cursor.active:
            self.updates.finish()
            self._save_table()

    def wait_for_saves(self) -> None:
        """Block until no checkpoint is being written."""
        self.issue_saves()
        if self.saves:
            self.device.wait(self.saves)
            self.saves = []

    def _moves(self, op: Op) -> Sequence[Move] | None:
        """Return the moves of an operation in the starting pass; None if they depend on the batch (see
        `Cursor.bind`).
        """
        # In a forward pass, this is the update of the embedding; in a backward pass that of a unit, bound by `landed`.
        if op.kind == Kind.UPDATE:
            return None if self.updates.table is None or self.backward is not None else self.updates.table.rest()
        if op.kind == Kind.STREAM_OUT and op.unit != EMBED:
            return self.grads.moves(self.slab_unit(op.unit), self.memory.grads_of(op))
        if op.kind == Kind.FETCH:
            assert self.backward is not None
            index = op.unit.block_index
            host = self.backward.state.boundary(index)
            return [Copy(self.memory.ring.get(host.numel(), torch.uint8, index % 2), host, host.numel())]
        if op.kind == Kind.STREAM_IN and op.unit != EMBED:
            return self._weights_in(self.slabs(op.unit), op.unit)
        if op.kind == Kind.GATHER and op.unit != EMBED:
            return self._gathering(self.slabs(op.unit), op.unit)
        if op.kind == Kind.REDUCE and op.unit != EMBED:
            assert self.mesh is not None
            return [Reduce(self.mesh.reduce, self.memory.grads_of(op), self.slabs(op.unit).grad_cuts)]
        return None

    def _weights_in(self, slabs: UnitSlabs, unit: Unit) -> list[Move]:
        """Return the moves that stream a unit into its slot: a copy, and the decoding of what is quantized.

        Of several ranks, each copies its own ranges; codes and scales are decoded once they are gathered.
        """
        slot, plain = self.memory.weights_of(unit), slabs.weights[slabs.own]
        moves: list[Move] = []
        if plain.numel() or not slabs.packed.num_bytes:
            moves.append(Copy(slot[slabs.own], plain, plain.numel() * plain.element_size()))
        if not slabs.packed.num_bytes:
            return moves
        if self.store.shard.is_whole:
            return moves + self._decoding(slabs, slot, slabs.packed.data, Decode)
        packed = slabs.packed.data[slabs.packed.own]
        return [*moves, Copy(self.memory.packed_of(unit)[slabs.packed.own], packed, packed.numel())]

    def _gathering(self, slabs: UnitSlabs, unit: Unit) -> list[Move]:
        """Return the moves that gather a unit in its slot, and decode there what is quantized."""
        assert self.mesh is not None
        slot, group = self.memory.weights_of(unit), self.mesh.gather
        moves: list[Move] = [Gather(group, slot[: slabs.slot_cuts[-1]], slabs.slot_cuts)]
        if self.store.shard.is_whole or not slabs.packed.num_bytes:
            return moves
        packed = self.memory.packed_of(unit)[: slabs.packed.slot_numel]
        return [
            *moves,
            Gather(group, packed, slabs.packed.slot_cuts),
            *self._decoding(slabs, slot, packed, DecodeThere),
        ]

    def _decoding(self, slabs: UnitSlabs, slot: torch.Tensor, packed: torch.Tensor, move: type[Decode]) -> list[Move]:
        """Return the moves that decode a unit's quantized weights into its slot, from this copy of their slab."""
        return [
            move(
                slabs.layout.view(slot, name),
                slabs.packed.packed(name, packed),
                entry.codec,
                self.store.decoded_dtype(name),
            )
            for name, entry in slabs.packed.entries.items()
        ]

    # Waiting, and access by other code to weights and gradients

    def pending_operations(self) -> list[str]:
        """Describe the operations that were begun and are not finished, with stream and thread. Any thread may call this."""
        return [_describe(task) for task in self.cursor.unfinished() if not self.device.is_finished(task)]

    def drain(self) -> None:
        """Block until no copy, no update and no save is running."""
        if not self.device_lost:
            self.issue_saves()
            self.device.synchronize()
        self.updates.finish()
        if not self.cursor.active:
            self.cursor.forget()

    def synchronize(self) -> None:
        """Block until all updates are done, and take over weights written by other code."""
        self.check_alive()
        self.drain()
        self.foreign_writes.follow()

    def before_foreign_step(self, optimizer: str) -> None:
        """Wait for updates before another optimizer's step; raise StreamingError if it would lose the weights' low
        halves.
        """
        if self.store.precision.low_half:
            raise StreamingError(
                f"{optimizer} would round every update to bfloat16: in precision 'fp32_master' only horizon_lm.AdamW knows the "
                "other 16 bits of the weights. Use that optimizer, or stream with precision='bf16' or 'float32'."
            )
        self.hand_out_weight()

    def hand_out_weight(self) -> None:
        """Wait for updates and saves of the weights before other code reads or writes a weight."""
        self.store.require_whole()
        self.wait_for_saves()
        if self.cursor.active:  # updates of the running pass that are not issued yet come after the access
            self.updates.wait(self.cursor.update_tasks())
        else:
            self.updates.finish()

    def hand_out_grad(self, param: nn.Parameter) -> None:
        """Wait until a gradient has landed and no update reads it, before other code reads or writes it."""
        name = self.name_of(param)
        if name is None:
            return
        if self.updates.optimizer_in_backward is not None and self.updates.optimizer_in_backward.pending:
            raise StreamingError(
                f"{name}.grad: update_in_backward applies gradients as they land and does not keep them, so they "
                "cannot be read or clipped (clip_grad_norm_); use horizon_lm.AdamW without update_in_backward for that"
            )
        if landing_grad(param) is not None:
            self.wait_for_grads()
            self.hand_out_weight()
        self.grads.hand_out(self.store.unit_of[name])

    @property
    def has_parts(self) -> bool:
        """True if other ranks have parts of every weight and gradient."""
        return not self.store.shard.is_whole

    def before_grad_is_emptied(self, param: nn.Parameter) -> None:
        """Wait until a gradient has landed, before other code drops it."""
        name = self.name_of(param)
        if name is not None:
            self.wait_for_grads()
            self.grads.hand_out(self.store.unit_of[name])

    def wait_for_grads(self) -> None:
        """Block until the gradients of finished backward passes are in host memory."""
        self._require_attached()
        if self.backward is not None:
            return
        try:
            self.grads.wait()
        except Exception as error:
            if self.updates.optimizer_in_backward is not None:
                self.updates.partial_update.record(error)
            raise

    def clear_grads(self) -> None:
        """Mark all gradients empty, and valid again after a fault. No memory is written."""
        self.wait_for_grads()
        self.grads.clear()

    def retire(self, store: Store) -> None:
        """Free what is not used any more, because the model is attached again with another store. No pass may be running."""
        self._retired = True
        self.memory.release()
        kept = {slabs.weights.data_ptr() for slabs in store.units.values()}
        for slabs in self.store.units.values():
            moved = slabs.weights.data_ptr() not in kept
            for slab in (slabs.grads, *([slabs.weights] if moved else [])):
                if slab.numel():
                    self.device.free_host(slab)
        self.device.trim()

    def _require_attached(self) -> None:
        if self._retired:
            raise StreamingError(
                "the model has other adapters, or trains another one, since this optimizer was created or this loss computed; "
                "create the optimizer after the adapters"
            )

    # Faults

    def check_alive(self) -> None:
        """Continue an update or save that was interrupted; raise PartialUpdateError if an update was cut off."""
        self._require_attached()
        self.updates.partial_update.require_complete()
        if self.cursor.schedule is not None and self.cursor.schedule.name in ("update", "save"):
            self.cursor.finish()

    def fault(self, error: BaseException) -> None:
        """Abandon the running pass and free its slots and boundaries. The gradients of a backward pass
        become invalid.
        """
        if self.backward is not None:  # a forward pass changes no gradient in host memory
            if self.cursor.update_begun():  # some units of this step are updated, others are not
                self.updates.partial_update.record(error)
            self.grads.break_off()
        try:
            self.cursor.abandon()
            self._quiesce()
        finally:  # the device may have failed for good
            self._release_pass()

    def _release_pass(self) -> None:
        """Free what the running pass has taken."""
        for running in (self.backward, self.forward):
            if running is not None and running.state is not None:
                running.state.consumed = True
                self.boundaries.release(running.state)
        self.backward, self.forward, self._after_grad = None, None, {}
        self.head_grads_lease.release()
        self._graphs_lease.release()

    def settle_without_device(self) -> None:
        """Bring the host's state to the end of the last step that counts, after the device has failed.

        A step counts once the optimizer's ``step`` has all gradients in host memory (`AdamW.num_steps`): its updates need
        nothing else, and are completed in host threads. Everything else is dropped. The device is not touched. Afterwards
        weights and optimizer state can be read and saved; every further pass raises StreamingError.

        Raises:
            PartialUpdateError: an update is half done, so that some weights are new and some old.
        """
        self.updates.partial_update.require_complete()
        if self.device_lost:
            return
        if self._has_begun_updates():
            reason = "the device failed before all gradients had landed, and others were applied already"
            self.updates.partial_update.record(StreamingError(reason))
            self.updates.partial_update.require_complete()
        self.device_lost = True
        if self.running_save is not None:
            # Updates that it delays are completed now.
            self.running_save.abandon(StreamingError("the device has failed meanwhile"))
        try:
            self.updates.complete_without_device()
        finally:  # a kernel's error is recorded, and reported as what it means
            self.updates.partial_update.require_complete()
        if self.running_save is not None:
            self.running_save.discard()
        self.saves, self._table_moves, self.running_save = [], None, None
        self.cursor.drop()
        self._release_pass()
        self.grads.track_landings([])
        self.grads.break_off()

    def _has_begun_updates(self) -> bool:
        """Return whether updates of a step that does not count yet may have begun, as they do with ``update_in_backward``."""
        optimizer = self.updates.optimizer_in_backward
        if optimizer is None or not optimizer.pending:
            return False
        # After a fault in the backward, `fault` has recorded a partial update if there is one.
        return self.cursor.update_begun() if self.backward is not None else not self.grads.invalid

    def require_device(self) -> None:
        """Raise StreamingError if the device has failed."""
        if self.device_lost:
            raise StreamingError(
                "the device has failed, so this model cannot compute any more; its weights can be read and saved. Load it "
                "in a new process."
            )

    def _quiesce(self) -> None:
        """Wait until the device is idle. An update that could not begin raises its error here, and stays pending."""
        for _ in range(len(self.store.units)):  # at most one failed update for each
            # Raising the error of a failed update clears it. An update that failed inside a kernel already is a partial
            # update.
            with suppress(Exception):
                self.device.synchronize()
                return
        self.device.synchronize()  # an error that is raised now is not an update's


def _describe(task: Task) -> str:
    thread = "the thread of the training" if task.op.stream == Stream.COMPUTE else f"a thread horizon-{task.op.stream}"
    waits = ", ".join(f"{each.op} ({each.op.stream})" for each in task.waits if not each.done)
    return f"{task.op} on stream {task.op.stream}, {thread}" + (f", which waits for {waits}" if waits else "")
