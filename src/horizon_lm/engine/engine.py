"""The executor: passes over the units, and what each of their operations moves."""

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable

from horizon_lm.device.base import Device
from horizon_lm.device.moves import Copy, Move
from horizon_lm.engine.cursor import Cursor
from horizon_lm.engine.grads import HostGrads
from horizon_lm.engine.handle import BoundaryPool, Claim, ForwardHandle
from horizon_lm.engine.landing import LandingSlots
from horizon_lm.engine.memory import DeviceMemory, Options, block_index
from horizon_lm.engine.replay import MicroBatchRandomness
from horizon_lm.engine.updates import PendingUpdates, TableUpdate, UpdatesInBackward
from horizon_lm.errors import ConfigError, ScheduleMismatchError, StreamingError
from horizon_lm.model.parts import ModelParts, ParamRef
from horizon_lm.plan.residency import BatchSize, DevicePlan, Residency
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
        self._unit_of = {id(ref.param): self.store.unit_of[name] for name, ref in self.refs.items()}
        self.cursor = Cursor(device)
        self.grads = HostGrads(self.refs, store, device)
        self.boundaries = BoundaryPool(device)
        self.anchor = torch.zeros((), device=device.torch_device, requires_grad=True)
        self.counts: Counter[str] = Counter()  # rows through blocks, by kind of computation

        self.handle: ForwardHandle | None = None  # of the running forward, if it records
        self.randomness: MicroBatchRandomness | None = None
        self.num_rows = 0
        self.head_buffer, self._graphs = Claim(), Claim()  # the head's gradients made in a forward; kept graphs
        self._backward_of: ForwardHandle | None = None
        self._landed: set[str] = set()
        self._changed = True  # the weights, since the last forward
        self.updates = PendingUpdates(device)
        self._in_backward: UpdatesInBackward | None = None
        self._shape: tuple[Any, ...] = ()

        self.memory = DeviceMemory(parts, store, device, options)
        self.plan: DevicePlan | None = None  # None until a first batch is known
        self._planned = BatchSize()
        self._handles: weakref.WeakSet[ForwardHandle] = weakref.WeakSet()
        self._set_residency(options.residency or Residency(0))

    # Units and parameters

    def slab_unit(self, unit: str) -> str:
        """The unit whose slabs hold this one: a tied head's are the table's."""
        return EMBED if unit == HEAD and self.parts.tied else unit

    def slabs(self, unit: str) -> UnitSlabs:
        """The host slabs that hold a unit."""
        return self.store.units[self.slab_unit(unit)]

    def trainable(self, unit: str) -> list[str]:
        """Full names of a unit's parameters that take part in training now."""
        return [name for name in self.slabs(unit).layout if self.refs[name].param.requires_grad]

    def allocate_grads(self) -> None:
        """Make room for gradients of what is trainable now, unless that was done before."""
        trainable = [name for name, ref in self.refs.items() if ref.param.requires_grad]
        if not self.store.has_grads:
            kept = () if self._in_backward is not None else self.store.units
            self.grads.allocate(trainable, [*kept, *([EMBED] if self.parts.tied else [])])
        late = [name for name in trainable if name not in self.slabs_of(name).grad_layout]
        if late:
            raise StreamingError(
                f"{late[0]} was frozen when training began, so there is no room for its gradient; set requires_grad "
                "before the first training step"
            )

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
            if self.plan is not None:
                self._reside(self.plan.residency)

    def _reside(self, residency: Residency) -> None:
        if residency != self.residency:
            self.drain()
            self._set_residency(residency)

    def _set_residency(self, residency: Residency) -> None:
        self.residency = residency
        self.memory.hold(range(self.parts.num_blocks - residency.weights, self.parts.num_blocks))
        self._changed = True  # held weights have to be streamed in

    # Forward

    @contextmanager
    def forward_pass(
        self, *, recording: bool, rows: int, embed: bool, inputs_need_grad: bool, head_grads: bool
    ) -> Iterator[None]:
        """A forward runs inside. ``recording``: for a later backward."""
        self.check_alive()
        if self.cursor.active:  # a backward that died in foreign code, or a nested call
            self.fault(StreamingError("the backward before this forward was not finished"))
        keeps = self._kept_blocks(inputs_need_grad) if recording else frozenset()
        if recording:
            self.allocate_grads()
            self.handle = ForwardHandle(self.store.version, keeps)
            self._handles.add(self.handle)
            self.handle.head_grads = head_grads
            self._hold_graphs(self.handle)
        self._drain_if_reshaped(keeps)
        schedule = build.forward(
            self.layout,
            keeps=keeps,
            embed=embed,
            changed=self._changed,
            table_update=self.updates.table is not None,
            head_grads=head_grads and bool(self.trainable(HEAD)),
        )
        self.num_rows = rows
        self.randomness = MicroBatchRandomness(self.device, len(self.micro_batches()))
        try:
            self.cursor.start(schedule, self._moves)
            yield
            self.updates.add(self.cursor.update_tasks())
            self.cursor.finish()
            self._changed, self.updates.table = False, None
        except BaseException as error:
            self.fault(error)
            raise
        finally:
            self.handle = None

    def require_forward(self, unit: str) -> None:
        """ScheduleMismatchError when a unit is called by itself, outside a forward of the model."""
        if not self.cursor.active:
            raise ScheduleMismatchError("a forward of the whole model", f"{Kind.FORWARD} {unit}")

    def micro_batches(self) -> list[tuple[int, int]]:
        """Row ranges of the device micro-batches of the running forward."""
        size = self.options.device_micro_batch_size or self.num_rows
        return [(start, min(start + size, self.num_rows)) for start in range(0, self.num_rows, size)]

    def _kept_blocks(self, inputs_need_grad: bool) -> frozenset[int]:
        """Blocks that a gradient passes through: from the first trainable unit on."""
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
        shape = (keeps, self.residency, tuple(name for name, ref in self.refs.items() if ref.param.requires_grad))
        if shape != self._shape:
            self.drain()
            self._shape = shape

    def _hold_graphs(self, handle: ForwardHandle) -> None:
        """There is room for the graphs of one forward; another one before its backward does without."""
        if self._graphs.holder is None:
            first = self.parts.num_blocks - self.residency.graphs
            handle.graphs = frozenset(index for index in handle.keeps if index >= first)
            self._graphs.take(handle)

    def _evict_head_grads(self, handle: ForwardHandle) -> None:
        """A backward needs the head's buffer. Gradients of another forward in it are lost, and made again in its own."""
        holder = self.head_buffer.holder
        if holder is not None and holder is not handle:
            holder.head_grads = False
        self.head_buffer.release()

    # Backward

    @contextmanager
    def backward_of(self, handle: ForwardHandle) -> Iterator[None]:
        """A node of a backward runs inside; the first one of a forward begins its pass."""
        self.check_alive()
        if torch.is_grad_enabled():
            raise StreamingError("create_graph=True is not supported: a streamed model has no second derivatives")
        try:
            if self._backward_of is not handle:
                handle.check_usable(self.store.version)
                self._finish_backward()
                self._start_backward(handle)
            yield
        except BaseException as error:
            self.fault(error)
            raise

    def _start_backward(self, handle: ForwardHandle) -> None:
        if self.cursor.active:
            raise StreamingError("backward was called inside a forward of the same model")
        self.grads.forgive_if_empty()
        if self._in_backward is not None:
            self._in_backward.begin()
        trainable = [
            unit for unit in (EMBED, *map(block, range(self.parts.num_blocks)), HEAD, OUTER) if self.trainable(unit)
        ]  # fmt: skip
        self._backward_of, self._landed = handle, set()
        self._evict_head_grads(handle)
        schedule = build.backward(self.layout, blocks=handle.keeps, trainable=trainable, head_grads=handle.head_grads)
        self.cursor.start(schedule, self._moves)
        Variable._execution_engine.queue_callback(self._finish_backward)

    def _finish_backward(self) -> None:
        """Publish the gradients that are landing; called by autograd when its graph is done."""
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
        self.grads.publish(name for unit in self._landed for name in self.trainable(unit))

    def landed(self, unit: str) -> None:
        """The gradients of a unit are complete on the device and on their way."""
        self._landed.add(unit)

    def has_landed(self, unit: str) -> bool:
        return unit in self._landed

    def _moves(self, op: Op) -> Sequence[Move] | None:
        """What an operation of the pass that begins moves; None if only the batch will tell."""
        if op.kind == Kind.UPDATE:
            return self._update_moves(op.unit)
        if op.kind == Kind.STREAM_OUT and op.unit != EMBED:
            return self.grads.moves(self.slab_unit(op.unit), self.memory.grads_of(op))
        if op.kind == Kind.FETCH:
            assert self._backward_of is not None
            host = self._backward_of.boundaries[block_index(op.unit)]
            return [Copy(self.memory.ring.get(host.numel(), torch.uint8, block_index(op.unit) % 2), host, host.numel())]
        if op.kind == Kind.STREAM_IN and op.unit != EMBED:
            slab = self.slabs(op.unit).weights
            buffer = self.memory.weights_of(op.unit)[: slab.numel()]
            return [Copy(buffer, slab, slab.numel() * slab.element_size())]
        return None

    def _update_moves(self, unit: str) -> Sequence[Move]:
        """The table's pending update in a forward, or a unit's own in a backward."""
        if self._backward_of is None:
            assert self.updates.table is not None
            return self.updates.table.rest()
        assert self._in_backward is not None
        assert self.grads.slots is not None
        return self._in_backward.moves(unit, self.grads.slots.of(unit))

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
        self._changed = True

    def update_in_backward(self, updates: UpdatesInBackward) -> None:
        """From now on units are updated as their gradients land. ConfigError if there is a gradient store already."""
        if self.store.has_grads:
            raise ConfigError(
                "update_in_backward keeps no gradients, but this model has been trained with a gradient store; make the "
                "optimizer before the first training forward"
            )
        self._in_backward = updates
        self.allocate_grads()
        self.grads.slots = LandingSlots(self.store, self.device, self.parts)

    def check_alive(self) -> None:
        """Go on with an update pass that was broken off. TornModelError if an update failed half-way."""
        self.updates.refuse_if_torn()
        if self.cursor.schedule is not None and self.cursor.schedule.name == "update":
            self.cursor.finish()

    def fault(self, error: BaseException) -> None:
        """Give up the running pass: free all slots and boundaries, and invalidate the step's gradients."""
        if self._backward_of is not None and self.cursor.update_begun():
            self.updates.tear(error)  # some units of this step are new, some old
        if self.handle is not None or self._backward_of is not None:  # an evaluation touches no gradient
            self.grads.invalid = True
        self.cursor.abandon()
        self._quiesce()
        for handle in (self._backward_of, self.handle):
            if handle is not None:
                handle.consumed = True
                self.boundaries.release(handle)
        self._backward_of, self.handle = None, None
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

    def hand_out_grad(self, param: nn.Parameter) -> None:
        """Somebody may read a gradient, or write to it: it must have landed, and no update may still need it."""
        self.wait_for_grads()
        self.updates.finish()
        if id(param) in self._unit_of:
            self.grads.squares.forget(self._unit_of[id(param)])

    def wait_for_grads(self) -> None:
        """Block until the gradients of finished backward passes are in host memory."""
        if self._backward_of is not None:
            return
        try:
            self.grads.wait()
        except Exception as error:
            if self._in_backward is not None:
                self.updates.tear(error)
            raise

    def drain(self) -> None:
        """Block until nothing is on its way, and all updates are done."""
        self.device.synchronize()
        self.updates.finish()
        if not self.cursor.active:
            self.cursor.forget()
