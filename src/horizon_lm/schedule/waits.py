"""Waits follow from what operations read and write.

`derive_waits` gives every operation the smallest set of waits that orders it after each conflicting access on another
stream. Inside a pass this is a transitive reduction over vector clocks. Across passes it is the table `ACROSS`: what a
buffer's new user must wait for when an earlier pass may still be using it. The table is precise where waiting would
cost time (weights whose update is pending, slots that the last block still reads) and coarse where it would not.
`schedule.check` proves, by unrolling sequences of passes, that the waits suffice and that none can be dropped.
"""

from collections.abc import Callable
from dataclasses import replace

from horizon_lm.schedule.ops import After, Buf, Buffer, Earlier, LastUse, Op, Stream, Wait

_BLOCK_COMPUTE = LastUse(Buf.WEIGHTS, Stream.COMPUTE)
_EARLIER_OUT = Earlier(Stream.COPY_OUT)

# (stream of the operation, buffer it accesses) -> what to wait for across passes. A buffer that is missing needs nothing:
# HOST_BOUNDARY, because a fetch waits for earlier copies out anyway.
ACROSS: dict[tuple[Stream, Buf], tuple[LastUse | Earlier, ...]] = {
    (Stream.COPY_IN, Buf.OUTER): (Earlier(Stream.COMPUTE),),  # any computation may read them
    (Stream.COPY_IN, Buf.WEIGHTS): (_BLOCK_COMPUTE,),
    (Stream.COPY_IN, Buf.TABLE_ROWS): (_BLOCK_COMPUTE,),  # read before the blocks of their pass
    (Stream.COPY_IN, Buf.RING): (_BLOCK_COMPUTE, _EARLIER_OUT),
    (Stream.COPY_IN, Buf.HEAD): (LastUse(Buf.HEAD, Stream.COMPUTE),),
    (Stream.COMPUTE, Buf.RING): (_EARLIER_OUT,),
    (Stream.COMPUTE, Buf.GRADS): (_EARLIER_OUT,),
    (Stream.COMPUTE, Buf.STAGING): (_EARLIER_OUT,),
    (Stream.COMPUTE, Buf.HEAD_GRADS): (_EARLIER_OUT,),
    (Stream.COMPUTE, Buf.TABLE_ROW_GRADS): (_EARLIER_OUT,),
    (Stream.COMPUTE, Buf.OUTER_GRADS): (_EARLIER_OUT,),
    (Stream.COPY_IN, Buf.HOST_GRADS): (_EARLIER_OUT,),
    (Stream.COPY_IN, Buf.HOST_LANDING): (_EARLIER_OUT,),
    (Stream.HOST, Buf.HOST_GRADS): (_EARLIER_OUT,),
    (Stream.HOST, Buf.HOST_LANDING): (_EARLIER_OUT,),
    (Stream.HOST, Buf.HOST_WEIGHTS): (Earlier(Stream.COPY_IN),),
}

_HOST_BUFFERS = (Buf.HOST_WEIGHTS, Buf.HOST_GRADS, Buf.HOST_LANDING)

Settled = Callable[[Buffer, Stream], bool]


class _Clock:
    """What is known to be finished when an operation starts: per stream a position, and waits on earlier passes."""

    def __init__(self) -> None:
        self.position: dict[Stream, int] = {}
        self.across: set[LastUse | Earlier] = set()

    def merge(self, other: "_Clock") -> None:
        for stream, index in other.position.items():
            self.position[stream] = max(index, self.position.get(stream, -1))
        self.across |= other.across

    def knows(self, stream: Stream, index: int) -> bool:
        return self.position.get(stream, -1) >= index

    def implies(self, wait: LastUse | Earlier) -> bool:
        """Following any operation of this pass on a stream means following all earlier passes on it."""
        return wait.stream in self.position or wait in self.across or Earlier(wait.stream) in self.across


def derive_waits(ops: list[Op], settled: Settled) -> tuple[Op, ...]:
    """The same operations with their waits filled in.

    ``settled(buffer, stream)`` tells that earlier passes on that stream are known to be done with that buffer when this
    pass begins, for a reason that the builder gives.
    """
    clocks: list[_Clock] = []  # at the end of each operation
    last_on_stream: dict[Stream, int] = {}
    result: list[Op] = []
    for index, op in enumerate(ops):
        clock = _Clock()
        if op.stream in last_on_stream:
            clock.merge(clocks[last_on_stream[op.stream]])

        needed = [other for other in _conflicts(ops, index) if not clock.knows(ops[other].stream, other)]
        waits: list[Wait] = [
            After(i) for i in needed if not any(j != i and clocks[j].knows(ops[i].stream, i) for j in needed)
        ]
        for other in needed:
            clock.merge(clocks[other])

        for buffer in op.reads + op.writes:
            for wait in _across(op, buffer):
                if not clock.implies(wait) and not settled(buffer, wait.stream):
                    waits.append(wait)
                    clock.across.add(wait)

        clock.position[op.stream] = index
        clocks.append(clock)
        last_on_stream[op.stream] = index
        result.append(replace(op, waits=tuple(waits)))
    return tuple(result)


def _across(op: Op, buffer: Buffer) -> tuple[LastUse | Earlier, ...]:
    if op.stream in (Stream.COPY_IN, Stream.COPY_OUT) and buffer.kind in _HOST_BUFFERS:
        wait = LastUse(buffer, Stream.HOST)  # precise, so that a unit streams in as soon as it is updated
        return (wait, *ACROSS.get((op.stream, buffer.kind), ()))
    return ACROSS.get((op.stream, buffer.kind), ())


def _conflicts(ops: list[Op], index: int) -> list[int]:
    """Per other stream, the last operation before ``index`` whose order relative to it matters."""
    op, found = ops[index], {}
    for other in range(index):
        if ops[other].stream != op.stream and _conflict(op, ops[other]):
            found[ops[other].stream] = other
    return sorted(found.values())


def _conflict(a: Op, b: Op) -> bool:
    """Whether the two operations share a buffer that at least one of them writes."""
    return not set(a.writes).isdisjoint(b.reads + b.writes) or not set(b.writes).isdisjoint(a.reads)
