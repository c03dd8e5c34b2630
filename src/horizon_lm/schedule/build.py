"""The passes of a training step as lists of operations, in the order in which one thread would issue them.

A block's weights are issued one unit ahead, so that they travel while the block before them computes. Block ``u`` uses
weight slot ``u % 2``, gradient slot ``u % 2`` and ring slot ``u % 2``; head, outer and embedding rows have buffers of
their own.
"""

from collections.abc import Iterable
from dataclasses import dataclass

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
    """

    num_blocks: int
    tied: bool = False
    host_boundaries: bool = False
    accumulate: bool = False


def _host(kind: Buf, unit: str, layout: Layout) -> Buffer:
    return Buffer(kind, EMBED if unit == HEAD and layout.tied else unit)


def _stream_in(unit: str, into: Buffer, layout: Layout) -> Op:
    return Op(Kind.STREAM_IN, unit, Stream.COPY_IN, (_host(Buf.HOST_WEIGHTS, unit, layout),), (into,))


def _stream_out(unit: str, source: Buffer, layout: Layout) -> Op:
    # A landing adds to what is there when the slab is not empty, so it reads it as well.
    slab = _host(Buf.HOST_GRADS, unit, layout)
    return Op(Kind.STREAM_OUT, unit, Stream.COPY_OUT, (source, slab), (slab,))


def _compute(kind: Kind, unit: str, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...] = ()) -> Op:
    # Outer parameters may be read by any of the model's own code, which runs between our operations.
    return Op(kind, unit, Stream.COMPUTE, (*reads, Buffer(Buf.OUTER)), writes)


def forward(
    layout: Layout,
    *,
    keeps: Iterable[int] = (),
    embed: bool = True,
    after_update: bool = True,
    head: bool = True,
    head_grads: bool = False,
) -> Pass:
    """A forward pass.

    Args:
        keeps: blocks whose boundary is kept for a backward pass (none in evaluation).
        embed: the table is read (false when the caller brings ``inputs_embeds``).
        after_update: an update was issued since the last forward, or there was none yet. Only then do weights have to be
            waited for, and are the outer parameters streamed in (they stay on the device until the next update).
        head: the output projection is used.
        head_grads: the head's gradients are made in the forward.
    """
    keeps = frozenset(keeps)
    ops: list[Op] = []
    if after_update:
        ops.append(_stream_in(OUTER, Buffer(Buf.OUTER), layout))
    ops.append(_compute(Kind.FORWARD, OUTER, ()))
    if embed:
        ops.append(_stream_in(EMBED, Buffer(Buf.TABLE_ROWS), layout))
        ops.append(_compute(Kind.FORWARD, EMBED, (Buffer(Buf.TABLE_ROWS),)))

    def load(u: int) -> Op:
        return _stream_in(block(u), Buffer(Buf.WEIGHTS, u % 2), layout)

    ops.append(load(0))
    for u in range(layout.num_blocks):
        last = u == layout.num_blocks - 1
        if not last:
            ops.append(load(u + 1))
        elif head:
            ops.append(_stream_in(HEAD, Buffer(Buf.HEAD), layout))
        offload = layout.host_boundaries and u in keeps
        ring = Buffer(Buf.RING, u % 2)
        ops.append(_compute(Kind.FORWARD, block(u), (Buffer(Buf.WEIGHTS, u % 2),), (ring,) if offload else ()))
        if offload:
            ops.append(Op(Kind.OFFLOAD, block(u), Stream.COPY_OUT, (ring,), (Buffer(Buf.HOST_BOUNDARY, u),)))
    if head:
        grads = (Buffer(Buf.HEAD_GRADS),) if head_grads else ()
        ops.append(_compute(Kind.FORWARD, HEAD, (Buffer(Buf.HEAD),), grads))

    def settled(buffer: Buffer, stream: Stream) -> bool:
        if after_update:  # the update waited for every earlier copy, and the outer parameters wait for the update
            return stream in (Stream.COPY_IN, Stream.COPY_OUT)
        return stream == Stream.HOST or (buffer.kind == Buf.HEAD_GRADS and _head_grads_left(layout, keeps))

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
            ops.append(_stream_out(HEAD, grads, layout))

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
            ops.append(_stream_out(block(u), staging, layout))
        else:
            slot = Buffer(Buf.GRADS, u % 2)
            ops.append(_compute(Kind.BACKWARD, block(u), tuple(inputs), (slot,)))
            ops.append(_stream_out(block(u), slot, layout))

    for unit, grads in ((EMBED, Buffer(Buf.TABLE_ROW_GRADS)), (OUTER, Buffer(Buf.OUTER_GRADS))):
        if unit in trainable:
            ops.append(_compute(Kind.BACKWARD, unit, (), (grads,)))
            ops.append(_stream_out(unit, grads, layout))

    def settled(buffer: Buffer, stream: Stream) -> bool:
        if stream == Stream.HOST:  # the forward waited for the update of every unit it used
            return True
        if stream == Stream.COMPUTE and layout.host_boundaries and not head_grads and buffer.kind != Buf.HEAD:
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
    ops = []
    for unit in units:
        grads, weights = _host(Buf.HOST_GRADS, unit, layout), _host(Buf.HOST_WEIGHTS, unit, layout)
        ops.append(Op(Kind.UPDATE, unit, Stream.HOST, (grads, weights), (weights,)))
    return Pass("update", derive_waits(ops, lambda buffer, stream: False))
