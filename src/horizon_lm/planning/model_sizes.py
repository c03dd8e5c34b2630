"""Sizes of a model's units: the elements of their tensors, from which bytes in all places follow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from horizon_lm.planning.experts import ExpertSizes
from horizon_lm.slabs import Shard, UnitCuts, slab_elements
from horizon_lm.units import EMBED, HEAD, Unit, block


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
_FLOAT32 = ".float32"


def float32_of(unit: Unit) -> Unit:
    """Return the name of the slab of a unit's weights that are kept in float32."""
    return Unit(unit + _FLOAT32)


def is_float32(slab: Unit) -> bool:
    """Return whether a slab is of weights that are kept in float32."""
    return slab.endswith(_FLOAT32)


def home_of(slab: Unit) -> Unit:
    """Return the unit to which a slab belongs."""
    return Unit(slab.removesuffix(_FLOAT32))


MatrixShape = tuple[int, int, int]  # number, rows and columns of equal matrices


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Numbers of elements of a model's parameters, or of its trainable parameters.

    Attributes:
        units: elements of each tensor, for each unit that has slabs of its own: table, blocks, head, outer and idle parameters, and
            for each of them the weights that are kept in float32 whatever the precision (`float32_of`), if the model has any. A unit
            without tensors has none, as the head if it is tied to the table.
        num_blocks: number of decoder blocks.
        vocabulary, hidden: rows and columns of the embedding table, V and H.
        tied: the head uses the embedding table.
        packed: the quantized tensors of each block, which ``units`` has, too; empty if no block has any.
        matrices: for each tensor of each block, its trained matrices; None for other tensors. A block without any may have an empty
            list.
        experts: the routed experts of each block that can be cut into tiles, None for other blocks; empty if no block has any.
    """

    units: Mapping[Unit, Sequence[int]]
    num_blocks: int
    vocabulary: int
    hidden: int
    tied: bool
    packed: Sequence[PackedSizes] = ()
    matrices: Sequence[Sequence[MatrixShape | None]] = ()
    experts: Sequence[ExpertSizes | None] = ()

    @property
    def blocks(self) -> list[Sequence[int]]:
        """The tensors of each block, without those in float32."""
        return [self.units[block(index)] for index in range(self.num_blocks)]

    def tensors_of(self, unit: Unit) -> list[int]:
        """Return the tensors by which a unit computes: also those in float32, and for a tied head the table."""
        holder = EMBED if unit == HEAD and self.tied else unit
        return [*self.units[holder], *self.units.get(float32_of(holder), ())]

    def in_float32(self) -> "ModelSizes | None":
        """Return the sizes of the weights that are kept in float32 alone, under the names of their units; None if there are none."""
        units = {home_of(unit): tensors for unit, tensors in self.units.items() if is_float32(unit)}
        return replace(self, units=units, packed=(), matrices=(), experts=()) if units else None

    @property
    def num_parameters(self) -> int:
        return sum(map(sum, self.units.values()))

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
        units: dict[Unit, Sequence[int]] = dict.fromkeys(self.units, ())
        for index in self._blocks_with_matrices():
            units[block(index)] = [prod(shape) if shape else 0 for shape in self.matrices[index]]
        return replace(self, units=units)

    def without_matrices(self) -> "ModelSizes":
        """Return the sizes with 0 for the trained matrices of blocks."""
        units = dict(self.units)
        for index in self._blocks_with_matrices():
            shapes = zip(units[block(index)], self.matrices[index], strict=True)
            units[block(index)] = [0 if shape else numel for numel, shape in shapes]
        return replace(self, units=units)

    def _blocks_with_matrices(self) -> list[int]:
        return [index for index in range(self.num_blocks) if self.matrices_of(index)]

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

    def cuts(self, shard: Shard) -> dict[Unit, UnitCuts]:
        """Return the places at which the slabs of each unit are cut: those of the table between rows."""
        packed = {block(index): each.tensors for index, each in enumerate(self.packed)}
        return {
            unit: UnitCuts(tensors, packed.get(unit, ()), self.hidden if unit == EMBED else None, shard)
            for unit, tensors in self.units.items()
        }
