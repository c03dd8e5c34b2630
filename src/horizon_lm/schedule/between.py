"""Build the passes between training steps: the optimizer's update, and the writing of a checkpoint."""

from collections.abc import Iterable
from functools import lru_cache

from horizon_lm.common.units import EMBED, HEAD, OUTER, Unit, block
from horizon_lm.schedule.build import Layout, host_buffer, landing_buffer, update_of
from horizon_lm.schedule.ops import Buf, Buffer, Kind, Op, Schedule, Stream
from horizon_lm.schedule.waits import derive_waits

_CACHED = 32  # cached passes of each kind


def update(layout: Layout, units: Iterable[Unit], orthogonalized: Iterable[Unit] = ()) -> Schedule:
    """Return the optimizer's pass over these units in this order, which is that of the next forward pass.

    Args:
        layout: layout of the schedule.
        units: units to update.
        orthogonalized: blocks among these units whose update is orthogonalized on the device.
    """
    return _update_pass(layout, tuple(units), frozenset(orthogonalized))


@lru_cache(_CACHED)
def _update_pass(layout: Layout, units: tuple[Unit, ...], orthogonalized: frozenset[Unit]) -> Schedule:
    """Build a pass from the arguments of `update`. A block's matrices are streamed while the previous block's are orthogonalized."""
    ops: list[Op] = []
    not_streamed = [unit for unit in reversed(units) if unit in orthogonalized]  # reversed: `pop` takes the last

    def stream_next() -> None:
        if not_streamed:
            ops.extend(_stream_matrices(not_streamed.pop(), layout))

    if not layout.accumulates:  # two slots: the loop prefetches the next unit, so the first one is streamed here
        stream_next()
    for unit in units:
        if unit in orthogonalized:
            stream_next()  # with a single slot, this unit itself
            slot, host = _slot_of_matrices(unit, layout), landing_buffer(unit, layout)
            ops.append(Op(Kind.ORTHOGONALIZE, unit, Stream.COMPUTE, (slot,), (slot,)))
            ops.append(Op(Kind.RETURN_MATRICES, unit, Stream.COPY_OUT, (slot,), (host,)))
        ops.append(update_of(unit, layout))
    return Schedule("update", derive_waits(ops))


def _slot_of_matrices(unit: Unit, layout: Layout) -> Buffer:
    """Return the device buffer in which a block's update is orthogonalized: that of its gradients, which have landed."""
    return Buffer(Buf.ROUNDED) if layout.accumulates else Buffer(Buf.GRADS, unit.block_index % 2)


def _stream_matrices(unit: Unit, layout: Layout) -> list[Op]:
    """Return the first part of a block's update, which leaves matrices in the gradients' slab, and their copy to the device."""
    slot, landed = _slot_of_matrices(unit, layout), landing_buffer(unit, layout)
    weights = host_buffer(Buf.HOST_WEIGHTS, unit, layout)
    ops = [
        Op(Kind.ADVANCE, unit, Stream.HOST, (landed, weights), (landed, weights)),
        Op(Kind.STREAM_MATRICES, unit, Stream.COPY_IN, (landed,), (slot,)),
    ]
    if layout.sharded:
        ops.append(Op(Kind.GATHER_MATRICES, unit, Stream.COLLECTIVE, (slot,), (slot,)))
    return ops


def save(layout: Layout, units: Iterable[Unit]) -> Schedule:
    """Return the pass that writes a checkpoint, after an update and before the next step.

    The update of a unit in the next step waits until the unit is saved, so units are saved in the order of these updates.

    Args:
        layout: layout of the schedule.
        units: units to save, in any order; without the embedding if its update is left to the next forward pass, see
            `save_table`.
    """
    return _save_pass(layout, frozenset(units))


@lru_cache(_CACHED)
def _save_pass(layout: Layout, units: frozenset[Unit]) -> Schedule:
    """Build the pass of these units, in the order in which the next updates change them."""
    blocks = [block(u) for u in range(layout.num_blocks)]
    # Rows of the table are updated by the forward pass that follows the next updates.
    order = [HEAD, *reversed(blocks), OUTER, EMBED] if layout.update_in_backward else [OUTER, *blocks, HEAD, EMBED]
    return Schedule("save", derive_waits([_save(unit, layout) for unit in order if unit in units]))


@lru_cache(_CACHED)
def save_table(layout: Layout) -> Schedule:
    """Return the pass that adds the embedding to a checkpoint, after the forward pass that has updated it."""
    return Schedule("save", derive_waits([_save(EMBED, layout)]))


def _save(unit: Unit, layout: Layout) -> Op:
    return Op(Kind.SAVE, unit, Stream.DISK, (host_buffer(Buf.HOST_WEIGHTS, unit, layout),))
