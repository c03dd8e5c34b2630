"""Schedules of blocks whose experts are moved in tiles are correct, and none of their waits can be dropped."""

import itertools
from dataclasses import replace
from typing import Any

import pytest

from horizon_lm.common.units import HEAD, OUTER, Unit, block, tile
from horizon_lm.schedule import build
from horizon_lm.schedule.ops import After, Buf, Kind, Schedule, Stream
from tests.support.schedule_proofs import (
    check,
    each_wait,
    is_wrong,
    passes,
    passes_of,
    sequences,
    superfluous_waits,
    without_wait,
)
from tests.support.thinned_cases import thinned

COUNTS = [(3,), (1, 1, 1), (0, 2, 5), (2, 0, 3), (1, 4), (3, 3, 3, 3)]
RANKS: dict[str, dict[str, Any]] = {"one rank": {}, "several ranks": {"sharded": True}}
MODES = [mode for mode in itertools.product((False, True), repeat=4) if sum(mode) in (0, 3)]  # as in `test_schedule`


def layouts(tiles: tuple[int, ...], **ranks: Any) -> list[tuple[build.Layout, bool]]:
    n = len(tiles)
    places = itertools.product(sorted({0, 1, n}), sorted({0, 1}))
    return [
        (build.Layout(n, tied, offloaded, resident, accumulate, in_backward, tiles=tiles, **ranks), head_grads)
        for (offloaded, resident), (tied, accumulate, in_backward, head_grads) in itertools.product(places, MODES)
    ]


@pytest.mark.parametrize(
    ("tiles", "ranks"), thinned(itertools.product(COUNTS, RANKS), every=7, keep=[((0, 2, 5), "several ranks")])
)
def test_every_legal_sequence_is_correct(tiles: tuple[int, ...], ranks: str) -> None:
    for layout, head_grads in layouts(tiles, **RANKS[ranks]):
        for first in (0, len(tiles) - 1):
            for name, sequence in sequences(passes(layout, head_grads, first)).items():
                assert check(sequence) == [], f"{layout}, {name}"


@pytest.mark.parametrize(
    ("tiles", "ranks"),
    thinned(itertools.product(COUNTS, [*RANKS.values(), {"sharded": True, "packed": True}]), every=4),
    ids=str,
)
def test_with_adapters(tiles: tuple[int, ...], ranks: dict[str, Any]) -> None:
    """Several ranks gather codes and scales of a quantized base in slots of their own."""
    for layout, head_grads in layouts(tiles, **ranks)[::3]:
        made = passes_of(replace(layout, adapters=True), head_grads, range(len(tiles)), (OUTER, HEAD))
        assert not [op for op in made.backward.ops if op.unit.is_tile and op.kind == Kind.STREAM_OUT]
        for name, sequence in sequences(made).items():
            assert check(sequence) == [], f"{layout}, {name}"


@pytest.mark.parametrize(
    ("tiles", "ranks"), thinned(itertools.product([(3,), (0, 2, 5), (1, 4)], RANKS), every=3), ids=str
)
def test_each_wait_is_needed(tiles: tuple[int, ...], ranks: str) -> None:
    for layout, head_grads in layouts(tiles, **RANKS[ranks])[::5]:
        assert superfluous_waits(passes(layout, head_grads)) == []


def test_each_wait_is_needed_with_codes_of_several_ranks() -> None:
    layout = build.Layout(2, adapters=True, sharded=True, packed=True, tiles=(2, 3))
    assert superfluous_waits(passes_of(layout, False, range(2), (OUTER,))) == []


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("kind", [Buf.TILE, Buf.TILE_GRADS])
def test_a_dropped_wait_for_a_slot_is_found(kind: Buf, ranks: str) -> None:
    """Both kinds of slots are freed by an operation on another stream: the control drops the wait for it."""
    made = passes(build.Layout(2, tiles=(3, 3), **RANKS[ranks]), head_grads=False)
    found = [
        (position, wait)
        for position, wait in each_wait(made.backward)
        if isinstance(wait, After)
        and any(buffer.kind == kind for buffer in made.backward.ops[position].writes)
        and any(buffer.kind == kind for buffer in made.backward.ops[wait.index].reads)
    ]
    assert found
    for position, wait in found:
        broken = without_wait(made.backward, position, wait)
        assert is_wrong(made._replace(backward=broken), broken)


@pytest.mark.parametrize("collective", [Kind.GATHER, Kind.REDUCE])
def test_a_dropped_wait_of_a_collective_is_found(collective: Kind) -> None:
    """A tile is gathered when its copy has ended and before it is computed; its gradients are summed between computation and landing."""
    made = passes(build.Layout(2, tiles=(3, 3), sharded=True), head_grads=False)
    found = [
        (position, wait)
        for position, wait in each_wait(made.backward)
        if isinstance(wait, After)
        and made.backward.ops[position].unit.is_tile
        and collective in (made.backward.ops[position].kind, made.backward.ops[wait.index].kind)
    ]
    assert len(found) >= 12
    for position, wait in found:
        broken = without_wait(made.backward, position, wait)
        assert is_wrong(made._replace(backward=broken), broken)


def order(schedule: Schedule, *kinds: Kind) -> list[Unit]:
    return [op.unit for op in schedule.ops if op.kind in kinds and op.unit.is_tile]


def test_order_of_tiles() -> None:
    """Tiles are visited forwards and then backwards, each copied once in a pass, and landed as soon as it is differentiated."""
    made = passes(build.Layout(2, tiles=(2, 3)), head_grads=False)
    forwards = [tile(0, 0), tile(0, 1), tile(1, 0), tile(1, 1), tile(1, 2)]
    assert order(made.first, Kind.FORWARD) == order(made.first, Kind.STREAM_IN) == forwards
    backwards = forwards[::-1]
    for kind in (Kind.STREAM_IN, Kind.BACKWARD, Kind.STREAM_OUT):
        assert order(made.backward, kind) == backwards


def test_ranks_gather_each_tile_that_is_copied_and_sum_what_lands() -> None:
    made = passes(build.Layout(2, tiles=(2, 3), sharded=True), head_grads=False)
    for schedule in (made.first, made.backward):
        assert order(schedule, Kind.GATHER) == order(schedule, Kind.STREAM_IN)
        assert order(schedule, Kind.REDUCE) == order(schedule, Kind.STREAM_OUT)
        collectives = [op for op in schedule.ops if op.kind in (Kind.GATHER, Kind.REDUCE)]
        assert {op.stream for op in collectives} == {Stream.COLLECTIVE}


def test_tiles_of_a_routed_block_follow_its_routing() -> None:
    forward = build.forward(build.Layout(3, tiles=(2, 3, 2)), routed=(0, 1))
    places = forward.positions
    for unit in order(forward, Kind.STREAM_IN):
        assert (places[Kind.STREAM_IN, unit] > places[Kind.ROUTE, block(unit.block_index)]) == (unit.block_index < 2)


def test_experts_of_a_routed_block_without_tiles_are_one_in_its_slot() -> None:
    layout = build.Layout(2)
    assert not order(build.forward(layout), Kind.STREAM_IN)
    forward = build.forward(layout, routed=(0, 1))
    assert order(forward, Kind.STREAM_IN) == order(forward, Kind.FORWARD) == [tile(0, 0), tile(1, 0)]
    places = forward.positions
    for index, following in enumerate(
        (block(1), HEAD)
    ):  # what follows is prefetched before the host waits for the routing
        routing, copy = places[Kind.ROUTE, block(index)], places[Kind.STREAM_IN, tile(index, 0)]
        assert places[Kind.STREAM_IN, following] < routing < copy
        assert forward.ops[copy].writes == (layout.weights(index),)
        assert After(routing) in forward.ops[copy].waits


def test_a_tile_is_copied_while_the_tile_before_computes() -> None:
    forward = build.forward(build.Layout(2, tiles=(4, 4)))
    places = forward.positions
    for before, unit in itertools.pairwise(order(forward, Kind.FORWARD)):
        assert places[Kind.STREAM_IN, unit] < places[Kind.FORWARD, before]
    assert places[Kind.STREAM_IN, block(1)] < places[Kind.FORWARD, tile(0, 3)]
