"""Blocks that are streamed in two parts where few tokens are computed: all but the experts, and those experts that tokens are
routed to.

One token of a model with 128 experts reads 8 of them in each block. If all of them were streamed, answering a prompt would
take sixteen times as long.

Shapes: E experts.
"""

from collections.abc import Iterable, Iterator
from itertools import pairwise

import torch

from horizon_lm.codecs.rows import Rows
from horizon_lm.device.transfers import Copy, Decode, Move
from horizon_lm.engine.passes.device_buffers import DeviceBuffers
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.routed_experts import find_experts
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

    def expert_moves(self, unit: Unit, memory: DeviceBuffers, chosen: Iterable[int]) -> list[Move]:
        """Return the moves that stream some experts of a block, which are sorted."""
        spans, store = list(spans_of_indices(chosen)), self._store
        return [
            self._move(store.units[part], memory.weights_of(part), name, start, stop)
            for part in store.parts_of(unit)
            for name in self.names_of(unit)
            if name in store.units[part].layout
            for start, stop in spans
        ]

    def _move(self, slabs: UnitSlabs, slot: torch.Tensor, name: str, start: int, stop: int) -> Move:
        """Return the move that streams a weight (E, ...) of the experts from ``start`` to ``stop``."""
        if name not in slabs.packed:
            entry = slabs.layout.entries[name]
            first, of_expert = entry.offset, entry.strides[0]
            return copy_range(slabs, slot, slice(first + start * of_expert, first + stop * of_expert))
        packed = slabs.packed.entries[name]
        codec, weights = Rows(packed.codec, packed.shape[0], start), slabs.layout.view(slot, name)[start:stop]
        return Decode(weights, slabs.packed.bytes_of(name), codec, self._store.decoded_dtype(name))


def copy_range(slabs: UnitSlabs, slot: torch.Tensor, elements: slice) -> Move:
    """Return the copy of a range of a slab of weights to the same range of a slot."""
    source = slabs.weights[elements]
    return Copy(slot[elements], source, source.numel() * source.element_size())


def spans_of_indices(sorted_indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the first of consecutive indices, and the one after the last of them."""
    indices = list(sorted_indices)
    ends = [place for place, (a, b) in enumerate(pairwise(indices), 1) if b != a + 1]
    for first, last in pairwise([0, *ends, len(indices)]):
        if last > first:
            yield indices[first], indices[last - 1] + 1
