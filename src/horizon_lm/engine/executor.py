"""The executor: passes over the units, and what each of their operations moves."""

import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from horizon_lm.device.base import Device
from horizon_lm.device.transfers import Copy, Move
from horizon_lm.engine.cursor import Cursor
from horizon_lm.engine.device_buffers import DeviceBuffers, Options, block_index
from horizon_lm.engine.foreign_writes import WeightWatch, watch_optimizers
from horizon_lm.engine.forward_state import Anchor, BoundaryPool, BufferLease, ForwardState
from horizon_lm.engine.host_grads import HostGrads, LandingSlots
from horizon_lm.engine.parameters import call_after_grad, landing_grad
from horizon_lm.engine.recompute import MicroBatchRandomness
from horizon_lm.engine.updates import PendingUpdates, TableUpdate, UpdatesInBackward
from horizon_lm.errors import ConfigError, ForeignWriteWarning, StreamingError
from horizon_lm.model.block_template import comparable
from horizon_lm.model.units import ModelParts, ParamRef
from horizon_lm.plan.residency import BatchSize, DevicePlan, ExpectedBatch, Residency
from horizon_lm.schedule import build
from horizon_lm.schedule.ops import EMBED, HEAD, OUTER, Kind, Op, Pass, block
from horizon_lm.store.store import Store, UnitSlabs


class Engine:
    """Streams a model's units through a device.

    The block, table, head and outer modules of this package ask it for buffers and report computations; it builds the
    schedule of each pass and knows what every copy of it moves.
    """

    def __init__(self, parts: ModelParts, store: Store, device: Device, options: Options) -> None:
        self.parts, self.store, self.device, self.options = parts, store, device, options
        self.refs: dict[str, ParamRef] = {ref.name: ref for refs in parts.units.values() for ref in refs}
        self._name_of = {id(ref.param): name for name, ref in self.refs.items()}
        self._watch = WeightWatch(self.refs)
        watch_optimizers()
        self.cursor = Cursor(device)
        self.grads = HostGrads(self.refs, store, device)
        self.boundaries = BoundaryPool(device)
        self.counts: Counter[str] = Counter()  # rows through blocks, by kind of computation

        self.handle: ForwardState | None = None  # of the running forward, if it records
        self.randomness: MicroBatchRandomness | None = None
        self.num_rows, self._whole_batch = 0, False
        self.head_buffer, self._graphs = (
            BufferLease(),
            BufferLease(),
        )  # the head's gradients made in a forward; kept graphs
        self._backward_of: ForwardState | None = None
        self._landed: dict[str, list[str]] = {}  # by unit, parameters that got a gradient in the running backward
        self._after_grad: dict[str, None] = {}  # parameters with hooks to call when the whole backward is over
        self._trained: dict[str, list[str]] = {}  # by unit, parameters that the running pass trains
        self.after_next_backward: Callable[[], None] | None = None  # called once
        self._anchor: Anchor | None = None
        self._resident_version = -1  # of the weights that stay on the device between passes
        self._warned = False  # of weights that others have written
        self.updates = PendingUpdates(device)
        self._updates_in_backward: weakref.ref[UpdatesInBackward] | None = None  # which knows the engine
        self._shape: tuple[Any, ...] = ()

        self.memory = DeviceBuffers(parts, store, device, options)
        self.plan: DevicePlan | None = None  # None until a first batch is known
        self._planned = BatchSize()
        self.expected = ExpectedBatch()
        self._handles: weakref.WeakSet[ForwardState] = weakref.WeakSet()
        self._set_residency(options.residency or Residency(0))

    # Units and parameters

    def slab_unit(self, unit: str) -> str:
        """The unit whose slabs hold this one: a tied head's are the table's."""
        return EMBED if unit == HEAD and self.parts.tied else unit

    def slabs(self, unit: str) -> UnitSlabs:
        """The host slabs that hold a unit."""
        return self.store.units[self.slab_unit(unit)]

    def trained(self, unit: str) -> list[str]:
        """Full names of a unit's parameters that the running pass trains: those that required a gradient in its forward."""
        return self._trained.get(self.slab_unit(unit), [])

    def trainable(self) -> dict[str, list[str]]:
        """By unit that owns slabs, full names of the parameters that require a gradient now."""
        with torch._C.DisableTorchFunctionSubclass():
            return {
                unit: [name for name in slabs.layout if self.refs[name].param.requires_grad]
                for unit, slabs in self.store.units.items()
            }

    @property
    def anchor(self) -> torch.Tensor:
        """What autograd nodes of the running forward depend on."""
        assert self.handle is not None
        return self.handle.anchor.tensor

    def allocate_grads(self) -> None:
        """Make room for gradients of what is trainable now, unless that was done before."""
        trainable = [name for names in self.trainable().values() for name in names]
        if not self.store.has_grads:
            kept = () if self._in_backward is not None else self.store.units
            self.grads.allocate(trainable, [*kept, *([EMBED] if self.parts.tied else [])])
        late = [name for name in trainable if name not in self.slabs_of(name).grad_layout]
        if late:
            raise StreamingError(
                f"{late[0]} was frozen when training began, so there is no room for its gradient; set requires_grad "
                "before the first training step"
            )

    def expect(self, batch: ExpectedBatch) -> None:
        """Make buffers that grow with the batch for this one at once. They are made larger if another batch needs more."""
        self.expected = batch

    def slabs_of(self, name: str) -> UnitSlabs:
        """The host slabs of the unit that a parameter belongs to."""
        return self.store.units[self.store.unit_of[name]]

    def needs_plan(self, size: BatchSize) -> bool:
        """Whether training on such a batch has to be planned: it is larger than any before, and device memory is limited."""
        unplanned = not self._planned.covers(size) and all(handle.consumed for handle in self._handles)
        return unplanned and self.device.spare_bytes() is not None

    @contextmanager
    def planning(self, size: BatchSize) -> Iterator[list[DevicePlan]]:
        """Inside, nothing stays on the device. A plan that is put into the list holds for such batches and all before."""
        self.check_alive()
        plans: list[DevicePlan] = []
        self._reside(self.options.residency or Residency(0))
        try:
            yield plans
            if plans:
                self.plan = plans[0] if self.plan is None else self.plan.together_with(plans[0])
                self._planned = self._planned.together_with(size)
        finally:
            self.device.trim()  # a rehearsal leaves pieces of its own sizes behind
            if self.plan is not None:
                self._reside(self.plan.residency)

    def _reside(self, residency: Residency) -> None:
        if residency != self.residency:
            self.drain()
            self._set_residency(residency)

    def _set_residency(self, residency: Residency) -> None:
        self.residency = residency
        self.memory.hold(range(self.parts.num_blocks - residency.weights, self.parts.num_blocks))
        self._resident_version = -1  # held weights have to be streamed in

    # Forward

    @contextmanager
    def forward_pass(
        self, *, recording: bool, rows: int, embed: bool, inputs_need_grad: bool, head_grads: bool, draws: bool,
        whole_batch: bool = False,
    ) -> Iterator[None]:  # fmt: skip
        """A forward runs inside.

        Args:
            recording: for a later backward.
            rows: of the batch.
            embed: token ids are looked up in the table.
            inputs_need_grad: of the first block.
            head_grads: the head's gradients may be made in the forward.
            draws: it may advance the global generators.
            whole_batch: blocks compute all rows at once, whatever `Options.device_micro_batch_size` says.
        """
        self.check_alive()
        if self.cursor.active:  # a backward that died in foreign code, or a nested call
            self.fault(StreamingError("the backward before this forward was not finished"))
        self.notice_writes()
        keeps = self._kept_blocks(inputs_need_grad) if recording else frozenset()
        self._trained = self.trainable()
        if recording:
            self.allocate_grads()
            self.handle = ForwardState(self.store.version, keeps, self._trained, self._config(), self._find_anchor())
            self._handles.add(self.handle)
            self.handle.head_grads = head_grads
            self._hold_graphs(self.handle)
        self._drain_if_reshaped(keeps)
        schedule = build.forward(
            self.layout,
            keeps=keeps,
            embed=embed,
            changed=self._resident_version != self.store.version,
            table_update=self.updates.table is not None,
            head_grads=head_grads and bool(self.trained(HEAD)),
        )
        self.num_rows, self._whole_batch = rows, whole_batch
        self.randomness = MicroBatchRandomness(self.device, len(self.micro_batches()), draws)
        try:
            self.cursor.start(schedule, self._moves)
            yield
            self.updates.add(self.cursor.update_tasks())
            self.cursor.finish()
            self._resident_version, self.updates.table = self.store.version, None
        except BaseException as error:
            self.fault(error)
            raise
        finally:
            self.handle = None

    def require_forward(self, what: str) -> None:
        """StreamingError when a part of the model is called by itself, outside a forward of the model."""
        if not self.cursor.active:
            raise StreamingError(
                f"{what} of a streamed model cannot be called by itself: its weights are on the device only while the whole "
                "model runs. Call model(...); with output_hidden_states=True it returns the hidden states, too."
            )

    def _find_anchor(self) -> Anchor:
        """Return the anchor of the parameters that are trained now: the last one, or another if these are others."""
        params = [self.refs[name].param for names in self._trained.values() for name in names]
        if self._anchor is None or list(map(id, params)) != list(map(id, self._anchor.params)):
            with torch.enable_grad():
                self._anchor = Anchor(params)
        return self._anchor

    def _config(self) -> Any:
        return comparable(vars(self.parts.model.config.get_text_config()))

    def micro_batches(self) -> list[tuple[int, int]]:
        """Row ranges of the device micro-batches of the running forward."""
        size = (not self._whole_batch and self.options.device_micro_batch_size) or self.num_rows
        return [(start, min(start + size, self.num_rows)) for start in range(0, self.num_rows, size)]

    def _kept_blocks(self, inputs_need_grad: bool) -> frozenset[int]:
        """Blocks that a gradient passes through: from the first trainable unit on."""
        with torch._C.DisableTorchFunctionSubclass():
            first = 0 if inputs_need_grad else self.parts.first_differentiated()
        return frozenset(range(first, self.parts.num_blocks))

    @property
    def layout(self) -> build.Layout:
        """What shapes this model's schedules."""
        return build.Layout(
            num_blocks=self.parts.num_blocks,
            tied=self.parts.tied,
            offloaded=self.parts.num_blocks - self.residency.boundaries,
            held=self.residency.weights,
            accumulate=self.memory.accumulates,
            update_in_backward=self._in_backward is not None,
        )

    def _drain_if_reshaped(self, keeps: frozenset[int]) -> None:
        """Waits across passes are proven for passes of one shape; what is trainable rarely changes, so that may cost."""
        if not keeps:
            return
        shape = (keeps, self.residency, [name for names in self._trained.values() for name in names])
        if shape != self._shape:
            self.drain()
            self._shape = shape

    def _hold_graphs(self, handle: ForwardState) -> None:
        """There is room for the graphs of one forward; another one before its backward does without."""
        if self._graphs.holder is None:
            first = self.parts.num_blocks - self.residency.graphs
            handle.graphs = frozenset(index for index in handle.keeps if index >= first)
            self._graphs.take(handle)

    def _evict_head_grads(self, handle: ForwardState) -> None:
        """A backward needs the head's buffer. Gradients of another forward in it are lost, and made again in its own."""
        holder = self.head_buffer.holder
        if holder is not None and holder is not handle:
            holder.head_grads = False
        self.head_buffer.release()

    # Backward

    @contextmanager
    def backward_of(self, handle: ForwardState) -> Iterator[None]:
        """A node of a backward runs inside; the first one of a forward begins its pass."""
        self.check_alive()
        if self._backward_of is None:
            self._require_possible(handle)  # what is rejected here has changed nothing
        try:
            if self._backward_of is not handle:
                self._require_possible(handle)
                self._finish_backward()
                self._start_backward(handle)
            yield
        except BaseException as error:
            self.fault(error)
            raise

    def _require_possible(self, handle: ForwardState) -> None:
        """StreamingError for a backward that would be wrong."""
        if torch.is_grad_enabled():
            raise StreamingError("create_graph=True is not supported: a streamed model has no second derivatives")
        if not handle.anchor.sees_whole_backward():
            raise StreamingError(
                "gradients of a streamed model go to host memory, all of them, so backward(inputs=...) and "
                "torch.autograd.grad are not supported; call backward() and read param.grad, and freeze what should get none "
                "(requires_grad_(False)) before the forward"
            )
        self.notice_writes()
        handle.check_usable(self.store.version, self._config())

    def _start_backward(self, handle: ForwardState) -> None:
        if self.cursor.active:
            raise StreamingError("backward was called inside a forward of the same model")
        self.grads.clear_error_if_no_grads()
        if self._in_backward is not None:
            self._in_backward.begin()
        self._trained = handle.trained
        trainable = [
            unit for unit in (EMBED, *map(block, range(self.parts.num_blocks)), HEAD, OUTER) if self.trained(unit)
        ]  # fmt: skip
        self._backward_of, self._landed = handle, {}
        self._evict_head_grads(handle)
        schedule = build.backward(self.layout, blocks=handle.keeps, trainable=trainable, head_grads=handle.head_grads)
        self.cursor.start(schedule, self._moves)
        Variable._execution_engine.queue_callback(self._end_of_graph)

    def _end_of_graph(self) -> None:
        """Called by autograd when its graph is done."""
        self._finish_backward()
        whole, self.after_next_backward = self.after_next_backward, None
        if whole is not None:
            whole()
        names, self._after_grad = self._after_grad, {}
        for name in names:
            call_after_grad(self.refs[name].param)

    def _finish_backward(self) -> None:
        """Publish the gradients that are landing."""
        handle, self._backward_of = self._backward_of, None
        if handle is None:
            return
        self.grads.land(self.cursor.landing_tasks())
        self.cursor.finish()
        handle.consumed = True
        if self._in_backward is not None:
            self.weights_changed()
            if EMBED in self._landed or (self.parts.tied and HEAD in self._landed):
                assert self.grads.slots is not None
                self.updates.table = self._in_backward.table(self.grads.slots.table_grads())
            return
        landed = [name for names in self._landed.values() for name in names]
        self.grads.publish(landed)
        self._after_grad |= dict.fromkeys(landed)

    def landed(self, unit: str, names: list[str]) -> None:
        """The gradients of these parameters of a unit are complete on the device. Called before they leave it."""
        self._landed[unit] = names
        if self._in_backward is not None and unit != EMBED and self.slab_unit(unit) == unit:
            assert self.grads.slots is not None
            self.cursor.bind(Kind.UPDATE, unit, self._in_backward.moves(unit, names, self.grads.slots.of(unit)))

    def has_landed(self, unit: str) -> bool:
        return unit in self._landed

    def _moves(self, op: Op) -> Sequence[Move] | None:
        """What an operation of the pass that begins moves; None if only the batch will tell."""
        if op.kind == Kind.UPDATE:  # the table's, or in a backward the unit's own, for which see `landed`
            return None if self.updates.table is None or self._backward_of is not None else self.updates.table.rest()
        if op.kind == Kind.STREAM_OUT and op.unit != EMBED:
            return self.grads.moves(self.slab_unit(op.unit), self.memory.grads_of(op))
        if op.kind == Kind.FETCH:
            assert self._backward_of is not None
            index = block_index(op.unit)
            host = self._backward_of.boundary(index)
            return [Copy(self.memory.ring.get(host.numel(), torch.uint8, index % 2), host, host.numel())]
        if op.kind == Kind.STREAM_IN and op.unit != EMBED:
            slab = self.slabs(op.unit).weights
            buffer = self.memory.weights_of(op.unit)[: slab.numel()]
            return [Copy(buffer, slab, slab.numel() * slab.element_size())]
        return None

    # Updates, faults and waiting

    def run_update(self, schedule: Pass, moves: Mapping[str, Sequence[Move]], table: TableUpdate | None) -> None:
        """Issue an update pass. A fault before an operation leaves the rest pending; the next use goes on with them.

        Args:
            schedule: of all units but the table.
            moves: by unit.
            table: the table's part, for the next forward to do.
        """
        self.check_alive()
        self.updates.finish()
        self.weights_changed()
        self.updates.table = table
        self.cursor.start(schedule, lambda op: moves[op.unit])
        self.updates.add(self.cursor.update_tasks())
        self.cursor.finish()

    def weights_changed(self) -> None:
        """The host's weights are new, or will be when the updates that are on their way are done."""
        self.store.version += 1

    def notice_writes(self, expected: bool = False) -> None:
        """Follow what others have written to the weights. ``expected``: with their low halves, if they have any."""
        written = self._watch.written()
        if not written:
            return
        self.weights_changed()
        if self.store.precision.low_half and not expected:
            for name in written:
                self.store.reset_low(name)
            if self._warned:
                return
            self._warned = True
            warnings.warn(
                f"{written[0]}{f' and {len(written) - 1} others' if written[1:] else ''} of a streamed model in precision "
                "'fp32_master' were written by other code. They are exactly the bfloat16 values that were written: the 16 low "
                "bits of their fp32 master are zero now. A loaded optimizer state of horizon_lm.AdamW brings them back.",
                ForeignWriteWarning,
                stacklevel=3,
            )

    def before_foreign_step(self, optimizer: str) -> None:
        """Another optimizer is about to update weights. StreamingError if it would lose their low halves."""
        if self.store.precision.low_half:
            raise StreamingError(
                f"{optimizer} sees bfloat16 weights and would round every update to them: in precision 'fp32_master' their "
                "other 16 bits are horizon_lm.AdamW's. Use that optimizer, or stream with precision='bf16' or 'float32'."
            )
        self.hand_out_weight()

    def update_in_backward(self, updates: UpdatesInBackward) -> None:
        """From now on units are updated as their gradients land. ConfigError if there is a gradient store already."""
        if self.store.has_grads:
            raise ConfigError(
                "update_in_backward keeps no gradients, but this model has been trained with a gradient store; make the "
                "optimizer before the first training forward"
            )
        self._updates_in_backward = weakref.ref(updates)
        self.allocate_grads()
        self.grads.slots = LandingSlots(self.store, self.device, self.parts)

    @property
    def _in_backward(self) -> UpdatesInBackward | None:
        """The optimizer that updates units as their gradients land; None if they are kept for a step."""
        if self._updates_in_backward is None:
            return None
        updates = self._updates_in_backward()
        if updates is None:
            raise StreamingError(
                "the optimizer with update_in_backward is gone, and gradients are not kept; load the model again"
            )
        return updates

    def check_alive(self) -> None:
        """Go on with an update pass that was broken off. PartialUpdateError if an update failed half-way."""
        self.updates.partial_update.require_complete()
        if self.cursor.schedule is not None and self.cursor.schedule.name == "update":
            self.cursor.finish()

    def fault(self, error: BaseException) -> None:
        """Give up the running pass: free all slots and boundaries; a backward's gradients are invalid."""
        if self._backward_of is not None and self.cursor.update_begun():
            self.updates.partial_update.record(error)  # some units of this step are new, some old
        if self._backward_of is not None:  # a forward touches no gradient in host memory
            self.grads.break_off()
        self.cursor.abandon()
        self._quiesce()
        for handle in (self._backward_of, self.handle):
            if handle is not None:
                handle.consumed = True
                self.boundaries.release(handle)
        self._backward_of, self.handle, self._after_grad = None, None, {}
        self.head_buffer.release()
        self._graphs.release()

    def _quiesce(self) -> None:
        """Wait until nothing runs. An update that could not begin because of a fault raises it here; it stays pending."""
        for _ in self.store.units:
            # A failed update is forgotten when it is raised; one that failed inside a kernel has torn the model.
            with suppress(Exception):
                self.device.synchronize()
                return
        self.device.synchronize()  # what is raised now is no update

    def clear_grads(self) -> None:
        """All gradients are empty again, and a fault is forgiven. No memory is written."""
        self.wait_for_grads()
        self.grads.clear()

    def hand_out_weight(self) -> None:
        """Somebody may read a weight, or write to it: its update must be done."""
        if self.cursor.active:  # of the running pass, what has begun; the rest comes after
            self.updates.wait(self.cursor.update_tasks())
        else:
            self.updates.finish()

    def hand_out_grad(self, param: nn.Parameter) -> None:
        """Somebody may read a gradient, or write to it: it must have landed, and no update may still need it."""
        name = self._name_of.get(id(param))
        if name is None:
            return
        if self._in_backward is not None and self._in_backward.pending:
            raise StreamingError(
                f"{name}.grad: with update_in_backward no gradients are kept, they are applied as they come. Gradients cannot "
                "be read or clipped (clip_grad_norm_); use horizon_lm.AdamW without update_in_backward for that"
            )
        if landing_grad(param) is not None:
            self.wait_for_grads()
            self.hand_out_weight()
        self.grads.hand_out(self.store.unit_of[name])

    def wait_for_grads(self) -> None:
        """Block until the gradients of finished backward passes are in host memory."""
        if self._backward_of is not None:
            return
        try:
            self.grads.wait()
        except Exception as error:
            if self._in_backward is not None:
                self.updates.partial_update.record(error)
            raise

    def settle(self) -> None:
        """Finish all updates, and follow what others have written, so that the weights are those of now."""
        self.check_alive()
        self.drain()
        self.notice_writes()

    def drain(self) -> None:
        """Block until nothing is on its way, and all updates are done."""
        self.device.synchronize()
        self.updates.finish()
        if not self.cursor.active:
            self.cursor.forget()
