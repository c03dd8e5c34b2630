"""Derive the waits of operations from the buffers that they read and write.

`derive_waits` gives every operation the smallest set of waits that orders it after each conflicting access on another
stream. Inside a pass this is a transitive reduction over vector clocks. Across passes, an operation waits only for the
last use of its own buffers: a unit is streamed in as soon as its update is done and the slot is released by its last
block. The preceding passes are not known here, so some waits across passes are implied by others, at no cost.
`tests/support/schedule_proofs.py` proves, by unrolling sequences of passes, that the waits suffice, that no wait inside a pass and
no rule of the table can be dropped.
"""

from dataclasses import replace

from horizon_lm.schedule.ops import After, Buf, LastUse, Op, Stream, Wait

# (stream of an operation, kind of buffer that it accesses) -> the stream whose last use of that buffer, in earlier passes,
# it waits for. Missing pairs are implied by these. (COMPUTE, WEIGHTS) is missing: a computation waits in its own pass for the copy
# that fills the slot, and this copy has waited for the last computation in the slot, by the first row.
ACROSS: dict[tuple[Stream, Buf], Stream] = {
    (Stream.COPY_IN, Buf.WEIGHTS): Stream.COMPUTE,
    (Stream.COPY_IN, Buf.TILE): Stream.COMPUTE,
    (Stream.COPY_IN, Buf.PACKED): Stream.COLLECTIVE,
    (Stream.COPY_IN, Buf.HEAD): Stream.COMPUTE,
    (Stream.COPY_IN, Buf.TABLE_ROWS): Stream.COMPUTE,
    (Stream.COPY_IN, Buf.OUTER): Stream.COMPUTE,  # every computation reads them, so this also frees resident blocks
    (Stream.COPY_IN, Buf.RING): Stream.COMPUTE,
    (Stream.COPY_IN, Buf.HOST_BOUNDARY): Stream.COPY_OUT,
    (Stream.COPY_IN, Buf.HOST_WEIGHTS): Stream.HOST,
    (Stream.COPY_IN, Buf.HOST_GRADS): Stream.COPY_OUT,  # UPDATE_ROWS runs on this stream
    (Stream.COPY_IN, Buf.HOST_LANDING): Stream.COPY_OUT,
    (Stream.COMPUTE, Buf.RING): Stream.COPY_OUT,
    (Stream.COMPUTE, Buf.GRADS): Stream.COPY_OUT,
    (Stream.COMPUTE, Buf.TILE_GRADS): Stream.COPY_OUT,
    (Stream.COMPUTE, Buf.STAGING): Stream.COPY_OUT,
    (Stream.COMPUTE, Buf.HEAD_GRADS): Stream.COPY_OUT,
    (Stream.COMPUTE, Buf.TABLE_ROW_GRADS): Stream.COPY_OUT,
    (Stream.COMPUTE, Buf.OUTER_GRADS): Stream.COPY_OUT,
    (Stream.COPY_OUT, Buf.HOST_GRADS): Stream.HOST,
    (Stream.COPY_OUT, Buf.HOST_LANDING): Stream.HOST,
    (Stream.HOST, Buf.HOST_WEIGHTS): Stream.COPY_IN,
    (Stream.HOST, Buf.HOST_GRADS): Stream.COPY_OUT,
    (Stream.DISK, Buf.HOST_WEIGHTS): Stream.HOST,
}

# The same for writes alone: weights are streamed in while they are being saved, but not updated.
ACROSS_WRITES: dict[Buf, Stream] = {Buf.HOST_WEIGHTS: Stream.DISK}


class _Clock:
    """The operations known to be finished when an operation starts: a position for each stream, and waits across
    passes.
    """

    def __init__(self) -> None:
        self.position: dict[Stream, int] = {}
        self.across: set[LastUse] = set()

    def merge(self, other: "_Clock") -> None:
        for stream, index in other.position.items():
            self.position[stream] = max(index, self.position.get(stream, -1))
        self.across |= other.across

    def knows(self, stream: Stream, index: int) -> bool:
        return self.position.get(stream, -1) >= index

    def implies(self, wait: LastUse) -> bool:
        """Return whether a wait is satisfied: after any operation of this pass, its stream is done with
        earlier passes.
        """
        return wait.stream in self.position or wait in self.across


def derive_waits(ops: list[Op]) -> tuple[Op, ...]:
    """Return the same operations with their waits filled in."""
    clocks: list[_Clock] = []  # the clock at the end of each operation
    last_on_stream: dict[Stream, int] = {}
    result: list[Op] = []
    for index, op in enumerate(ops):
        clock = _Clock()
        if op.stream in last_on_stream:
            clock.merge(clocks[last_on_stream[op.stream]])

        needed = [other for other in _conflicts(ops, index) if not clock.knows(ops[other].stream, other)]
        # A wait is dropped if another wait implies it.
        waits: list[Wait] = [
            After(i) for i in needed if not any(j != i and clocks[j].knows(ops[i].stream, i) for j in needed)
        ]
        for other in needed:
            clock.merge(clocks[other])

        accesses = [(buffer, ACROSS.get((op.stream, buffer.kind))) for buffer in op.reads + op.writes]
        accesses += [(buffer, ACROSS_WRITES.get(buffer.kind)) for buffer in op.writes]
        for buffer, earlier in accesses:
            if earlier is not None and not clock.implies(LastUse(buffer, earlier)):
                waits.append(LastUse(buffer, earlier))
                clock.across.add(LastUse(buffer, earlier))

        clock.position[op.stream] = index
        clocks.append(clock)
        last_on_stream[op.stream] = index
        result.append(replace(op, waits=tuple(waits)))
    return tuple(result)


def _conflicts(ops: list[Op], index: int) -> list[int]:
    """Return, for each other stream, the last operation before ``index`` that conflicts with it."""
    op, found = ops[index], {}
    for other in range(index):
        if ops[other].stream != op.stream and _conflict(op, ops[other]):
            found[ops[other].stream] = other
    return sorted(found.values())


def _conflict(a: Op, b: Op) -> bool:
    """Return whether two operations share a buffer that at least one of them writes."""
    return not set(a.writes).isdisjoint(b.reads + b.writes) or not set(b.writes).isdisjoint(a.reads)
