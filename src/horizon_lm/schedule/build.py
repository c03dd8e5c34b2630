"""Build the forward and backward pass of a training step as lists of operations, in the order in which one thread issues them.

Weights are prefetched one unit ahead into a double buffer: they are copied while the previous block computes. Block
``u`` uses weight slot ``u % 2``, gradient slot ``u % 2`` and ring slot ``u % 2``; head, outer parameters and embedding
rows have separate buffers. Experts may be moved in tiles (`tiles`).

A model may have several lists of blocks: towers for images or audio before those of the decoder. A pass computes the lists that the
model calls, so two blocks that follow each other may have the same slot; the second one is then copied after the first has computed.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from horizon_lm.common.units import EMBED, HEAD, OUTER, Unit, block, tile
from horizon_lm.schedule.ops import Buf, Buffer, Kind, Op, Schedule, Stream
from horizon_lm.schedule.tiles import TileCopies, TileSlots
from horizon_lm.schedule.waits import derive_waits

_CACHED = 32  # cached passes of each kind: deriving the waits of a deep model takes tens of milliseconds


@dataclass(frozen=True, slots=True)
class Layout:
    """The properties of a model and its settings that determine the schedule.

    Attributes:
        num_blocks: number of blocks, those of towers before those of the decoder.
        tied: the head reads the embedding table's slab.
        offloaded: number of first blocks whose boundary (activation checkpoint) is offloaded between the forward and
            backward pass.
        resident: number of last blocks whose weights stay resident until an update changes them.
        accumulates: gradients of blocks are summed over micro-batches in one float32 accumulator, and rounded into one slot from which
            they land: if a size of micro-batches is set, gradients are kept in bf16, and there is one rank, however many micro-batches
            a call has. Otherwise blocks have two slots, in float32 for several ranks, and micro-batches are summed there.
        update_in_backward: each unit is updated as soon as its gradient has landed. Blocks share two landing slots in host
            memory; only a tied table has a gradient slab, because two gradients are added there.
        sharded: each rank streams its own range of a unit, which is gathered on the device; its gradients are summed there, and
            each rank lands its own range of the sum.
        adapters: blocks have adapters, which are outer parameters: each block's backward writes its gradients of them, and so does
            that of each tile.
        packed: blocks have quantized weights of which each rank streams a range of the codes and scales. They are gathered in slots
            of their own, and decoded from there.
        tiles: number of tiles of each block's experts; empty if no block has any.
    """

    num_blocks: int
    tied: bool = False
    offloaded: int = 0
    resident: int = 0
    accumulates: bool = False
    update_in_backward: bool = False
    adapters: bool = False
    sharded: bool = False
    packed: bool = False
    tiles: tuple[int, ...] = ()

    def is_offloaded(self, index: int) -> bool:
        """Return whether a block's boundary is offloaded."""
        return index < self.offloaded

    def is_resident(self, index: int) -> bool:
        """Return whether a block's weights are resident."""
        return index >= self.num_blocks - self.resident

    def weights(self, index: int) -> Buffer:
        """Return the device buffer of a block's weights."""
        return Buffer(Buf.RESIDENT, index) if self.is_resident(index) else Buffer(Buf.WEIGHTS, index % 2)


def host_buffer(kind: Buf, unit: Unit, layout: Layout) -> Buffer:
    """Return the host buffer of a unit; a tied head has that of the embedding, and a tile that of its block."""
    return Buffer(kind, EMBED if unit == HEAD and layout.tied else unit.owner)


def _stream_in(unit: Unit, into: Buffer, layout: Layout) -> list[Op]:
    """Return the copy of a unit to the device and, with several ranks, its gathering there."""
    buffers = (into, *_packed_slot(unit, into, layout))
    ops = [Op(Kind.STREAM_IN, unit, Stream.COPY_IN, (host_buffer(Buf.HOST_WEIGHTS, unit, layout),), buffers)]
    if layout.sharded:
        ops.append(Op(Kind.GATHER, unit, Stream.COLLECTIVE, buffers, buffers))
    return ops


def _packed_slot(unit: Unit, into: Buffer, layout: Layout) -> tuple[Buffer, ...]:
    """Return the slot in which the codes and scales of a unit are gathered before they are decoded; none if it has no such slot."""
    if not layout.packed:
        return ()
    if unit.is_tile:
        return (Buffer(Buf.TILE_PACKED, into.index),)
    return (Buffer(Buf.PACKED, unit.block_index % 2),) if unit.is_block else ()


def landing_buffer(unit: Unit, layout: Layout) -> Buffer:
    """Return the host buffer in which a unit's gradients land."""
    if not layout.update_in_backward or (layout.tied and unit in (EMBED, HEAD)):
        return host_buffer(Buf.HOST_GRADS, unit, layout)
    return Buffer(Buf.HOST_LANDING, unit.owner.block_index % 2 if unit.owner.is_block else unit)


def _land_and_update(unit: Unit, source: Buffer, layout: Layout) -> list[Op]:
    """Return the operations that sum a unit's gradients over several ranks, land them and, if it is updated at once, update the unit."""
    host = landing_buffer(unit, layout)
    # A landing is added to the gradients in the slab, so it also reads the slab.
    reads = (source, host) if host.kind == Buf.HOST_GRADS else (source,)
    ops = [Op(Kind.REDUCE, unit, Stream.COLLECTIVE, (source,), (source,))] if layout.sharded else []
    ops.append(Op(Kind.STREAM_OUT, unit, Stream.COPY_OUT, reads, (host,)))
    if _is_updated_at_once(unit, layout):
        ops.append(update_of(unit, layout))
    return ops


def _is_updated_at_once(unit: Unit, layout: Layout) -> bool:
    """Return whether a unit is updated as soon as its gradient has landed. The update of the table waits for the next forward pass, and the
    update of a tile for the core of its block, which lands last.
    """
    is_table = unit == EMBED or (layout.tied and unit == HEAD)
    return layout.update_in_backward and not is_table and not unit.is_tile


def update_of(unit: Unit, layout: Layout, kind: Kind = Kind.UPDATE, stream: Stream = Stream.HOST) -> Op:
    """Return the update of a unit, which reads its gradients where they have landed."""
    weights = host_buffer(Buf.HOST_WEIGHTS, unit, layout)
    return Op(kind, unit, stream, (landing_buffer(unit, layout), weights), (weights,))


def _compute(kind: Kind, unit: Unit, reads: tuple[Buffer, ...], writes: tuple[Buffer, ...] = ()) -> Op:
    # Every computation reads the outer parameters: the model's own code around it may read them at any time.
    return Op(kind, unit, Stream.COMPUTE, (*reads, Buffer(Buf.OUTER)), writes)


def forward(
    layout: Layout,
    *,
    order: Iterable[Unit] | None = None,
    keeps: Iterable[int] = (),
    changed: bool = True,
    blocks_changed: bool | None = None,
    table_update: bool = False,
    head_grads: bool = False,
    routed: Iterable[int] = (),
) -> Schedule:
    """Return a forward pass.

    Args:
        layout: layout of the schedule.
        order: the embedding and the blocks in the order in which the pass computes them; None for the embedding and all blocks. Without
            the embedding, no rows of the table are read, because the caller passes ``inputs_embeds``.
        keeps: blocks whose boundary is kept for a backward pass (none in evaluation).
        changed: weights have changed since the last forward pass, or are about to change. Only then are outer
            parameters streamed in; otherwise they are still on the device.
        blocks_changed: ``changed`` for the weights of resident blocks, which an update of adapters does not change; None for ``changed``.
        table_update: the table's update is pending. Rows that this pass reads are updated first, the other rows after
            all other units.
        head_grads: the head's gradients are computed in the forward pass, together with the loss, for a gradient of one. This is the
            usual case: the head is chunked, and no other pass holds the buffer.
        routed: blocks that stream only the experts to which tokens are routed, which is known only after a part of the block. The
            experts of such a block without tiles are one tile, in the slot of the block, which must not be resident.
    """
    blocks_changed = changed if blocks_changed is None else blocks_changed
    order = (EMBED, *map(block, range(layout.num_blocks))) if order is None else tuple(order)
    kept, parted = frozenset(keeps), frozenset(routed)
    return _forward(layout, order, kept, changed, blocks_changed, table_update, head_grads, parted)


@lru_cache(_CACHED)
def _forward(
    layout: Layout, order: tuple[Unit, ...], keeps: frozenset[int], changed: bool, blocks_changed: bool, table_update: bool,
    head_grads: bool, routed: frozenset[int]
) -> Schedule:  # fmt: skip
    """Build a pass from the arguments of `forward`. Each copy is listed one computation before the computation that needs it."""
    ops = _outer(layout, changed)
    if EMBED not in order and table_update:
        ops.append(update_of(EMBED, layout))
    slots = TileSlots(layout.tiles)

    def slot_of(unit: Unit) -> Buffer:
        """Return the slot of a block or tile."""
        is_cut = unit.is_tile and slots.of(unit.block_index)
        return slots.weights(unit) if is_cut else layout.weights(unit.block_index)

    def load(unit: Unit) -> list[Op]:
        """Return the copies of the weights of a block, tile or head; none if the block is resident and up to date."""
        if unit == HEAD:
            return _stream_in(HEAD, Buffer(Buf.HEAD), layout)
        stays = unit.is_block and layout.is_resident(unit.block_index) and not blocks_changed
        return [] if stays else _stream_in(unit, slot_of(unit), layout)

    blocks = [unit for unit in order if unit != EMBED]
    tiles = {unit: slots.of(unit.block_index) or _tile_of_routed(unit, routed) for unit in blocks}
    copies = TileCopies({**tiles, HEAD: []}, load, _behind_same_slot(blocks), routed=map(block, routed))
    place = 0  # among the blocks
    for owner in order:
        if owner == EMBED:
            # Before copies of later blocks: its rows are known only when the embedding is called, and copies are issued in order.
            ops.extend(_embedding(layout, table_update))
            continue
        u = owner.block_index
        offload = layout.is_offloaded(u) and u in keeps
        ring = Buffer(Buf.RING, u % 2)
        writes = (ring,) if offload else ()
        ops.extend(copies.core(place))  # of the first block, or of one that could not be prefetched
        ops.extend(copies.ahead(place))
        if tiles[owner]:
            ops.append(_compute(Kind.ROUTE, owner, (layout.weights(u),), writes))
            copies.note_routed(owner)  # now it is known which of a tile's experts are copied
            ops.extend(copies.ahead(place))
        for unit in tiles[owner]:
            ops.append(_compute(Kind.FORWARD, unit, (slot_of(unit),)))
            copies.note_computed()  # a slot is free again
            ops.extend(copies.ahead(place))
        ops.extend(copies.prefetch(place + 1))  # of the head in the end: issued before this block computes
        ops.append(_compute(Kind.FORWARD, owner, (layout.weights(u),), writes))
        if offload:
            ops.append(Op(Kind.OFFLOAD, owner, Stream.COPY_OUT, (ring,), (Buffer(Buf.HOST_BOUNDARY, u),)))
        place += 1
    grads = (Buffer(Buf.HEAD_GRADS),) if head_grads else ()
    ops.append(_compute(Kind.FORWARD, HEAD, (Buffer(Buf.HEAD),), grads))
    return Schedule("forward", derive_waits(ops), keeps)


def _tile_of_routed(unit: Unit, routed: frozenset[int]) -> list[Unit]:
    """Return the one tile of a block that is not cut but routed; none for another block."""
    return [tile(unit.block_index, 0)] if unit.block_index in routed else []


def _behind_same_slot(blocks: Sequence[Unit]) -> frozenset[int]:
    """Return the places of the blocks that use the slots of the block before them, as between two lists of blocks."""
    pairs = pairwise(blocks)
    return frozenset(place for place, (a, b) in enumerate(pairs, 1) if (a.block_index - b.block_index) % 2 == 0)


def _outer(layout: Layout, changed: bool) -> list[Op]:
    """Return the operations of outer parameters in a forward pass."""
    ops = _stream_in(OUTER, Buffer(Buf.OUTER), layout) if changed else []
    return [*ops, _compute(Kind.FORWARD, OUTER, ())]


def _embedding(layout: Layout, table_update: bool) -> list[Op]:
    """Return the operations of the embedding in a forward pass."""
    ops: list[Op] = []
    if table_update:
        # Host threads run it, but in the order of this stream: the copy after it reads these rows.
        ops.append(update_of(EMBED, layout, Kind.UPDATE_ROWS, Stream.COPY_IN))
    ops.extend(_stream_in(EMBED, Buffer(Buf.TABLE_ROWS), layout))
    if table_update:
        ops.append(update_of(EMBED, layout))
    return [*ops, _compute(Kind.FORWARD, EMBED, (Buffer(Buf.TABLE_ROWS),))]


def backward(layout: Layout, *, order: Iterable[Unit], trainable: Iterable[Unit], head_grads: bool = False) -> Schedule:
    """Return a backward pass.

    Args:
        layout: layout of the schedule.
        order: the embedding and the blocks to differentiate, whose boundaries the forward pass kept, in the order in which it computed them.
        trainable: units with at least one trainable parameter; other units only propagate gradients.
        head_grads: the head's gradients were computed in the forward pass and only need to be scaled; otherwise the head is streamed
            in again.
    """
    return _backward(layout, tuple(order), frozenset(trainable), head_grads)


@lru_cache(_CACHED)
def _backward(layout: Layout, order: tuple[Unit, ...], trainable: frozenset[Unit], head_grads: bool) -> Schedule:
    """Build a pass from the arguments of `backward`: head, embedding and blocks from the last to the first, outer parameters."""
    ops = _head_backward(layout, HEAD in trainable, head_grads)
    slots = TileSlots(layout.tiles)

    def load(unit: Unit) -> list[Op]:
        """Return the copies that a block or tile needs: its weights, and the block's input if that was offloaded."""
        if unit.is_tile:
            return _stream_in(unit, slots.weights(unit), layout)
        u, copies_of_block = unit.block_index, list[Op]()
        if layout.is_offloaded(u):  # first, so that waiting for the weights implies both
            boundary, ring = Buffer(Buf.HOST_BOUNDARY, u), Buffer(Buf.RING, u % 2)
            copies_of_block.append(Op(Kind.FETCH, unit, Stream.COPY_IN, (boundary,), (ring,)))
        if not layout.is_resident(u):
            copies_of_block.extend(_stream_in(unit, layout.weights(u), layout))
        return copies_of_block

    # All blocks write the gradients of their adapters, which are outer parameters, into one buffer.
    adapters = (Buffer(Buf.OUTER_GRADS),) if layout.adapters and OUTER in trainable else ()
    blocks = [unit for unit in reversed(order) if unit != EMBED]
    tiles = {unit: slots.of(unit.block_index)[::-1] for unit in blocks}
    copies = TileCopies(tiles, load, _behind_same_slot(blocks))
    place = 0  # among the blocks
    for owner in reversed(order):
        if owner == EMBED:
            ops.extend(_backward_outside(EMBED, Buffer(Buf.TABLE_ROW_GRADS), trainable, layout))
            continue
        u, is_trained = owner.block_index, owner in trainable
        boundary = (Buffer(Buf.RING, u % 2),) if layout.is_offloaded(u) else ()
        inputs = (layout.weights(u), *boundary)
        ops.extend(copies.core(place))
        ops.extend(copies.ahead(place))
        if tiles[owner]:
            ops.append(_compute(Kind.RECOMPUTE, owner, inputs))
        for unit in tiles[owner]:
            slot = slots.grads(unit)
            writes = (slot, *adapters) if is_trained else adapters
            ops.append(_compute(Kind.BACKWARD, unit, (slots.weights(unit),), writes))
            ops.extend(_land_and_update(unit, slot, layout) if is_trained else [])
            copies.note_computed()  # a slot is free again
            ops.extend(copies.ahead(place))
        ops.extend(copies.prefetch(place + 1))  # as in the forward pass
        if is_trained:
            ops.extend(_trained_backward(u, inputs, adapters, layout))
        else:
            ops.append(_compute(Kind.BACKWARD, owner, inputs, adapters))
        place += 1
    # Last: outer parameters are used throughout the model.
    ops.extend(_backward_outside(OUTER, Buffer(Buf.OUTER_GRADS), trainable, layout))
    # A loss may depend on hidden states below the head alone, and embedding and outer parameters may get no gradient.
    return Schedule("backward", derive_waits(ops), begins_anywhere=True, optional=frozenset({EMBED, OUTER}))


def _backward_outside(unit: Unit, grads: Buffer, trainable: frozenset[Unit], layout: Layout) -> list[Op]:
    """Return the part of a backward pass of the embedding or the outer parameters, whose gradients lie in a buffer; none if not trained."""
    if unit not in trainable:
        return []
    return [_compute(Kind.BACKWARD, unit, (), (grads,)), *_land_and_update(unit, grads, layout)]


def _head_backward(layout: Layout, is_trained: bool, head_grads: bool) -> list[Op]:
    """Return the head's part of a backward pass. With ``head_grads``, its gradients exist and are only scaled, so no weights are loaded."""
    grads, weights = Buffer(Buf.HEAD_GRADS), Buffer(Buf.HEAD)
    ops = [] if head_grads else _stream_in(HEAD, weights, layout)
    reads = grads if head_grads else weights
    ops.append(_compute(Kind.BACKWARD, HEAD, (reads,), (grads,) if is_trained else ()))
    if is_trained:
        ops.extend(_land_and_update(HEAD, grads, layout))
    return ops


def _trained_backward(u: int, inputs: tuple[Buffer, ...], adapters: tuple[Buffer, ...], layout: Layout) -> list[Op]:
    """Return the backward computation of a block, the rounding of its gradients if they are accumulated, and their landing."""
    if not layout.accumulates:
        slot = Buffer(Buf.GRADS, u % 2)
        computed = [_compute(Kind.BACKWARD, block(u), inputs, (slot, *adapters))]
    else:
        accumulator, slot = Buffer(Buf.ACCUMULATOR), Buffer(Buf.ROUNDED)
        computed = [
            _compute(Kind.BACKWARD, block(u), inputs, (accumulator, *adapters)),
            _compute(Kind.STAGE, block(u), (accumulator,), (slot,)),
        ]
    return [*computed, *_land_and_update(block(u), slot, layout)]
