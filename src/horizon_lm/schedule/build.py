"""The passes of a training step as lists of operations, in the order in which one thread would issue them.

A block's weights are issued one unit ahead, so that they travel while the block before them computes. Block ``u`` uses
weight slot ``u % 2``, gradient slot ``u % 2`` and ring slot ``u % 2``; head, outer and embedding rows have buffers of
their own.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from horizon_lm.schedule.ops import EMBED, HEAD, OUTER, Buf, Buffer, Kind, Op, Pass, Stream, block
from horizon_lm.schedule.waits import derive_waits

_KEPT = 32  # passes of each kind: a step needs one of each, and to derive the waits of a deep one takes tens of milliseconds


@dataclass(frozen=True, slots=True)
class Layout:
    """What of a model and its settings shapes the schedule.

    Attributes:
        num_blocks: number of decoder blocks.
        tied: the head reads the embedding table's slab.
        offloaded: so many of the first blocks keep their boundary in host memory between forward and backward.
        held: so many of the last blocks keep their weights on the device until an update changes them.
        accumulate: several micro-batches add into an fp32 accumulator, which a staging slot carries to the host.
        update_in_backward: a unit is updated as soon as its gradient has landed. Blocks share two landing slots in host
            memory; only a tied table has a gradient slab, because two gradients add up there.
    """

    num_blocks: int
    tied: bool = False
    offloaded: int = 0
    held: int = 0
    accumulate: bool = False
    update_in_backward: bool = False

    def is_offloaded(self, index: int) -> bool:
        return index < self.offloaded

    def is_held(self, index: int) -> bool:
        return index >= self.num_blocks - self.held

    def weights(self, index: int) -> Buffer:
        """Where a block's weights are on the device."""
        return Buffer(Buf.HELD, index) if self.is_held(index) else Buffer(Buf.WEIGHTS, index % 2)


def _host(kind: Buf, unit: str, layout: Layout) -> Buffer:
    return Buffer(kind, EMBED if unit == HEAD and layout.tied else unit)


def _stream_in(unit: str, into: Buffer, layout: Layout) -> Op:
    return Op(Kind.STREAM_IN, unit, Stream.COPY_IN, (_host(Buf.HOST_WEIGHTS, unit, layout),), (into,))


def _landing(unit: str, layout: Layout) -> Buffer:
    """Where a unit's gradients arrive in host memory."""
    if not layout.update_in_backward or (layout.tied and unit in (EMBED, HEAD)):
        return _host(Buf.HOST_GRADS, unit, layout)
    return Buffer(Buf.HOST_LANDING, int(unit.removeprefix("block")) % 2 if unit.startswith("block") else unit)


def _stream_out(unit: str, source: Buffer, layout: Layout) -> list[Op]:
    """A landing and, where it is wanted, the update at once. The table's is left to the next forward."""
    landing = _landing(unit, layout)
    # Onto a slab that is not empty a landing adds, so it reads it as well.
    reads = (source, landing) if landing.kind == Buf.HOST_GRADS else (source,)
    ops = [Op(Kind.STREAM_OUT, unit, Stream.COPY_OUT, reads, (landing,))]
    if layout.update_in_backward and unit != EMBED and not (layout.tied and unit == HEAD):
        ops.append(_update(unit, layout))
    return ops


def _update(unit: str, layout: Layout, kind: Kind = Kind.UPDATE, stream: Stream = Stream.HOST) -> Op:
    weights = _host(Buf.HOST_WEIGHTS, unit, layout)
    return Op(kind, unit, stream, (_landing(unit, layout), weights), (weights,))


def _compute(kind: Kind, unit: str, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...] = ()) -> Op:
    # Outer parameters may be read by any of the model's own code, which runs between our operations.
    return Op(kind, unit, Stream.COMPUTE, (*reads, Buffer(Buf.OUTER)), writes)


def forward(
    layout: Layout,
    *,
    keeps: Iterable[int] = (),
    embed: bool = True,
    changed: bool = True,
    table_update: bool = False,
    head: bool = True,
    head_grads: bool = False,
) -> Pass:
    """Return a forward pass.

    Args:
        keeps: blocks whose boundary is kept for a backward pass (none in evaluation).
        embed: the table is read (false when the caller brings ``inputs_embeds``).
        changed: weights have changed since the last forward, or are about to. The outer parameters and held blocks are
            streamed in only then; they stay on the device.
        table_update: the table's update is still to come. The rows that this forward reads come first, the others when
            all other units have been updated.
        head: the output projection is used.
        head_grads: the head's gradients are made in the forward.
    """
    return _forward(layout, frozenset(keeps), embed, changed, table_update, head, head_grads)


@lru_cache(_KEPT)
def _forward(
    layout: Layout, keeps: frozenset[int], embed: bool, changed: bool, table_update: bool, head: bool, head_grads: bool
) -> Pass:
    ops: list[Op] = []
    if changed:
        ops.append(_stream_in(OUTER, Buffer(Buf.OUTER), layout))
    ops.append(_compute(Kind.FORWARD, OUTER, ()))
    if embed:
        if table_update:
            ops.append(_update(EMBED, layout, Kind.UPDATE_ROWS, Stream.COPY_IN))
        ops.append(_stream_in(EMBED, Buffer(Buf.TABLE_ROWS), layout))
    if table_update:
        ops.append(_update(EMBED, layout))
    if embed:
        ops.append(_compute(Kind.FORWARD, EMBED, (Buffer(Buf.TABLE_ROWS),)))

    def load(u: int) -> list[Op]:
        stays = layout.is_held(u) and not changed
        return [] if stays else [_stream_in(block(u), layout.weights(u), layout)]

    ops.extend(load(0))
    for u in range(layout.num_blocks):
        last = u == layout.num_blocks - 1
        if not last:
            ops.extend(load(u + 1))
        elif head:
            ops.append(_stream_in(HEAD, Buffer(Buf.HEAD), layout))
        offload = layout.is_offloaded(u) and u in keeps
        ring = Buffer(Buf.RING, u % 2)
        ops.append(_compute(Kind.FORWARD, block(u), (layout.weights(u),), (ring,) if offload else ()))
        if offload:
            ops.append(Op(Kind.OFFLOAD, block(u), Stream.COPY_OUT, (ring,), (Buffer(Buf.HOST_BOUNDARY, u),)))
    if head:
        grads = (Buffer(Buf.HEAD_GRADS),) if head_grads else ()
        ops.append(_compute(Kind.FORWARD, HEAD, (Buffer(Buf.HEAD),), grads))

    return Pass("forward", derive_waits(ops), keeps)


def backward(
    layout: Layout,
    *,
    blocks: Iterable[int],
    trainable: Iterable[str],
    head: bool = True,
    head_grads: bool = False,
) -> Pass:
    """Return a backward pass over the blocks that the forward kept.

    Args:
        blocks: the kept blocks, in any order.
        trainable: units with at least one trainable parameter; others are differentiated through only.
        head: the head takes part.
        head_grads: the head's gradients were made in the forward, so only their scaling is left.
    """
    return _backward(layout, frozenset(blocks), frozenset(trainable), head, head_grads)


@lru_cache(_KEPT)
def _backward(layout: Layout, blocks: frozenset[int], trainable: frozenset[str], head: bool, head_grads: bool) -> Pass:
    order = sorted(blocks, reverse=True)
    ops: list[Op] = []

    if head:
        grads = Buffer(Buf.HEAD_GRADS)
        if not head_grads:
            ops.append(_stream_in(HEAD, Buffer(Buf.HEAD), layout))
        reads = (grads,) if head_grads else (Buffer(Buf.HEAD),)
        ops.append(_compute(Kind.BACKWARD, HEAD, reads, (grads,) if HEAD in trainable else ()))
        if HEAD in trainable:
            ops.extend(_stream_out(HEAD, grads, layout))

    def load(u: int) -> list[Op]:
        fetch = Op(
            Kind.FETCH, block(u), Stream.COPY_IN, (Buffer(Buf.HOST_BOUNDARY, u),), (Buffer(Buf.RING, u % 2),)
        )  # fmt: skip
        # The boundary comes first: waiting for the weights then means having both.
        weights = [] if layout.is_held(u) else [_stream_in(block(u), layout.weights(u), layout)]
        return [*([fetch] if layout.is_offloaded(u) else []), *weights]

    if order:
        ops.extend(load(order[0]))
    for position, u in enumerate(order):
        if position + 1 < len(order):
            ops.extend(load(order[position + 1]))
        inputs = [layout.weights(u), *([Buffer(Buf.RING, u % 2)] if layout.is_offloaded(u) else [])]
        if block(u) not in trainable:
            ops.append(_compute(Kind.BACKWARD, block(u), tuple(inputs)))
        elif layout.accumulate:
            accumulator, staging = Buffer(Buf.ACCUMULATOR), Buffer(Buf.STAGING)
            ops.append(_compute(Kind.BACKWARD, block(u), tuple(inputs), (accumulator,)))
            ops.append(_compute(Kind.STAGE, block(u), (accumulator,), (staging,)))
            ops.extend(_stream_out(block(u), staging, layout))
        else:
            slot = Buffer(Buf.GRADS, u % 2)
            ops.append(_compute(Kind.BACKWARD, block(u), tuple(inputs), (slot,)))
            ops.extend(_stream_out(block(u), slot, layout))

    for unit, grads in ((EMBED, Buffer(Buf.TABLE_ROW_GRADS)), (OUTER, Buffer(Buf.OUTER_GRADS))):
        if unit in trainable:
            ops.append(_compute(Kind.BACKWARD, unit, (), (grads,)))
            ops.extend(_stream_out(unit, grads, layout))

    return Pass("backward", derive_waits(ops))


def update(layout: Layout, units: Iterable[str]) -> Pass:
    """Return the optimizer's pass over the given units, in the order given (that of the next forward's deadlines)."""
    return _update_pass(layout, tuple(units))


@lru_cache(_KEPT)
def _update_pass(layout: Layout, units: tuple[str, ...]) -> Pass:
    ops = [_update(unit, layout) for unit in units]
    return Pass("update", derive_waits(ops))
