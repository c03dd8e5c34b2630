"""A model as it is laid out: its units, and the tiles into which the experts of blocks are cut.

In host memory nothing is cut: weights, gradients and moments of a block lie in its slabs as without tiles, so checkpoints do not
depend on the size of a tile.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Generic, TypeVar

from horizon_lm.common.ranges import length
from horizon_lm.common.units import EMBED, HEAD, Unit, block, tile
from horizon_lm.memory.layout.parts import PartLayout
from horizon_lm.memory.layout.ranks import Shard
from horizon_lm.memory.layout.units import StorageLayout, StorageT, UnitLayout
from horizon_lm.schedule.tiles import TileSlots

MatrixShape = tuple[int, int, int]
"""Number, rows and columns of equal matrices."""


@dataclass(frozen=True, slots=True)
class ExpertTensors:
    """The routed experts of a block.

    Attributes:
        count: number of experts.
        per_token: number of experts that a token is routed to.
        names: full names of their weights, each of which has a row for every expert.
        is_divisible: they can be computed a few at a time.
    """

    count: int
    per_token: int
    names: frozenset[str]
    is_divisible: bool


@dataclass(frozen=True, eq=False)
class ModelLayout(Generic[StorageT]):
    """The units of a model, laid out.

    Attributes:
        units: the slabs of table, blocks, head, outer and idle parameters. The head has no tensors if it is tied to the table.
        num_blocks: number of blocks, those of towers before those of the decoder.
        vocabulary, hidden: rows and columns of the embedding table, V and H.
        tied: the head uses the embedding table.
        matrices: the trained matrices of blocks, by full name.
        experts: the routed experts of blocks, by the index of the block.
        num_tower_blocks: number of blocks of towers, which a pass computes only for batches with images, video or audio.
    """

    units: Mapping[Unit, UnitLayout[StorageT]]
    num_blocks: int
    vocabulary: int
    hidden: int
    tied: bool
    matrices: Mapping[str, MatrixShape] = field(default_factory=dict)
    experts: Mapping[int, ExpertTensors] = field(default_factory=dict)
    num_tower_blocks: int = 0

    @property
    def blocks(self) -> list[Unit]:
        """The names of the blocks."""
        return [block(index) for index in range(self.num_blocks)]

    def of(self, unit: Unit) -> UnitLayout[StorageT]:
        """Return the slabs with the weights of a unit; for a tied head, the slabs of the table."""
        return self.units[EMBED if unit == HEAD and self.tied else unit]

    def numel(self, unit: Unit) -> int:
        """Return the number of elements of a unit's weights, quantized ones and those in float32 among them."""
        return self.of(unit).layout.num_params

    def trained_numel(self, unit: Unit) -> int:
        """Return the number of these elements that are trained."""
        return self.of(unit).grad_layout.num_params

    @cached_property
    def num_parameters(self) -> int:
        """The elements of all units."""
        return sum(slabs.layout.num_params for slabs in self.units.values())

    @cached_property
    def trained(self) -> frozenset[str]:
        """Full names of the trained tensors."""
        return frozenset(name for slabs in self.units.values() for name in slabs.grad_layout)

    @cached_property
    def num_trained(self) -> int:
        """The elements of all units that are trained."""
        return sum(slabs.grad_layout.num_params for slabs in self.units.values())

    def slabs(self) -> Iterator[StorageT]:
        """Yield the slabs of weights that are not quantized."""
        for slabs in self.units.values():
            yield from slabs.of_weights

    @property
    def is_quantized(self) -> bool:
        """True if a tensor is quantized."""
        return any(slabs.codecs for slabs in self.units.values())

    def file_bytes(self, itemsize: float) -> int:
        """Return the bytes of all weights in a checkpoint: codes and scales of quantized tensors, ``itemsize`` for any other element."""
        quantized = sum(slabs.layout.entry(name).numel for slabs in self.units.values() for name in slabs.codecs)
        packed = sum(slabs.packed.layout.num_params for slabs in self.units.values())
        return round((self.num_parameters - quantized) * itemsize) + packed

    def matrices_of(self, unit: Unit) -> list[MatrixShape]:
        """Return the trained matrices of a block."""
        return [self.matrices[name] for name in self.units[unit].layout if name in self.matrices]

    @cached_property
    def on(self) -> Callable[[Shard], "ModelLayout[StorageLayout]"]:
        """The function that returns the layout of the same model for a rank, without memory. It makes each layout once."""

        def laid_out(shard: Shard) -> ModelLayout[StorageLayout]:
            units = {unit: slabs.on(shard) for unit, slabs in self.units.items()}
            return replace(self, units=units)  # type: ignore[return-value, arg-type]

        return cache(laid_out)

    @cached_property
    def tiled(self) -> Callable[[int | None], "TiledLayout[PartLayout[StorageT]]"]:
        """The function that returns the layout with tiles of a number of experts; None for whole blocks. It makes each layout once."""
        return cache(lambda size: TiledLayout(self, size, PartLayout))


PartT = TypeVar("PartT", bound=PartLayout[Any])


class TiledLayout(Generic[PartT]):
    """The parts of a model that have slots on the device: its units, or the core of a block with tiles, and the tiles.

    The experts of a block that is not cut are one tile, which lies in the slot of the block. Only passes of few tokens stream it apart
    from its core; others stream the block as a whole.

    Args:
        model: the layout of the model.
        size: number of experts in a tile; None to cut no block.
        make: makes a part; called with the arguments of `PartLayout`.

    Attributes:
        parts: the tensors of each unit and tile; of a block that is cut, those of its core.
        cores: the tensors of each block with experts, except for those of its experts.
        slots: the slots between which tiles alternate.
    """

    def __init__(self, model: ModelLayout[Any], size: int | None, make: Callable[..., PartT]) -> None:
        self.model, self.size = model, size
        self.parts: dict[Unit, PartT] = {unit: make(slabs) for unit, slabs in model.units.items()}
        self.cores: dict[Unit, PartT] = {}
        counts = [0] * model.num_blocks
        for index, experts in model.experts.items():
            unit, slabs = block(index), model.units[block(index)]
            # None for a block that is not cut: all of its experts are one tile, which lies in the slot of the block.
            tile_size = size if size is not None and experts.is_divisible else None
            self.cores[unit] = make(slabs, frozenset(slabs.layout) - experts.names, in_place=tile_size is None)
            starts = range(0, experts.count, tile_size or experts.count)
            for number, start in enumerate(starts):
                rows = slice(start, min(start + starts.step, experts.count))
                self.parts[tile(index, number)] = make(slabs, experts.names, rows, in_place=tile_size is None)
            if tile_size is not None:
                self.parts[unit], counts[index] = self.cores[unit], len(starts)
        self.slots = TileSlots(tuple(counts) if any(counts) else ())

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of tiles of each block; empty if no block has any."""
        return tuple(self.slots.counts)

    def is_cut(self, index: int) -> bool:
        """Return whether the experts of a block are cut into tiles with slots of their own."""
        return bool(self.counts) and self.counts[index] > 0

    @cached_property
    def tiles(self) -> list[Unit]:
        """All tiles with slots of their own."""
        return [unit for unit, part in self.parts.items() if unit.is_tile and not part.in_place]

    def tiles_of(self, index: int) -> list[Unit]:
        """Return the tiles of a block with experts, in the order of the forward pass."""
        return self.slots.of(index) or [tile(index, 0)]

    @property
    def kept_each(self) -> int:
        """The hidden states that a block keeps for the backward pass: its input, and with tiles what its experts return."""
        return 1 if self.size is None else 2

    def part(self, unit: Unit) -> PartT:
        """Return the tensors in the slot of a unit; for a tied head, the tensors of the table."""
        return self.parts[EMBED if unit == HEAD and self.model.tied else unit]

    def experts_of(self, unit: Unit) -> slice:
        """Return the experts of a tile."""
        rows = self.parts[unit].rows
        assert rows is not None
        return rows

    def share(self, unit: Unit) -> float:
        """Return the share of a block's experts that are in a tile."""
        return length(self.experts_of(unit)) / self.model.experts[unit.block_index].count

    def lands_first(self, unit: Unit) -> bool:
        """Return whether the gradients of a tile, core or unit are the first to land in their slabs in a backward pass. It visits the tiles
        of a block from the last to the first, and then its core.
        """
        if unit.is_tile:
            return unit.tile_number == self.counts[unit.block_index] - 1
        if unit.is_block and self.is_cut(unit.block_index):
            # A core lands first if the tiles are not trained, and so land nothing.
            return self.parts[tile(unit.block_index, 0)].grad_layout.numel == 0
        return True
