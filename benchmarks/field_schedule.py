"""MegaTrain's training step as one of our schedules, after its public code, so that our simulator can price it.

It describes the behaviour of that code and copies nothing: three loads and three forwards of every block, and one optimizer
that waits for everything. Our schedules have no operations for host threads, so `Kind.UPDATE_ROWS`, host work that copies
wait for, stands for two: packing a block's parameters into a page-locked buffer (stream ``host``, the main thread), and
landing a gradient in that of the parameters (stream ``copy_out``, the thread behind the copies).
"""

from dataclasses import dataclass
from math import ceil

from horizon_lm.common.units import EMBED, HEAD, block
from horizon_lm.planning.arithmetic.catalog import Hardware
from horizon_lm.planning.arithmetic.outline import ModelOutline, Work
from horizon_lm.planning.arithmetic.step import Step, StepSettings
from horizon_lm.planning.arithmetic.step_cost import StepCost, rates
from horizon_lm.schedule.ops import Buf, Buffer, Kind, Op, Schedule, Stream
from horizon_lm.schedule.simulate import Cost, step_seconds
from horizon_lm.schedule.waits import derive_waits

ALL = "all units"
BYTES = 2  # per weight and per gradient in bf16, in host memory and on the device
COPIED = 2 * BYTES  # read and written
OPTIMIZER_BYTES = 30  # host traffic per parameter: clipping 6, DeepSpeedCPUAdam with fp32 moments 22, zeroing 2
LOSS = Buffer(Buf.HEAD, "loss")


@dataclass(frozen=True, slots=True)
class FieldSettings:
    """The settings of their step.

    Attributes:
        rows: rows of a step, all on the device at once.
        interval: blocks between two activation checkpoints.
        double_buffered: prefetch into a second buffer; without it, a load begins after the computation before it.
        slab_pool: bind the next block while a gradient lands; without it, the gradient must land first.
    """

    rows: int
    interval: int = 4
    double_buffered: bool = True
    slab_pool: bool = True


class _IssuedOps:
    """The operations in the order in which their main thread issues them."""

    def __init__(self, settings: FieldSettings) -> None:
        self._settings = settings
        self.ops: list[Op] = []

    def slot(self, index: int) -> int:
        return index % 2 if self._settings.double_buffered else 0

    def compute(self, kind: Kind, unit: str, reads: tuple[Buffer, ...] = (), writes: tuple[Buffer, ...] = ()) -> None:
        self.ops.append(Op(kind, unit, Stream.COMPUTE, reads, writes))

    def load(self, index: int, after: tuple[Buffer, ...] = ()) -> None:
        """Pack a block and copy it to the device."""
        slot = self.slot(index)
        pinned, flat = Buffer(Buf.HOST_WEIGHTS, f"pinned {slot}"), Buffer(Buf.WEIGHTS, slot)
        weights = Buffer(Buf.HOST_WEIGHTS, block(index))
        waited_for = () if self._settings.double_buffered else (self.template(index),)
        self.ops += [
            Op(Kind.UPDATE_ROWS, block(index), Stream.HOST, (weights, *after), (pinned, *waited_for)),
            Op(Kind.STREAM_IN, block(index), Stream.COPY_IN, (pinned,), (flat,)),
        ]

    def template(self, index: int) -> Buffer:
        return Buffer(Buf.RESIDENT, self.slot(index))

    def grads(self, index: int) -> Buffer:
        """Return the gradients' buffer, which is free once they are copied out, or without the slab pool once they landed."""
        return Buffer(Buf.GRADS, index % 2 if self._settings.slab_pool else 0)

    def run(self, kind: Kind, index: int) -> None:
        """Copy a block from its flat buffer into the template, whose last gradients must be copied out, and compute."""
        template, grads = self.template(index), self.grads(index)
        self.compute(Kind.STAGE, block(index), (Buffer(Buf.WEIGHTS, self.slot(index)),), (template, grads))
        self.compute(kind, block(index), (template,), (grads,) if kind == Kind.BACKWARD else ())

    def land(self, unit: str, grads: Buffer) -> None:
        slab, landed = Buffer(Buf.ROUNDED, unit), Buffer(Buf.HOST_GRADS, unit)
        held = () if self._settings.slab_pool else (grads,)
        self.ops += [
            Op(Kind.STREAM_OUT, unit, Stream.COPY_OUT, (grads,), (slab,)),
            Op(Kind.UPDATE_ROWS, unit, Stream.COPY_OUT, (slab, *held), (landed,)),
        ]


def field_pass(num_blocks: int, tied: bool, settings: FieldSettings) -> Schedule:
    """Return a step with one micro-batch, from copying the resident weights to the optimizer."""
    issued, blocks = _IssuedOps(settings), range(num_blocks)
    of_device = {EMBED: Buffer(Buf.TABLE_ROWS), HEAD: Buffer(Buf.TABLE_ROWS if tied else Buf.HEAD)}
    for unit in (EMBED,) if tied else (EMBED, HEAD):
        issued.ops.append(
            Op(Kind.STREAM_IN, unit, Stream.COPY_IN, (Buffer(Buf.HOST_WEIGHTS, unit),), (of_device[unit],))
        )
    issued.compute(Kind.FORWARD, EMBED, (of_device[EMBED],))
    issued.load(0)
    for index in blocks:
        if index + 1 < num_blocks:
            issued.load(index + 1)
        issued.run(Kind.FORWARD, index)

    head_grads = Buffer(Buf.HEAD_GRADS)
    issued.compute(Kind.FORWARD, HEAD, (of_device[HEAD],), (LOSS,))
    issued.compute(Kind.BACKWARD, HEAD, (of_device[HEAD],), (head_grads,))
    if not tied:
        issued.land(HEAD, head_grads)

    groups = [blocks[start : start + settings.interval] for start in blocks[:: settings.interval]]
    for group in reversed(groups):
        for index in group:  # recomputed without a graph, for the inputs of these blocks
            issued.load(index, after=(LOSS,))  # the host reads the loss before the backward
            issued.run(Kind.FORWARD, index)
        for index in reversed(group):
            issued.load(index)
            issued.run(Kind.BACKWARD, index)
            issued.land(block(index), issued.grads(index))

    table_grads = Buffer(Buf.TABLE_ROW_GRADS)
    issued.compute(Kind.BACKWARD, EMBED, (of_device[EMBED],), (table_grads,))
    issued.land(EMBED, table_grads)
    units = [EMBED, *map(block, blocks), *(() if tied else (HEAD,))]
    issued.ops.append(
        Op(
            Kind.UPDATE, ALL, Stream.HOST, tuple(Buffer(Buf.HOST_GRADS, unit) for unit in units),
            tuple(Buffer(Buf.HOST_WEIGHTS, unit) for unit in units),
        )
    )  # fmt: skip
    return Schedule("step", derive_waits(issued.ops))


@dataclass(frozen=True)
class FieldStep:
    """MegaTrain's step of a model."""

    outline: ModelOutline
    settings: FieldSettings

    @property
    def tokens(self) -> int:
        return self.settings.rows * self.outline.length

    def executed(self, forwards: int = 3, backwards: int = 1) -> float:
        """Return the operations of products and attention in a step, with the head's in the backward."""
        rows, work = (
            self.settings.rows,
            Work(products=6.0 * backwards * self.outline.layout.numel(HEAD) * self.tokens),
        )
        for kind in self.outline.kinds:
            work += (kind.forward.at(rows) * forwards + kind.backward.at(rows) * backwards) * len(kind.indices)
        return work.products + work.attention

    def passes(self) -> list[Schedule]:
        return [field_pass(self.outline.num_blocks, self.outline.layout.tied, self.settings)]

    def cost(self, hardware: Hardware, packing: float | None = None) -> Cost:
        """Return costs for `schedule.simulate`: ours, except for operations that only they have.

        Args:
            packing: bytes per second of one thread that packs; None if all cores pack.
        """
        ours = StepCost(Step(self.outline, StepSettings(self.settings.rows, precision="bf16", head="whole")), hardware)
        layout = self.outline.layout
        units = [EMBED, *layout.blocks, HEAD]
        num_parameters = {ALL: layout.num_parameters} | {unit: layout.numel(unit) for unit in units}
        copied = COPIED if packing is None else BYTES * hardware.host_rate / packing

        def cost(op: Op) -> float:
            count = num_parameters[op.unit]
            if op.kind == Kind.UPDATE:
                return OPTIMIZER_BYTES * count
            if op.kind == Kind.UPDATE_ROWS:
                return copied * count
            if op.kind in (Kind.STREAM_IN, Kind.STREAM_OUT):
                return BYTES * count
            if op.kind == Kind.STAGE:
                return COPIED * count / hardware.device_bandwidth
            return ours(op)

        return cost

    def device_bytes(self) -> int:
        """Estimate their peak on the device: at the loss, which keeps all logits for one backward, or in a block's backward."""
        layout, settings = self.outline.layout, self.settings
        checkpoint = self.tokens * layout.hidden * BYTES
        ends = layout.numel(EMBED) + (0 if layout.tied else layout.numel(HEAD))
        on_device = BYTES * (ends + layout.numel(HEAD))  # with the head's gradient
        on_device += 6 * BYTES * max(map(layout.numel, layout.blocks))  # two each: flat buffers, templates, gradients
        kept = checkpoint * (ceil(self.outline.num_blocks / settings.interval) + 1)
        loss = BYTES * self.tokens * layout.vocabulary + _CHECKPOINTS_AT_LOSS * checkpoint
        blocks = checkpoint * (settings.interval + 1) + max(
            kind.footprint.at(settings.rows).peak for kind in self.outline.kinds
        )
        return on_device + kept + max(loss, blocks)


# The norm runs twice with a graph, each time keeping an fp32 input and two bf16 results: 4 each. Slices of its result are
# copied: 1. Each slice returns a gradient as large as the whole, which is added to the others: 3.
_CHECKPOINTS_AT_LOSS = 12


def most_rows(outline: ModelOutline, hardware: Hardware) -> int:
    """Return the largest even number of rows whose step fits the device by `FieldStep.device_bytes`."""
    room = 0.95 * hardware.device_memory
    fits = (rows for rows in range(2, 1025, 2) if FieldStep(outline, FieldSettings(rows)).device_bytes() > room)
    return next(fits) - 2


@dataclass(frozen=True, slots=True)
class FieldTime:
    """The simulated seconds of one of their steps among many, and of its computation and its optimizer."""

    seconds: float
    computing: float
    optimizer: float

    @property
    def waiting(self) -> float:
        """The seconds of waiting for loads, and for gradients to land."""
        return max(0.0, self.seconds - self.computing - self.optimizer)


def field_time(step: FieldStep, hardware: Hardware, packing: float | None = None) -> FieldTime:
    """Simulate their step on a machine. ``packing``: as in `FieldStep.cost`."""
    passes, cost = step.passes(), step.cost(hardware, packing)
    return FieldTime(
        seconds=step_seconds(passes, cost, rates(hardware), num_steps=3),
        computing=sum(cost(op) for op in passes[0].ops if op.stream == Stream.COMPUTE),
        optimizer=sum(cost(op) for op in passes[0].ops if op.kind == Kind.UPDATE) / hardware.host_rate,
    )
