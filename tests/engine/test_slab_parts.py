"""Ranks fill the slot of a part of a slab: each its own range of the slot, with what it owns of the slab."""

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch

from horizon_lm.common.units import block
from horizon_lm.device.cpu import HostLink
from horizon_lm.engine.host.slab_parts import SlabPart
from horizon_lm.memory.codecs.fp8 import Fp8
from horizon_lm.memory.codecs.stack import Stack
from horizon_lm.memory.layout.ranks import Shard
from horizon_lm.memory.precision import PRECISIONS
from horizon_lm.memory.unit_slabs import Slab, UnitSlabs

EXPERTS = 7
SHAPES = {
    "norm": (40,), "gate": (EXPERTS, 24), "experts.up": (EXPERTS, 8, 24), "experts.bias": (EXPERTS, 9), "shared": (24, 31),
    "experts.down": (EXPERTS, 24, 8), "decay": (300,),
}  # fmt: skip
IN_FLOAT32 = ("decay",)
PARTS: dict[str, Any] = {
    "whole": None,
    "core": frozenset({"norm", "gate", "shared", "decay"}),
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
        slabs = UnitSlabs(
            partial(Slab, PRECISIONS["float32"]), block(0), shapes, codecs, IN_FLOAT32, Shard(index, count)
        )
        slabs.packed.weights = torch.arange(slabs.packed.layout.numel).remainder(251).to(torch.uint8)
        slabs.lay_out_grads(name for name in SHAPES if name not in codecs and name != "gate")
        for slab in slabs.of_weights:
            slab.weights = torch.arange(1.0, slab.layout.numel + 1)
            slab.grads = torch.zeros(slab.grad_layout.numel)
        made.append(part_of(slabs, which))
    return made


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("which", PARTS)
def test_ranks_fill_their_ranges_of_a_slot(which: str, count: int, quantized: bool) -> None:
    ranks = parts(which, count, quantized)
    slot = [torch.zeros(numel) for numel in ranks[0].slot_numels]
    packed = torch.zeros(max(1, ranks[0].packed_cuts[-1]), dtype=torch.uint8)
    for index, part in enumerate(ranks):
        own, own_packed = [torch.zeros_like(buffer) for buffer in slot], torch.zeros_like(packed)
        for move in part.copies(own):
            move.run(HostLink())
        if count > 1:
            for move in part.copies_of_codes(own_packed):
                move.run(HostLink())
        for filled, gathered, cuts in (*zip(own, slot, part.cuts, strict=True), (own_packed, packed, part.packed_cuts)):
            inside = slice(cuts[index], cuts[index + 1])
            gathered[inside] = filled[inside]
            filled[inside] = 0
            assert not filled.any()  # nothing outside of the own range
    whole = ranks[0].slabs
    rows = PARTS[which] if isinstance(PARTS[which], slice) else slice(None)
    for name in ranks[0].layout:
        slab = next(each for each in whole.all if name in each.layout)
        stored = slab.layout.view(slab.weights, name)
        if name not in whole.codecs:
            assert torch.equal(ranks[0].layout.view(slot, name), stored[rows])
        elif count > 1:
            codec, codes = whole.codecs[name], ranks[0].packed.view(packed, name)
            expected = codec.views(stored, whole.layout.entry(name).shape)
            for component, found in codec.views(codes, ranks[0].layout.entry(name).shape).items():
                assert torch.equal(found.view(torch.uint8), expected[component][rows].view(torch.uint8)), component


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_what_ranks_land_is_all_of_the_gradients(count: int) -> None:
    """Core and tiles together land every element once, each of them the rank that owns it."""
    landed: list[torch.Tensor] = []
    for which in [name for name in PARTS if name != "whole"]:
        ranks = parts(which, count, quantized=False)
        adds = dict.fromkeys(ranks[0].grad_layout, False)
        for index, part in enumerate(ranks):
            landed = landed or [torch.zeros_like(slab.grads) for slab in part.slabs.of_weights]
            for number, slab in enumerate(part.slabs.of_weights):
                slot = torch.zeros(part.grad_layout.buffers[number].numel)
                for _, span in part.grad_spans(number, adds):
                    slot[span.in_slot] += 1
                    landed[number][span.in_slab] += 1
                    assert slab.own_grads.start <= span.start
                    assert span.in_slab.stop <= slab.own_grads.stop
                spans = list(pairwise(part.grad_cuts[number]))
                outside = [slot[start:stop] for rank, (start, stop) in enumerate(spans) if rank != index]
                assert not any(each.any() for each in outside)
    layout = ranks[0].slabs.grad_layout
    assert "decay" in layout
    assert all(bool((layout.view(landed, name) == 1).all()) for name in layout)
    assert max(float(each.max()) for each in landed) == 1
