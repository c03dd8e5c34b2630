"""The tiles into which the experts of blocks are cut, and the parts of slabs that units, cores and tiles have slots for.

In host memory nothing is cut: weights, gradients and moments of a block lie in its slabs as without tiles, so checkpoints do not
depend on the size of a tile.
"""

from collections.abc import Iterable, Sequence

import torch

from horizon_lm.engine.host.slab_parts import SlabPart
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.routed_experts import RoutedExperts, find_divisible_experts
from horizon_lm.schedule.tiles import TileSlots
from horizon_lm.store.store import Store
from horizon_lm.units import Unit, block, tile


class ExpertTiles:
    """The tiles of a model.

    Args:
        parts: the parts of the model.
        store: host memory.
        size: number of experts in a tile; None to cut no block.

    Attributes:
        experts: the experts of the blocks that are cut, by index.
        parts: what has a slot on the device: the slabs of each unit, of a block that is cut those of its core, and each tile.
        slots: the slots between which tiles alternate.
    """

    def __init__(self, parts: ModelParts, store: Store, size: int | None) -> None:
        self.experts: dict[int, RoutedExperts] = {} if size is None else find_divisible_experts(parts)
        self._store, self._size = store, size or 1  # without a size no block is cut, so it is not used
        self.parts = {unit: SlabPart(slabs) for unit, slabs in store.units.items()}
        for index, experts in self.experts.items():
            slabs = store.units[block(index)]
            names = frozenset(f"{parts.block_prefix}.{index}.{name}" for name in experts.names)
            self.parts[block(index)] = SlabPart(slabs, frozenset(slabs.layout) - names)
            for number in range(self._count(index)):
                self.parts[tile(index, number)] = SlabPart(slabs, names, self.experts_of(tile(index, number)))
        counts = tuple(self._count(index) for index in range(parts.num_blocks))
        self.slots = TileSlots(counts if any(counts) else ())

    def _count(self, index: int) -> int:
        """Return the number of tiles of a block."""
        return -(-self.experts[index].count // self._size) if index in self.experts else 0

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of tiles of each block; empty if no block has any."""
        return tuple(self.slots.counts)

    def experts_of(self, unit: Unit) -> slice:
        """Return the experts of a tile."""
        start = unit.tile_number * self._size
        return slice(start, min(start + self._size, self.experts[unit.block_index].count))

    @property
    def units(self) -> list[Unit]:
        """All tiles."""
        return [unit for unit in self.parts if unit.is_tile]

    def packed_bytes(self, units: Iterable[Unit]) -> int:
        """Return the bytes of a slot in which several ranks gather codes and scales of any of these units; 0 for one rank."""
        return max((self.parts[unit].packed_cuts[-1] for unit in units), default=0)

    def slot_numels(self, unit: Unit) -> list[int]:
        """Return the elements of each buffer of the slot of a unit's weights; 0 for units without slabs."""
        return self.parts[unit].slot_numels if unit in self.parts else [0, 0]

    def grad_numels(self, unit: Unit) -> list[int]:
        """Return the elements of a unit's gradients in each buffer of their slot; 0 for units without slabs."""
        if unit not in self.parts:
            return [0, 0]
        return [layout.numel for layout in self.parts[unit].grad_layout.buffers]

    def decoded(self, unit: Unit) -> dict[str, torch.dtype]:
        """Return the dtype that each quantized tensor of a unit is decoded to, by full name."""
        part = self.parts[unit]
        return {name: self._store.decoded_dtype(name) for name in part.layout if name in part.slabs.codecs}

    def lands_first(self, unit: Unit) -> bool:
        """Return whether no gradients of the same slabs are landed before a unit's in a backward pass, which visits the last tile of a
        block first, and its core last.
        """
        if unit.is_tile:
            return unit.tile_number == self.counts[unit.block_index] - 1
        if unit.is_block and unit.block_index in self.experts:
            # A core lands first if the tiles are not trained, and so land nothing.
            return self.parts[tile(unit.block_index, 0)].grad_layout.numel == 0
        return True


def largest(sizes: Iterable[Sequence[int]]) -> list[int]:
    """Return the elements of each buffer of a slot that is large enough for each of these, which may be none."""
    found = [0, 0]
    for each in sizes:
        found = [max(pair) for pair in zip(found, each, strict=True)]
    return found
