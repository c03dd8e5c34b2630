"""Blocks that are streamed in two parts where few tokens are computed: all but the experts, and those experts that tokens are
routed to.

One token of a model with 128 experts reads 8 of them in each block. If all of them were streamed, answering a prompt would
take sixteen times as long.

Shapes: E experts.
"""

from collections.abc import Iterable

from horizon_lm.device.transfers import Move
from horizon_lm.engine.host.slab_parts import SlabPart
from horizon_lm.engine.passes.device_buffers import DeviceBuffers
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.routed_experts import find_experts
from horizon_lm.ranges import runs
from horizon_lm.store.store import Store
from horizon_lm.units import Unit


class RoutedBlocks:
    """The blocks of a model whose experts can be streamed by themselves.

    Args:
        parts: the parts of the model.
        store: host memory, none of which belongs to other ranks.

    Attributes:
        experts: the experts of these blocks, by index.
    """

    def __init__(self, parts: ModelParts, store: Store) -> None:
        self._names_of_blocks, self._store = parts.block_names, store
        self.experts = find_experts(parts)

    def for_tokens(self, count: int) -> frozenset[int]:
        """Return the blocks of which this number of tokens reads at most half of the experts."""
        return frozenset(index for index, each in self.experts.items() if count <= each.most_tokens)

    def without_experts(self, unit: Unit) -> SlabPart:
        """Return all but the experts of a block's slabs, in the slot of the block."""
        slabs = self._store.units[unit]
        return SlabPart(slabs, frozenset(slabs.layout) - self._names(unit), in_place=True)

    def num_bytes(self, unit: Unit) -> int:
        """Return the bytes of the weights of a block's experts in host memory."""
        slabs, names = self._store.units[unit], self._names(unit)
        return sum(
            slab.layout.view(slab.weights, name).nbytes for slab in slabs.all for name in slab.layout if name in names
        )

    def expert_moves(self, unit: Unit, memory: DeviceBuffers, chosen: Iterable[int]) -> list[Move]:
        """Return the moves that stream some experts of a block, given their indices in ascending order."""
        all_rows, slabs = slice(0, self.experts[unit.block_index].count), self._store.units[unit]
        part = SlabPart(slabs, self._names(unit), all_rows, in_place=True)
        dtypes = {name: self._store.decoded_dtype(name) for name in slabs.codecs}
        return part.moves(memory.weights_of(unit), dtypes, runs(chosen))

    def _names(self, unit: Unit) -> frozenset[str]:
        """Return the full names of the weights of a block's experts."""
        index = unit.block_index
        return frozenset(f"{self._names_of_blocks[index]}.{name}" for name in self.experts[index].names)
