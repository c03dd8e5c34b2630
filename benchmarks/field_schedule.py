"""MegaTrain's training step in the words of our schedule, after its public code, so that our simulator can price it.

Written down from what the code does, not copied: three loads and three forwards of every block, and one optimizer that
waits for everything. What is in host threads has no words of its own, so `Kind.UPDATE_ROWS`, host work that copies wait
for, stands for two things: packing a block's parameters into a page-locked buffer (stream ``host``, the main thread), and
landing a gradient in the parameters' own (stream ``copy_out``, the thread behind the copies).
"""

from dataclasses import dataclass
from math import ceil

from horizon_lm.plan.catalog import Hardware
from horizon_lm.plan.outline import ModelOutline, Work
from horizon_lm.plan.step import Step, StepSettings, rates
from horizon_lm.schedule.ops import EMBED, HEAD, Buf, Buffer, Kind, Op, Pass, Stream, block
from horizon_lm.schedule.simulate import Cost, step_seconds
from horizon_lm.schedule.waits import derive_waits

ALL = "all units"
BYTES = 2  # of a weight and of a gradient, in host memory and on the device: bf16
COPIED = 2 * BYTES  # read and written
OPTIMIZER_BYTES = 30  # of host traffic per parameter: clipping 6, DeepSpeedCPUAdam with fp32 moments 22, zeroing 2
LOSS = Buffer(Buf.HEAD, "loss")


@dataclass(frozen=True, slots=True)
class FieldSettings:
    """How their step is run.

    Attributes:
        rows: of a step, all of them on the device at once.
        interval: blocks between two checkpoints.
        double_buffered: without it, a load begins when the computation before it has ended.
        slab_pool: without it, a block's gradient has landed before the next block is bound.
    """

    rows: int
    interval: int = 4
    double_buffered: bool = True
    slab_pool: bool = True


class _Issued:
    """Operations in the order in which their main thread issues them."""

    def __init__(self, settings: FieldSettings) -> None:
        self._settings = settings
        self.ops: list[Op] = []

    def slot(self, index: int) -> int:
        return index % 2 if self._settings.double_buffered else 0

    def compute(self, kind: Kind, unit: str, reads: tuple[Buffer, ...] = (), writes: tuple[Buffer, ...] = ()) -> None:
        self.ops.append(Op(kind, unit, Stream.COMPUTE, reads, writes))

    def load(self, index: int, after: tuple[Buffer, ...] = ()) -> None:
        """Pack a block, and send it to the device."""
        slot = self.slot(index)
        pinned, flat = Buffer(Buf.HOST_WEIGHTS, f"pinned {slot}"), Buffer(Buf.WEIGHTS, slot)
        weights = Buffer(Buf.HOST_WEIGHTS, block(index))
        waited_for = () if self._settings.double_buffered else (self.template(index),)
        self.ops += [
            Op(Kind.UPDATE_ROWS, block(index), Stream.HOST, (weights, *after), (pinned, *waited_for)),
            Op(Kind.STREAM_IN, block(index), Stream.COPY_IN, (pinned,), (flat,)),
        ]

    def template(self, index: int) -> Buffer:
        return Buffer(Buf.HELD, self.slot(index))

    def grads(self, index: int) -> Buffer:
        """On the device until they have been copied out; without slabs, until they have landed."""
        return Buffer(Buf.GRADS, index % 2 if self._settings.slab_pool else 0)

    def run(self, kind: Kind, index: int) -> None:
        """Copy a block from its flat buffer into the template, whose last gradients must be out; and compute."""
        template, grads = self.template(index), self.grads(index)
        self.compute(Kind.STAGE, block(index), (Buffer(Buf.WEIGHTS, self.slot(index)),), (template, grads))
        self.compute(kind, block(index), (template,), (grads,) if kind == Kind.BACKWARD else ())

    def land(self, unit: str, grads: Buffer) -> None:
        slab, landed = Buffer(Buf.STAGING, unit), Buffer(Buf.HOST_GRADS, unit)
        held = () if self._settings.slab_pool else (grads,)
        self.ops += [
            Op(Kind.STREAM_OUT, unit, Stream.COPY_OUT, (grads,), (slab,)),
            Op(Kind.UPDATE_ROWS, unit, Stream.COPY_OUT, (slab, *held), (landed,)),
        ]


def field_pass(num_blocks: int, tied: bool, settings: FieldSettings) -> Pass:
    """One step with one micro-batch, from the weights that stay on the device to the optimizer."""
    issued, blocks = _Issued(settings), range(num_blocks)
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
        for index in group:  # computed again without a graph, for the inputs of these blocks
            issued.load(index, after=(LOSS,))  # the loss is looked at before the backward
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
    return Pass("step", derive_waits(issued.ops))


@dataclass(frozen=True)
class FieldStep:
    """Their step of a model."""

    outline: ModelOutline
    settings: FieldSettings

    @property
    def tokens(self) -> int:
        return self.settings.rows * self.outline.length

    def executed(self, forwards: int = 3, backwards: int = 1) -> float:
        """Operations of products and attention in a step, the head's with the backward."""
        rows, work = self.settings.rows, Work(products=6.0 * backwards * sum(self.outline.sizes.head) * self.tokens)
        for kind in self.outline.kinds:
            work += (kind.forward.at(rows) * forwards + kind.backward.at(rows) * backwards) * len(kind.indices)
        return work.products + work.attention

    def passes(self) -> list[Pass]:
        return [field_pass(self.outline.num_blocks, self.outline.trained.tied, self.settings)]

    def cost(self, hardware: Hardware, packing: float | None = None) -> Cost:
        """Costs for `schedule.simulate`: ours, but for what only they do.

        Args:
            packing: bytes per second that one thread copies in host memory; None if all cores do it.
        """
        ours = Step(self.outline, StepSettings(self.settings.rows, precision="bf16", chunked_head=False)).cost(hardware)
        sizes = self.outline.sizes
        num_parameters = {ALL: sizes.num_parameters, EMBED: sum(sizes.table), HEAD: sum(sizes.head)}
        num_parameters |= {block(index): sum(sizes.blocks[index]) for index in range(self.outline.num_blocks)}
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
        """Their peak on the device, estimated: at the loss, whose logits wait for one backward, or in a block's backward."""
        sizes, settings = self.outline.sizes, self.settings
        boundary = self.tokens * sizes.hidden * BYTES
        on_device = BYTES * (sum(sizes.table) + sum(sizes.own_head) + sum(sizes.head))  # with the gradient of the head
        on_device += 6 * BYTES * max(map(sum, sizes.blocks))  # two each: flat buffers, templates, gradients
        kept = boundary * (ceil(self.outline.num_blocks / settings.interval) + 1)
        loss = BYTES * self.tokens * sizes.vocabulary + _BOUNDARIES_AT_LOSS * boundary
        blocks = boundary * (settings.interval + 1) + max(
            kind.footprint(settings.rows).peak for kind in self.outline.kinds
        )
        return on_device + kept + max(loss, blocks)


# The norm runs twice with a graph, and keeps its input in fp32, two bf16 results: 4 each time. Slices of its result are
# copied, 1; each gives back a gradient as large as the whole, which is added to the others, 3.
_BOUNDARIES_AT_LOSS = 12


def most_rows(outline: ModelOutline, hardware: Hardware) -> int:
    """The most rows, an even number, whose step fits the device by `FieldStep.device_bytes`."""
    room = 0.95 * hardware.device_memory
    fits = (rows for rows in range(2, 1025, 2) if FieldStep(outline, FieldSettings(rows)).device_bytes() > room)
    return next(fits) - 2


@dataclass(frozen=True, slots=True)
class FieldTime:
    """Seconds of one of their steps among many, simulated; of it, those of computation, and of the optimizer alone."""

    seconds: float
    computing: float
    optimizer: float

    @property
    def waiting(self) -> float:
        """For loads, and for gradients to land."""
        return max(0.0, self.seconds - self.computing - self.optimizer)


def field_time(step: FieldStep, hardware: Hardware, packing: float | None = None) -> FieldTime:
    """Simulate their step on a machine. ``packing``: as in `FieldStep.cost`."""
    passes, cost = step.passes(), step.cost(hardware, packing)
    return FieldTime(
        seconds=step_seconds(passes, cost, rates(hardware), num_steps=3),
        computing=sum(cost(op) for op in passes[0].ops if op.stream == Stream.COMPUTE),
        optimizer=sum(cost(op) for op in passes[0].ops if op.kind == Kind.UPDATE) / hardware.host_rate,
    )
