"""The passes of a training step as lists of operations, in the order in which one thread would issue them.

A block's weights are issued one unit ahead, so that they travel while the block before them computes. Block ``u`` uses
weight slot ``u % 2``, gradient slot ``u % 2`` and ring slot ``u % 2``; head, outer and embedding rows have buffers of
their own.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from horizon_lm.schedule.ops import EMBED, HEAD, OUTER, Buf, Buffer, Kind, Op, Pass, Stream, block
from horizon_lm.schedule.waits import derive_waits


@dataclass(frozen=True, slots=True)
class Layout:
    """What of a model and its settings shapes the schedule.

    Attributes:
        num_blocks: number of decoder blocks.
        tied: the head reads the embedding table's slab.
        host_boundaries: boundaries are kept in host memory between forward and backward.
        accumulate: several micro-batches add into an fp32 accumulator, which a staging slot carries to the host.
        update_in_backward: a unit is updated as soon as its gradient has landed. Blocks share two landing slots in host
            memory; only a tied table has a gradient slab, because two gradients add up there.
    """

    num_blocks: int
    tied: bool = False
    host_boundaries: bool = False
    accumulate: bool = False
    update_in_backward: bool = False


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
    updated: Iterable[str] | None = (),
    table_update: bool = False,
    head: bool = True,
    head_grads: bool = False,
) -> Pass:
    """A forward pass.

    Args:
        keeps: blocks whose boundary is kept for a backward pass (none in evaluation).
        embed: the table is read (false when the caller brings ``inputs_embeds``).
        updated: units whose update was issued since the last forward; empty if weights changed otherwise, with the device
            drained; None if they did not. Only after an update do weights have to be waited for, and only when they
            changed are the outer parameters streamed in (they stay on the device until then).
        table_update: the table's update is still to come. The rows that this forward reads come first, the others when
            all other units have been updated.
        head: the output projection is used.
        head_grads: the head's gradients are made in the forward.
    """
    keeps = frozenset(keeps)
    updated = None if updated is None else frozenset(updated)
    after_update = updated is not None
    outer_updated = updated is not None and OUTER in updated
    ops: list[Op] = []
    if after_update:
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

    def load(u: int) -> Op:
        return _stream_in(block(u), Buffer(Buf.WEIGHTS, u % 2), layout)

    ops.append(load(0))
    for u in range(layout.num_blocks):
        last = u == layout.num_blocks - 1
        if not last:
            ops.append(load(u + 1))
        elif head:
            op = _stream_in(HEAD, Buffer(Buf.HEAD), layout)
            if table_update and not layout.tied:  # so that the end of a forward is the end of all updates
                op = replace(op, reads=(*op.reads, Buffer(Buf.HOST_WEIGHTS, EMBED)))
            ops.append(op)
        offload = layout.host_boundaries and u in keeps
        ring = Buffer(Buf.RING, u % 2)
        ops.append(_compute(Kind.FORWARD, block(u), (Buffer(Buf.WEIGHTS, u % 2),), (ring,) if offload else ()))
        if offload:
            ops.append(Op(Kind.OFFLOAD, block(u), Stream.COPY_OUT, (ring,), (Buffer(Buf.HOST_BOUNDARY, u),)))
    if head:
        grads = (Buffer(Buf.HEAD_GRADS),) if head_grads else ()
        ops.append(_compute(Kind.FORWARD, HEAD, (Buffer(Buf.HEAD),), grads))

    def settled(buffer: Buffer, stream: Stream) -> bool:
        if not after_update or (buffer.index == EMBED and stream == Stream.HOST):  # an earlier forward waited for it
            left = layout.update_in_backward or _head_grads_left(layout, keeps)
            return stream == Stream.HOST or (buffer.kind == Buf.HEAD_GRADS and left)
        if not updated:  # the device was drained
            return True
        if layout.update_in_backward and outer_updated:
            # The outer parameters, which are waited for, come last in a backward: after all computation and updates.
            return buffer.kind != Buf.HOST_WEIGHTS or buffer.index != OUTER
        # The update waited for every earlier copy, and the outer parameters wait for the update.
        return stream == Stream.COPY_IN or (stream == Stream.COPY_OUT and outer_updated)

    return Pass("forward", derive_waits(ops, settled), keeps)


def backward(
    layout: Layout,
    *,
    blocks: Iterable[int],
    trainable: Iterable[str],
    head: bool = True,
    head_grads: bool = False,
) -> Pass:
    """A backward pass over the blocks that the forward kept.

    Args:
        blocks: the kept blocks, in any order.
        trainable: units with at least one trainable parameter; others are differentiated through only.
        head: the head takes part.
        head_grads: the head's gradients were made in the forward, so only their scaling is left.
    """
    trainable = frozenset(trainable)
    order = sorted(blocks, reverse=True)
    trained = [u for u in order if block(u) in trainable]
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
        return [*([fetch] if layout.host_boundaries else []), _stream_in(block(u), Buffer(Buf.WEIGHTS, u % 2), layout)]

    if order:
        ops.extend(load(order[0]))
    for position, u in enumerate(order):
        if position + 1 < len(order):
            ops.extend(load(order[position + 1]))
        inputs = [Buffer(Buf.WEIGHTS, u % 2), *([Buffer(Buf.RING, u % 2)] if layout.host_boundaries else [])]
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

    def settled(buffer: Buffer, stream: Stream) -> bool:
        if stream == Stream.HOST:  # the forward waited for the update of every unit
            return True
        if stream == Stream.COPY_IN and buffer.kind == Buf.HOST_WEIGHTS:  # what was streamed in has been computed with
            return True
        if layout.update_in_backward and stream == Stream.COPY_OUT and buffer.kind != Buf.RING:
            return True  # the last backward's gradients are updates by now, and the forward waited for them
        one_forward = layout.host_boundaries or layout.update_in_backward
        if stream == Stream.COMPUTE and one_forward and not head_grads and buffer.kind != Buf.HEAD:
            # Blocks of an earlier forward computed before its head, which the head's weights waited for; those of an
            # earlier backward before its last copy out, which the first fetch waits for.
            return True
        left = _head_grads_left(layout, trained)
        if head_grads and not left and not layout.host_boundaries:
            return (
                stream == Stream.COPY_OUT
            )  # the forward's head waited for every earlier copy out, and none came since
        # Gradients made in the forward waited for their buffer there.
        return buffer.kind == Buf.HEAD_GRADS and (head_grads or left)

    return Pass("backward", derive_waits(ops, settled))


def _head_grads_left(layout: Layout, trained: Iterable[int]) -> bool:
    """Whether the head's gradients have left the device before the backward that made them ended.

    They are the first thing a backward streams out. A block that has to wait for a gradient slot thereby waits for
    them too, which happens as soon as there are more trained blocks than slots.
    """
    slots = 1 if layout.accumulate else 2
    return len(list(trained)) > slots


def update(layout: Layout, units: Iterable[str]) -> Pass:
    """The optimizer's pass over the given units, in the order given (that of the next forward's deadlines)."""
    ops = [_update(unit, layout) for unit in units]
    return Pass("update", derive_waits(ops, lambda buffer, stream: False))
