"""A model as the planner sees it: the sizes of its units and the work of their computations, as plain data."""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Generic, TypeVar

from horizon_lm.plan.memory import ModelSizes


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes of one computation of a block, its weights, their gradients' slots and its inputs not counted.

    Attributes:
        graph: what its outputs keep for a later backward, themselves included.
        peak: the most that forward and backward hold at once.
    """

    graph: int
    peak: int


@dataclass(frozen=True, slots=True)
class Work:
    """What a computation does, as its operations say one by one.

    Attributes:
        products: operations of matrix products (2 for each multiplication and addition).
        product_bytes: that these products read and write.
        attention: operations of fused attention kernels.
        moved_bytes: that all other operations read and write.
        num_ops: operations that start a kernel.
    """

    products: float = 0.0
    product_bytes: float = 0.0
    attention: float = 0.0
    moved_bytes: float = 0.0
    num_ops: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "Work") -> "Work":
        return Work(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __mul__(self, factor: float) -> "Work":
        return Work(*(a * factor for a in astuple(self)))


T = TypeVar("T", int, Work)


@dataclass(frozen=True, slots=True)
class Linear(Generic[T]):
    """What grows by the same amount with every row, known for one row and for two."""

    one: T
    two: T

    def at(self, rows: float) -> T:
        return self.one + (self.two - self.one) * (rows - 1)  # type: ignore[return-value, operator]


@dataclass(frozen=True, slots=True)
class BlockKind:
    """Blocks of one structure, and what one device micro-batch takes in each.

    Attributes:
        indices: of these blocks.
        graph, peak: as in `Footprint`.
        forward_peak: bytes that a forward without a graph holds at once.
        forward, backward: work; the backward's is that after a forward with a graph.
    """

    indices: Sequence[int]
    graph: Linear[int]
    peak: Linear[int]
    forward_peak: Linear[int]
    forward: Linear[Work]
    backward: Linear[Work]

    def footprint(self, rows: int) -> Footprint:
        return Footprint(self.graph.at(rows), self.peak.at(rows))


@dataclass(frozen=True, slots=True)
class ModelOutline:
    """A causal language model for rows of one length and one dtype on the device.

    Attributes:
        name: for people.
        sizes: of all units, in elements.
        trained: of what is trained of them.
        active: parameters that a token is multiplied with: no lookup, and only the experts it is sent to.
        length: tokens of a row.
        compute_bytes: of an element on the device.
        kinds: of blocks; each block is of one.
        shared: bytes of what all blocks are given besides hidden states: masks, rotary tables.
        head_peak: bytes that norm, head and loss hold at once, by tokens: ``chunked`` and ``whole``.
        head_forward, head_backward: their work, by tokens. The weights are read once whatever the tokens.
        attention: the implementation that was outlined.
        first_differentiated: the first block that a gradient passes through.
        whole_head_only: why the loss cannot be computed in chunks of tokens; empty if it can.
        whole_batch_only: blocks compute all rows at once, because it is not known that rows can be cut.
        unproven: why the model may differ from plain autograd; empty if it was compared with it.
        unknown: why computations could not be tried without weights, so that they seem to take nothing; empty if they could.
    """

    name: str
    sizes: ModelSizes
    trained: ModelSizes
    active: int
    length: int
    compute_bytes: int
    kinds: Sequence[BlockKind]
    shared: Linear[int]
    head_peak: Mapping[str, Linear[int]]
    head_forward: Linear[Work]
    head_backward: Linear[Work]
    attention: str
    first_differentiated: int = 0
    whole_head_only: str = ""
    whole_batch_only: bool = False
    unproven: str = ""
    unknown: str = ""

    @property
    def num_blocks(self) -> int:
        return len(self.sizes.blocks)

    def kind(self, index: int) -> BlockKind:
        """The kind of a block."""
        return next(kind for kind in self.kinds if index in kind.indices)

    def footprints(self, rows: int) -> Sequence[Footprint]:
        """Of each block, for a micro-batch of so many rows."""
        found = {id(kind): kind.footprint(rows) for kind in self.kinds}
        return [found[id(self.kind(index))] for index in range(self.num_blocks)]

    def step_flops(self, tokens: int) -> float:
        """Operations of a training step that the model asks for, whatever is computed again: 3 forwards."""
        rows = tokens / self.length
        blocks = [kind.forward.at(rows) * len(kind.indices) for kind in self.kinds]
        attention = sum(work.attention for work in blocks)
        return 6.0 * self.active * tokens + 3.0 * attention
