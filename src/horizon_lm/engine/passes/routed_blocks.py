"""Blocks that are streamed in two parts where few tokens are computed: all but the experts, and those experts that tokens are
routed to.

One token of a model with 128 experts reads 8 of them in each block. If all of them were streamed, answering a prompt would
take sixteen times as long.

Shapes: E experts.
"""

from collections.abc import Collection, Iterable, Iterator
from itertools import pairwise

import torch

from horizon_lm.codecs.rows import Rows
from horizon_lm.device.transfers import Copy, Decode, Move
from horizon_lm.engine.passes.device_buffers import DeviceBuffers
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.routed_experts import find_experts
from horizon_lm.store.store import Store
from horizon_lm.store.unit_slabs import SlabLayout, UnitSlabs
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

    def other_moves(self, unit: Unit, memory: DeviceBuffers) -> list[Move]:
        """Return the moves that stream a block without its experts."""
        moves: list[Move] = []
        for part, slabs in self._slabs(unit):
            slot, names = memory.weights_of(part), self._names(unit)
            moves += [_copy(slabs, slot, start, stop) for start, stop in _ranges_without(slabs.plain, names)]
            moves += [
                Decode(
                    slabs.layout.view(slot, name), slabs.packed.bytes_of(name), entry.codec, self._store.decoded_dtype(name)
                )
                for name, entry in slabs.packed.entries.items()
                if name not in names
            ]  # fmt: skip
        return moves

    def expert_moves(self, unit: Unit, memory: DeviceBuffers, chosen: Iterable[int]) -> list[Move]:
        """Return the moves that stream some experts of a block, which are sorted."""
        spans, names = list(_spans(chosen)), self._names(unit)
        return [
            self._move(slabs, memory, part, name, start, stop)
            for part, slabs in self._slabs(unit)
            for name in names
            if name in slabs.layout
            for start, stop in spans
        ]

    def _move(self, slabs: UnitSlabs, memory: DeviceBuffers, part: Unit, name: str, start: int, stop: int) -> Move:
        """Return the move that streams a weight (E, ...) of the experts from ``start`` to ``stop``."""
        slot, entry = memory.weights_of(part), slabs.layout.entries[name]
        if name not in slabs.packed:
            return _copy(slabs, slot, entry.offset + start * entry.strides[0], entry.offset + stop * entry.strides[0])
        packed = slabs.packed.entries[name]
        codec = Rows(packed.codec, packed.shape[0], start)
        weights = slabs.layout.view(slot, name)[start:stop]
        return Decode(weights, slabs.packed.bytes_of(name), codec, self._store.decoded_dtype(name))

    def _slabs(self, unit: Unit) -> list[tuple[Unit, UnitSlabs]]:
        return [(part, self._store.units[part]) for part in self._store.parts_of(unit)]

    def _names(self, unit: Unit) -> list[str]:
        """Return the full names of the experts' weights."""
        return [f"{self._prefix}.{unit.block_index}.{name}" for name in self.experts[unit.block_index].names]


def _copy(slabs: UnitSlabs, slot: torch.Tensor, start: int, stop: int) -> Move:
    """Return the copy of a range of a slab of weights to the same range of a slot."""
    source = slabs.weights[start:stop]
    return Copy(slot[start:stop], source, source.numel() * source.element_size())


def _ranges_without(layout: SlabLayout, names: Collection[str]) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a slab between the tensors of these names."""
    starts = [entry.offset for entry in layout.entries.values()]
    begin = 0
    for name, (start, stop) in zip(layout, pairwise([*starts, layout.numel]), strict=True):
        if name in names:
            if start > begin:
                yield begin, start
            begin = stop
    if layout.numel > begin:
        yield begin, layout.numel


def _spans(sorted_indices: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Yield the spans of consecutive indices."""
    indices = list(sorted_indices)
    ends = [place for place, (a, b) in enumerate(pairwise(indices), 1) if b != a + 1]
    for first, last in pairwise([0, *ends, len(indices)]):
        if last > first:
            yield indices[first], indices[last - 1] + 1
