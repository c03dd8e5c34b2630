"""Derive the waits of operations from the buffers that they read and write.

`derive_waits` gives every operation the smallest set of waits that orders it after each conflicting access on another
stream. Inside a pass this is a transitive reduction over vector clocks. Across passes, an operation waits only for the
last use of its own buffers: a unit is streamed in as soon as its update is done and the slot is released by its last
block. The preceding passes are not known here, so some waits across passes are implied by others, at no cost.
`tests/support/schedule_proofs.py` proves, by unrolling sequences of passes, that the waits suffice, and that no wait inside a pass and no
rule of the table can be dropped.
"""

from dataclasses import replace

from horizon_lm.schedule.ops import After, Buf, Buffer, LastUse, Op, Stream, Wait

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
    (Stream.COMPUTE, Buf.ROUNDED): Stream.COPY_OUT,
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
    """The operations that are finished when an operation starts: up to a position in each stream, and ``across`` earlier passes."""

    def __init__(self) -> None:
        self.position: dict[Stream, int] = {}
        self.across: set[LastUse] = set()

    def merge(self, other: "_Clock") -> None:
        """Add what another clock knows to be finished."""
        for stream, index in other.position.items():
            self.position[stream] = max(index, self.position.get(stream, -1))
        self.across |= other.across

    def knows(self, stream: Stream, index: int) -> bool:
        return self.position.get(stream, -1) >= index

    def implies(self, wait: LastUse) -> bool:
        """Return whether a wait for an earlier pass is satisfied. A stream runs in order: an operation of this pass comes after all
        operations of earlier passes.
        """
        return wait.stream in self.position or wait in self.across


def derive_waits(ops: list[Op]) -> tuple[Op, ...]:
    """Return the same operations with their waits filled in."""
    clocks: list[_Clock] = []  # the clock at the end of each operation
    last_on_stream: dict[Stream, int] = {}
    earlier_accesses = _Accesses()
    result: list[Op] = []
    for index, op in enumerate(ops):
        clock = _Clock()
        if op.stream in last_on_stream:
            clock.merge(clocks[last_on_stream[op.stream]])

        # Conflicting operations that neither the order of the stream nor a wait of an earlier operation puts before this one.
        needed = [other for other in earlier_accesses.conflicting(op) if not clock.knows(ops[other].stream, other)]
        # A wait is dropped if another wait implies it.
        waits: list[Wait] = [
            After(i) for i in needed if not any(j != i and clocks[j].knows(ops[i].stream, i) for j in needed)
        ]
        for other in needed:
            clock.merge(clocks[other])

        # Waits for earlier passes: of all accesses, and of writes alone.
        accesses = [(buffer, ACROSS.get((op.stream, buffer.kind))) for buffer in op.reads + op.writes]
        accesses += [(buffer, ACROSS_WRITES.get(buffer.kind)) for buffer in op.writes]
        for buffer, stream in accesses:
            if stream is not None and not clock.implies(LastUse(buffer, stream)):
                waits.append(LastUse(buffer, stream))
                clock.across.add(LastUse(buffer, stream))

        earlier_accesses.add(op, index)
        clock.position[op.stream] = index
        clocks.append(clock)
        last_on_stream[op.stream] = index
        result.append(replace(op, waits=tuple(waits)))
    return tuple(result)


class _Accesses:
    """The last accesses of each buffer so far: positions of operations, by stream."""

    def __init__(self) -> None:
        self._all: dict[Buffer, dict[Stream, int]] = {}
        self._writes: dict[Buffer, dict[Stream, int]] = {}

    def conflicting(self, op: Op) -> list[int]:
        """Return the position of the last operation of each other stream that conflicts with this one: both access a buffer, and at least
        one of them writes it.
        """
        found: dict[Stream, int] = {}
        conflicting_accesses = [
            *(self._all.get(each, {}) for each in op.writes),
            *(self._writes.get(each, {}) for each in op.reads),
        ]
        for last in conflicting_accesses:
            for stream, index in last.items():
                if stream != op.stream:
                    found[stream] = max(index, found.get(stream, -1))
        return sorted(found.values())

    def add(self, op: Op, index: int) -> None:
        """Record the accesses of an operation."""
        for buffer in op.reads + op.writes:
            self._all.setdefault(buffer, {})[op.stream] = index
        for buffer in op.writes:
            self._writes.setdefault(buffer, {})[op.stream] = index
