"""Ranks fill the slot of a part of a slab: each its own range of the slot, with what it owns of the slab."""

from itertools import pairwise
from typing import Any

import pytest
import torch

from horizon_lm.codecs.fp8 import Fp8
from horizon_lm.codecs.stack import Stack
from horizon_lm.device.cpu import HostLink
from horizon_lm.engine.host.slab_parts import SlabPart
from horizon_lm.slabs import Shard
from horizon_lm.store.unit_slabs import UnitSlabs

EXPERTS = 7
SHAPES = {
    "norm": (40,), "gate": (EXPERTS, 24), "experts.up": (EXPERTS, 8, 24), "experts.bias": (EXPERTS, 9), "shared": (24, 31),
    "experts.down": (EXPERTS, 24, 8),
}  # fmt: skip
PARTS: dict[str, Any] = {
    "whole": None,
    "core": frozenset({"norm", "gate", "shared"}),
    **{f"tile {start}": slice(start, min(EXPERTS, start + 3)) for start in range(0, EXPERTS, 3)},
}


def part_of(slabs: UnitSlabs, which: str) -> SlabPart:
    chosen = PARTS[which]
    if isinstance(chosen, slice):
        return SlabPart(slabs, frozenset(name for name in SHAPES if name.startswith("experts")), chosen)
    return SlabPart(slabs, chosen)


def parts(which: str, count: int, quantized: bool) -> list[SlabPart]:
    """Return a part as each rank sees it. Every element of the slabs has another value."""
    codecs = {name: Stack(Fp8((8, 8))) for name in ("experts.up", "experts.down")} if quantized else {}
    made = []
    for index in range(count):
        shapes = {name: torch.Size(shape) for name, shape in SHAPES.items()}
        slabs = UnitSlabs(shapes, codecs, Shard(index, count))
        slabs.weights = torch.arange(1.0, slabs.plain.numel + 1)
        slabs.packed.data = torch.arange(slabs.packed.num_bytes).remainder(251).to(torch.uint8)
        slabs.lay_out_grads(name for name in SHAPES if name not in codecs and name != "gate")
        slabs.grads = torch.zeros(slabs.grad_layout.numel)
        made.append(part_of(slabs, which))
    return made


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("which", PARTS)
def test_ranks_fill_their_ranges_of_a_slot(which: str, count: int, quantized: bool) -> None:
    ranks = parts(which, count, quantized)
    slot, packed = torch.zeros(ranks[0].slot_numel), torch.zeros(max(1, ranks[0].packed_cuts[-1]), dtype=torch.uint8)
    for index, part in enumerate(ranks):
        own, own_packed = torch.zeros_like(slot), torch.zeros_like(packed)
        for move in part.copies(own):
            move.run(HostLink())
        if count > 1:
            for move in part.copies_of_codes(own_packed):
                move.run(HostLink())
        for filled, gathered, cuts in ((own, slot, part.cuts), (own_packed, packed, part.packed_cuts)):
            inside = slice(cuts[index], cuts[index + 1])
            gathered[inside] = filled[inside]
            filled[inside] = 0
            assert not filled.any()  # nothing outside of the own range
    whole = ranks[0].slabs
    rows = PARTS[which] if isinstance(PARTS[which], slice) else slice(None)
    for name in ranks[0].layout:
        if name in whole.plain:
            assert torch.equal(ranks[0].layout.view(slot, name), whole.plain.view(whole.weights, name)[rows])
        elif count > 1:
            entry, codes = ranks[0].packed.entries[name], ranks[0].packed.bytes_of(name, packed)
            expected = entry.codec.views(whole.packed.bytes_of(name), whole.packed.entries[name].shape)
            for component, found in entry.codec.views(codes, entry.shape).items():
                assert torch.equal(found.view(torch.uint8), expected[component][rows].view(torch.uint8)), component


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_what_ranks_land_is_all_of_the_gradients(count: int) -> None:
    """Core and tiles together land every element once, each of them the rank that owns it."""
    landed: torch.Tensor | None = None
    for which in [name for name in PARTS if name != "whole"]:
        ranks = parts(which, count, quantized=False)
        adds = dict.fromkeys(ranks[0].grad_layout, False)
        for index, part in enumerate(ranks):
            landed = torch.zeros_like(part.slabs.grads) if landed is None else landed
            slot = torch.zeros(part.grad_layout.numel)
            for _, span in part.grad_spans(adds):
                slot[span.in_slot] += 1
                landed[span.in_slab] += 1
                own = part.slabs.own_grads
                assert own.start <= span.start
                assert span.in_slab.stop <= own.stop
            spans = list(pairwise(part.grad_cuts))
            outside = [slot[start:stop] for rank, (start, stop) in enumerate(spans) if rank != index]
            assert not any(each.any() for each in outside)
    assert landed is not None
    layout = ranks[0].slabs.grad_layout
    assert all(bool((layout.view(landed, name) == 1).all()) for name in layout)
    assert landed.max() == 1
