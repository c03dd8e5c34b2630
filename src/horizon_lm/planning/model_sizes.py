"""Sizes of a model's units: the elements of their tensors, from which bytes in all places follow."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from horizon_lm.planning.experts import ExpertSizes
from horizon_lm.slabs import Shard, UnitCuts, slab_elements


@dataclass(frozen=True, slots=True)
class PackedSizes:
    """The quantized tensors of a block in host memory.

    Attributes:
        tensors: elements of each tensor.
        num_bytes: bytes of their codes and scales, which cross the link.
        slab_bytes: bytes of their slab.
    """

    tensors: Sequence[int]
    num_bytes: int
    slab_bytes: int


_NOT_PACKED = PackedSizes((), 0, 0)


MatrixShape = tuple[int, int, int]  # number, rows and columns of equal matrices


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Numbers of elements of a model's parameters, or of its trainable parameters.

    Attributes:
        blocks: elements of each tensor, for each decoder block.
        table: elements of the embedding table.
        own_head: elements of the output projection; empty if it is tied to the table.
        outer: elements of each tensor outside of blocks, head and table.
        vocabulary, hidden: rows and columns of the embedding table, V and H.
        tied: the head uses the embedding table.
        idle: elements of embedding tables of which only rows are read, beside the one that is trained.
        packed: the quantized tensors of each block, which ``blocks`` has, too; empty if no block has any.
        matrices: for each tensor in ``blocks``, its trained matrices; None for other tensors. A block without any may have an empty
            list.
        experts: the routed experts of each block that can be cut into tiles, None for other blocks; empty if no block has any.
        in_float32: the weights that are kept in float32 whatever the precision, which are in none of the others; None if there are
            none.
    """

    blocks: Sequence[Sequence[int]]
    table: Sequence[int]
    own_head: Sequence[int]
    outer: Sequence[int]
    vocabulary: int
    hidden: int
    tied: bool
    idle: Sequence[int] = ()
    packed: Sequence[PackedSizes] = ()
    matrices: Sequence[Sequence[MatrixShape | None]] = ()
    experts: Sequence[ExpertSizes | None] = ()
    in_float32: "ModelSizes | None" = None

    @property
    def head(self) -> Sequence[int]:
        """The tensors by which the head multiplies."""
        if self.tied:
            return self.table
        return self.own_head if self.in_float32 is None else [*self.own_head, *self.in_float32.own_head]

    @property
    def units(self) -> Sequence[Sequence[int]]:
        """The tensors of each unit that has its own slabs, without those in float32."""
        return [self.table, *self.blocks, self.own_head, self.outer, self.idle]

    @property
    def num_parameters(self) -> int:
        in_float32 = 0 if self.in_float32 is None else self.in_float32.num_parameters
        return sum(map(sum, self.units)) + in_float32

    def file_bytes(self, itemsize: float) -> int:
        """Return the bytes of all weights in a checkpoint, of which quantized tensors keep their codes and scales."""
        packed_bytes = sum(each.num_bytes for each in self.packed)
        num_quantized = sum(sum(each.tensors) for each in self.packed)
        return round((self.num_parameters - num_quantized) * itemsize) + packed_bytes

    def matrices_of(self, index: int) -> list[MatrixShape]:
        """Return the trained matrices of a block."""
        return [each for each in self.matrices[index] if each is not None] if self.matrices else []

    def only_matrices(self) -> "ModelSizes":
        """Return the sizes with 0 for all weights but the trained matrices of blocks."""
        blocks = [
            [prod(shape) if shape else 0 for shape in self.matrices[index]] if self.matrices_of(index) else []
            for index in range(len(self.blocks))
        ]
        return replace(self, blocks=blocks, table=(), own_head=(), outer=(), idle=())

    def without_matrices(self) -> "ModelSizes":
        """Return the sizes with 0 for the trained matrices of blocks."""
        blocks = [
            [0 if shape else numel for numel, shape in zip(tensors, self.matrices[index], strict=True)]
            if self.matrices_of(index)
            else tensors
            for index, tensors in enumerate(self.blocks)
        ]
        return replace(self, blocks=blocks)

    def experts_of(self, index: int) -> ExpertSizes | None:
        """Return the routed experts of a block; None if it has none that can be cut into tiles."""
        return self.experts[index] if self.experts else None

    def cores(self) -> list[Sequence[int]]:
        """Return the tensors of each block, with 0 for experts that can be cut into tiles."""
        return [
            tensors if experts is None else experts.others(tensors)
            for tensors, experts in zip(self.blocks, self.experts, strict=True)
        ]

    def tile_numel(self, size: int) -> int:
        """Return the elements of a slot for tiles of at most this many experts of any block; 0 if no block can be cut into tiles."""
        blocks = zip(self.blocks, self.experts, strict=True)
        return max((slab_elements(experts.tile(tensors, size)) for tensors, experts in blocks if experts), default=0)

    def packed_of(self, index: int) -> PackedSizes:
        """Return the quantized tensors of a block; none in a model without them."""
        return self.packed[index] if self.packed else _NOT_PACKED

    def cuts(self, shard: Shard) -> list[UnitCuts]:
        """Return the places at which the slabs of each unit are cut, in the order of `units`."""
        # The first unit is the table, which is cut between rows; the blocks follow.
        first_block = 1
        packed = {first_block + index: each.tensors for index, each in enumerate(self.packed)}
        return [
            UnitCuts(tensors, packed.get(number, ()), self.hidden if number == 0 else None, shard)
            for number, tensors in enumerate(self.units)
        ]
