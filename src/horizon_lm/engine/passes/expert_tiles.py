"""The parts of slabs that units, cores and tiles are streamed from, and the experts of the tiles."""

import torch

from horizon_lm.common.units import Unit
from horizon_lm.engine.host.slab_parts import SlabPart
from horizon_lm.memory.layout.model import TiledLayout
from horizon_lm.memory.store import Store
from horizon_lm.model.laid_out import laid_out
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.routed_experts import find_experts


class ExpertTiles(TiledLayout[SlabPart]):
    """The parts of a model in host memory that are streamed into slots.

    Args:
        parts: the parts of the model.
        store: host memory.
        size: number of experts in a tile; None to cut no block.

    Attributes:
        experts: the experts of blocks, by the index of the block.
    """

    def __init__(self, parts: ModelParts, store: Store, size: int | None) -> None:
        super().__init__(laid_out(parts, store.units), size, SlabPart)
        self._store = store
        self.experts = find_experts(parts)

    def routed(self, num_tokens: int) -> frozenset[int]:
        """Return the blocks of which this number of tokens reads at most half of the experts."""
        return frozenset(index for index, each in self.experts.items() if num_tokens <= each.most_tokens)

    def decoded(self, unit: Unit) -> dict[str, torch.dtype]:
        """Return the dtype that each quantized tensor of a unit is decoded to, by full name."""
        part = self.parts[unit]
        return {name: self._store.decoded_dtype(name) for name in part.layout if name in part.slabs.codecs}
