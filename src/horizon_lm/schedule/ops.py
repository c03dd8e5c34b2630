"""The vocabulary of a schedule: operations, the buffers that they access, and their waits.

A pass (forward, backward, update, save) is a list of operations. Each runs on one *stream*; a stream runs its operations in
list order, and different streams run concurrently. Only waits order operations of different streams, so the waits of a
schedule determine whether it is correct. Nothing here depends on torch: a schedule is plain data that can be checked,
simulated and drawn.
"""

import zlib
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from horizon_lm.common.units import Unit
from horizon_lm.errors import HorizonError


class _Word(StrEnum):
    __hash__ = str.__hash__  # Enum's hash is a Python function, and a step makes thousands of lookups


class Stream(_Word):
    """A queue of operations that run in order, concurrently with other streams."""

    COPY_IN = "copy_in"
    COMPUTE = "compute"
    COPY_OUT = "copy_out"
    HOST = "host"  # the host threads of the optimizer
    DISK = "disk"  # the writers of a checkpoint
    COLLECTIVE = "collective"  # between ranks: one stream, so that all ranks launch and run them in one order


SOMETIMES = (Stream.DISK, Stream.COLLECTIVE)
"""Streams that most steps do not use: checkpoints come between few steps, and collectives need several ranks."""


STREAM_TITLES = {
    Stream.COPY_IN: "host-to-device",
    Stream.COMPUTE: "compute",
    Stream.COPY_OUT: "device-to-host",
    Stream.HOST: "host",
    Stream.DISK: "disk",
    Stream.COLLECTIVE: "collectives",
}
"""Names of the streams in plans and reports."""

CAUSE_TITLES = {
    "copy_in": "host-to-device copies",
    "copy_out": "device-to-host copies",
    "gather": "gathering of weights",
    "reduce": "summing of gradients",
    "update": "optimizer",
    "compute": "compute",
    "host": "host",
}
"""Names of what limits or stalls a step, in plans and reports."""


class Kind(_Word):
    """The kinds of operations."""

    STREAM_IN = "stream_in"  # host weights -> device buffer; with several ranks, this rank's range of them
    GATHER = "gather"  # the ranges of all ranks -> device buffer, where quantized weights are decoded
    ROUTE = "route"  # the part of a block before its experts
    FORWARD = "forward"
    OFFLOAD = "offload"  # boundary: device ring -> host
    FETCH = "fetch"  # boundary: host -> device ring
    RECOMPUTE = "recompute"  # a block around its experts, before their backward pass, see `tiles`
    BACKWARD = "backward"  # recompute and differentiate
    STAGE = "stage"  # fp32 accumulator -> staging slot, in the dtype of the gradient store: device memory, both
    REDUCE = "reduce"  # device gradients of all ranks -> this rank's range of their sum, in the same buffer
    STREAM_OUT = "stream_out"  # device gradients -> host; with several ranks, this rank's range of them
    ADVANCE = "advance"  # optimizer, on the host: the part of an update before its matrices are orthogonalized
    STREAM_MATRICES = (
        "stream_matrices"  # what is to be orthogonalized: gradient slab in host memory -> gradients on the device
    )
    GATHER_MATRICES = "gather_matrices"  # the ranges of all ranks -> the same buffer
    ORTHOGONALIZE = "orthogonalize"
    RETURN_MATRICES = "return_matrices"  # with several ranks, this rank's range of them
    UPDATE = "update"  # optimizer, on the host
    UPDATE_ROWS = "update_rows"  # optimizer, for the rows of the embedding table that the next batch reads
    SAVE = "save"  # weights and moments in host memory -> a file of a checkpoint


UPDATES = (Kind.ADVANCE, Kind.UPDATE, Kind.UPDATE_ROWS)


class Buf(_Word):
    """Kinds of memory protected by waits. Device memory has capital letters, host memory the prefix ``host_``."""

    WEIGHTS = "W"  # two slots for blocks
    RESIDENT = "K"  # resident weights, by block
    PACKED = "P"  # two slots for the codes and scales of quantized blocks, which several ranks gather before they are decoded
    GRADS = "G"  # two slots for blocks; with `Layout.accumulates` ACCUMULATOR and ROUNDED instead
    TILE = "T"  # two slots for tiles of experts
    TILE_GRADS = "TG"  # two slots for their gradients
    TILE_PACKED = "TP"  # two slots for their codes and scales, as PACKED for blocks
    ACCUMULATOR = "A"
    ROUNDED = "S"  # the sums of the accumulator, rounded, from which they land
    HEAD = "H"
    HEAD_GRADS = "HG"
    TABLE_ROWS = "E"
    TABLE_ROW_GRADS = "EG"
    OUTER = "O"
    OUTER_GRADS = "OG"
    RING = "R"  # two slots for boundaries in transfer to or from the host
    HOST_WEIGHTS = "host_w"  # by unit, with low halves and moments, which only updates and saves access
    HOST_GRADS = "host_g"  # by unit
    HOST_LANDING = "host_l"  # gradients until their update: two slots for blocks, one for each other unit
    HOST_BOUNDARY = "host_b"  # by block and forward pass


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer: its kind, and a slot, block or unit."""

    kind: Buf
    index: int | Unit = 0

    def __str__(self) -> str:
        return f"{self.kind}[{self.index}]"


@dataclass(frozen=True, slots=True)
class After:
    """A wait for the operation at this position of the same pass."""

    index: int

    def __str__(self) -> str:
        return f"#{self.index}"


@dataclass(frozen=True, slots=True)
class LastUse:
    """A wait for the last access to this buffer on ``stream`` in earlier passes."""

    buffer: Buffer
    stream: Stream

    def __str__(self) -> str:
        return f"last use of {self.buffer} on {self.stream}"


Wait = After | LastUse


@dataclass(frozen=True, slots=True)
class Op:
    """An operation: its kind and unit, its stream, the buffers that it accesses, and its waits."""

    kind: Kind
    unit: Unit
    stream: Stream
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    waits: tuple[Wait, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.unit}"


@dataclass(frozen=True)
class Schedule:
    """The operations of one pass over the units, in the order in which they are issued.

    Attributes:
        name: the pass: ``forward``, ``backward``, ``update`` or ``save``.
        ops: the operations, with their waits.
        keeps: blocks whose boundary a forward pass keeps for its backward pass.
        begins_anywhere: computations before the first one that is reached may be left out.
        optional: units whose computations may be left out.
    """

    name: str
    ops: tuple[Op, ...]
    keeps: frozenset[int] = frozenset()
    begins_anywhere: bool = False
    optional: frozenset[Unit] = frozenset()

    @cached_property
    def positions(self) -> dict[tuple[Kind, Unit], int]:
        """The position of each operation, by kind and unit; of several equal ones, that of the first."""
        found: dict[tuple[Kind, Unit], int] = {}
        for index, op in enumerate(self.ops):
            found.setdefault((op.kind, op.unit), index)
        return found

    @cached_property
    def digest(self) -> str:
        """A short text that is the same for equal passes."""
        return f"{self.name} {zlib.crc32(repr(self.ops).encode()):08x}"

    @cached_property
    def uses(self) -> tuple[tuple[LastUse, ...], ...]:
        """The waits of later passes that each operation satisfies, unless a later operation supersedes it."""
        return tuple(map(uses, self.ops))

    def __str__(self) -> str:
        lines = [f"{self.name}:"]
        for i, op in enumerate(self.ops):
            waits = ", ".join(map(str, op.waits)) or "nothing"
            lines.append(f"  #{i:<3} {op.stream:8} {op!s:20} waits for {waits}")
        return "\n".join(lines)


def uses(op: Op) -> tuple[LastUse, ...]:
    """Return the waits of later passes that an operation satisfies, unless a later operation supersedes it."""
    return tuple(LastUse(buffer, op.stream) for buffer in op.reads + op.writes)


class ScheduleError(HorizonError, AssertionError):
    """A schedule would race, deadlock or read the wrong unit. This is an internal error, never the user's."""
