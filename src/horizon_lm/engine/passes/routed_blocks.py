"""Blocks that are streamed in two parts where few tokens are computed: all but the experts, and those experts that tokens are
routed to.

One token of a model with 128 experts reads 8 of them in each block. If all of them were streamed, answering a prompt would
take sixteen times as long.

Shapes: E experts.
"""

from collections.abc import Iterable, Iterator

import torch

from horizon_lm.device.transfers import Move
from horizon_lm.engine.host.slab_parts import move_rows
from horizon_lm.engine.passes.device_buffers import DeviceBuffers
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.routed_experts import find_experts
from horizon_lm.ranges import runs
from horizon_lm.store.store import Store
from horizon_lm.store.unit_slabs import UnitSlabs
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
        self._prefix, self._store = parts.block_prefix, store
        self.experts = find_experts(parts)

    def for_tokens(self, count: int) -> frozenset[int]:
        """Return the blocks of which this number of tokens reads at most half of the experts."""
        return frozenset(index for index, each in self.experts.items() if count <= each.most_tokens)

    def names_of(self, unit: Unit) -> list[str]:
        """Return the full names of the weights of a block's experts."""
        return [f"{self._prefix}.{unit.block_index}.{name}" for name in self.experts[unit.block_index].names]

    def num_bytes(self, unit: Unit) -> int:
        """Return the bytes of the weights of a block's experts in host memory."""
        found = 0
        for slabs in (self._store.units[part] for part in self._store.parts_of(unit)):
            for name in self.names_of(unit):
                if name in slabs.packed:
                    found += slabs.packed.bytes_of(name).nbytes
                elif name in slabs.plain:
                    found += slabs.plain.view(slabs.weights, name).nbytes
        return found

    def expert_moves(self, unit: Unit, memory: DeviceBuffers, chosen: Iterable[int]) -> list[Move]:
        """Return the moves that stream some experts of a block, given their indices in ascending order."""
        spans = runs(chosen)
        return [
            move
            for part in self._store.parts_of(unit)
            for move in self._moves(self._store.units[part], memory.weights_of(part), self.names_of(unit), spans)
        ]

    def _moves(
        self, slabs: UnitSlabs, slot: torch.Tensor, names: Iterable[str], spans: Iterable[slice]
    ) -> Iterator[Move]:
        """Yield the moves that stream some experts of these weights, as far as they are in these slabs."""
        for name in names:
            if name in slabs.layout:
                decoded = self._store.decoded_dtype(name) if name in slabs.packed else None
                for span in spans:
                    yield move_rows(slabs, name, span, slabs.layout.view(slot, name)[span.start :], decoded)
