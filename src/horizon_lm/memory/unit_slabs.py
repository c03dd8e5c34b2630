"""The slabs of a unit in host memory: `UnitSlabs`, a `UnitLayout` whose storages are allocated slabs, and `Slab`.

Moments are no part of them: `layout.moments` lays them out, and `optim.moments` allocates them.
"""

from collections.abc import Sequence

import torch

from horizon_lm.common.units import Unit
from horizon_lm.memory.arena import Arena
from horizon_lm.memory.layout.ranks import Shard
from horizon_lm.memory.layout.slabs import SlabLayout
from horizon_lm.memory.layout.units import FLOAT32, PACKED, StorageLayout, UnitLayout
from horizon_lm.memory.precision import PRECISIONS, Precision

Slot = Sequence[torch.Tensor]
"""The buffers of a slot on the device, each 1-D: of the dtype of computation, and of float32."""


_NO_MEMORY = Arena(0)


class Slab(StorageLayout):
    """The tensors of a unit that have one storage: weights, or codes; low halves; gradients.

    Args:
        precision: the storage mode of the run.
        unit, storage, layout, shard, row: as in `StorageLayout`. What other ranks own has addresses, but no memory.

    Attributes:
        precision: the storage mode of the weights; not used for codes.
        dtype: the dtype of the values.
        weights: the values, 1-D: weights without their low halves, or codes as bytes.
        low: the low halves of ``weights``, if the slab has them.
        grads: the gradients of its trainable tensors.
    """

    def __init__(
        self, precision: Precision, unit: Unit, storage: str, layout: SlabLayout, shard: Shard, row: int | None = None
    ) -> None:
        super().__init__(unit, storage, layout, shard, row)
        self.precision = PRECISIONS["float32"] if storage == FLOAT32 else precision
        self.dtype = torch.uint8 if storage == PACKED else self.precision.weight_dtype
        # No memory yet: `Store` allocates it, or `take_over` sets it. The weights begin at byte ``start`` of their arena.
        self.arena = self.low_arena = _NO_MEMORY
        self.start = self.low_start = 0
        self.weights = torch.empty(0, dtype=self.dtype)
        self.low: torch.Tensor | None = None
        self.grads = torch.empty(0, dtype=self.precision.grad_dtype)

    @property
    def has_low(self) -> bool:
        """True if the weights may have low halves."""
        return self.precision.low_half and self.storage != PACKED

    def take_over(self, other: "Slab") -> None:
        """Use the weights and low halves of another slab with the same layout, which lie in its arenas."""
        self.arena, self.start, self.weights = other.arena, other.start, other.weights
        self.low_arena, self.low_start, self.low = other.low_arena, other.low_start, other.low

    def tensors(self) -> list[torch.Tensor]:
        """Return the weights and their low halves, both of which are cut at ``cuts``."""
        return [self.weights] if self.low is None else [self.weights, self.low]

    def release_others(self) -> None:
        """Give the memory outside of this rank's range back to the system. Reading the ranges of other ranks has filled it."""
        for values, arena, start in (
            (self.weights, self.arena, self.start),
            (self.low, self.low_arena, self.low_start),
        ):
            if values is not None:
                size = values.element_size()
                arena.release(start, start + self.own.start * size)
                arena.release(start + self.own.stop * size, start + values.numel() * size)

    def row_cuts(self, rows: torch.Tensor) -> list[int]:
        """Return the places at which the ranks cut a list of sorted rows (R,) of a table."""
        bounds = torch.tensor([cut // (self.row or 1) for cut in self.cuts])
        return [int(place) for place in torch.searchsorted(rows, bounds)]


UnitSlabs = UnitLayout[Slab]
