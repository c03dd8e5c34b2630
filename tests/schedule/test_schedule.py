"""The checker accepts every schedule that we build, and detects every dropped wait."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from horizon_lm.common.units import EMBED, HEAD, OUTER, block
from horizon_lm.schedule import between, build
from horizon_lm.schedule.ops import After, Buf, Buffer, Kind, Op, Schedule, Stream
from horizon_lm.schedule.waits import ACROSS, ACROSS_WRITES
from tests.support.schedule_proofs import (
    check,
    each_wait,
    passes,
    passes_of,
    sequences,
    superfluous_waits,
    without_wait,
)
from tests.support.thinned_cases import thinned

# (blocks, offloaded, resident): none, one or all blocks of small models, and a few numbers for larger models.
PLACES = [(n, off, resident) for n in (1, 2, 3) for off in sorted({0, 1, n}) for resident in sorted({0, 1, n})]
PLACES += [(n, off, resident) for n in (4, 5) for off, resident in ((0, 0), (n, 0), (2, 2))]
LAYOUTS = [
    (build.Layout(n, tied, offloaded, resident, accumulate, in_backward), head_grads)
    for (n, offloaded, resident), tied, accumulate, in_backward, head_grads in itertools.product(
        PLACES, *[(False, True)] * 4
    )
]

# Several ranks, of which each has a part of the quantized weights of blocks.
QUANTIZED = [(replace(layout, sharded=True, packed=True), head_grads) for layout, head_grads in LAYOUTS[::5]]


def problems(layouts: Iterable[tuple[build.Layout, bool]]) -> Iterator[str]:
    for layout, head_grads in layouts:
        last = layout.num_blocks - 1
        trained = [(first, True) for first in sorted({0, last // 2, last})] + [(0, False)]
        for first_trained, outer in trained:
            for name, sequence in sequences(passes(layout, head_grads, first_trained, outer)).items():
                for problem in check(sequence):
                    yield f"{layout} {head_grads=} {first_trained=} {outer=}, {name}: {problem}"


@pytest.mark.parametrize(("num_blocks", "offloaded", "resident"), thinned(PLACES, every=7))
def test_every_legal_sequence_is_correct(num_blocks: int, offloaded: int, resident: int) -> None:
    layouts = [
        x for x in LAYOUTS if (x[0].num_blocks, x[0].offloaded, x[0].resident) == (num_blocks, offloaded, resident)
    ]
    assert len(layouts) == 16
    assert list(problems(layouts)) == []


@pytest.mark.parametrize(
    "trained",
    [*(pytest.param(trained, marks=pytest.mark.slow) for trained in ((OUTER,), (OUTER, HEAD))), (OUTER, EMBED)],
    ids=lambda units: "+".join(map(str, units)),
)
def test_every_legal_sequence_with_adapters_is_correct(trained: tuple[str, ...]) -> None:
    """Adapters are outer parameters whose gradients each block's backward writes; weights of blocks never change."""
    count = 0
    for layout, head_grads in LAYOUTS[::5]:
        layout = replace(layout, adapters=True)
        for first in {0, layout.num_blocks - 1}:
            if EMBED in trained and first:
                continue
            made = passes_of(layout, head_grads and HEAD in trained, range(first, layout.num_blocks), trained)
            count += 1
            assert [
                f"{layout}, {name}: {p}" for name, sequence in sequences(made).items() for p in check(sequence)
            ] == []
    assert count > 50


def test_adapters_gradients_wait_for_the_last_landing() -> None:
    """The first block of a backward pass may write them only after those of the pass before have landed."""
    layout = build.Layout(3, adapters=True)
    made = passes_of(layout, False, range(3), (OUTER,))
    naive = build.backward(replace(layout, adapters=False), order=map(block, range(3)), trainable=(OUTER,))
    writes = [(op.writes, naive_op.writes) for op, naive_op in zip(made.backward.ops, naive.ops, strict=True)]
    assert any(ours and not others for ours, others in writes)
    unordered = [replace(op, waits=others.waits) for op, others in zip(made.backward.ops, naive.ops, strict=True)]
    made = made._replace(backward=replace(made.backward, ops=tuple(unordered)))
    assert any("races with stream_out" in str(p) for sequence in sequences(made).values() for p in check(sequence))


_SOME = ((1, 0, 0), (1, 1, 1), (2, 1, 1))
# Tied or not, accumulating, updating in the backward pass, with gradients of the head: all modes, and those in which each two
# of the four have all of their values.
MODES = list(itertools.product((False, True), repeat=4))
PAIRWISE = [mode for mode in MODES if sum(mode) in (0, 3)]
Modes = list[tuple[bool, ...]]


def with_modes(some: Iterable[tuple[int, ...]], places: Iterable[tuple[int, ...]]) -> list[Any]:
    """Return some places with pairs of modes, and all of them with all modes, which are slow."""
    everything = [pytest.param(place, MODES, marks=pytest.mark.slow, id=f"{place} all") for place in places]
    return [pytest.param(place, PAIRWISE, id=f"{place}") for place in some] + everything


@pytest.mark.parametrize(("place", "modes"), with_modes(_SOME, [place for place in PLACES if place[0] <= 3]))
def test_each_wait_inside_a_pass_is_needed(place: tuple[int, int, int], modes: Modes) -> None:
    num_blocks, offloaded, resident = place
    caught = 0
    for tied, accumulate, in_backward, head_grads in modes:
        made = passes(build.Layout(num_blocks, tied, offloaded, resident, accumulate, in_backward), head_grads)
        assert superfluous_waits(made) == []
        caught += sum(isinstance(w, After) for p in made if p is not None for _, w in each_wait(p))
    print(f"dropped waits caught: {caught} of {caught}")


@pytest.mark.parametrize(("place", "modes"), with_modes(_SOME[2:], PLACES))
def test_collectives_are_ordered_and_their_waits_needed(place: tuple[int, int, int], modes: Modes) -> None:
    """Gathering fills a slot between its copy and its computation, and sums are ready before they are landed."""
    num_blocks, offloaded, resident = place
    caught = 0
    for tied, accumulate, in_backward, head_grads in modes:
        layout = build.Layout(num_blocks, tied, offloaded, resident, accumulate, in_backward, sharded=True)
        adapted = replace(layout, adapters=True)
        quantized = [] if head_grads else [(replace(adapted, packed=True), False)]
        assert list(problems([(layout, head_grads), (adapted, head_grads), *quantized])) == []
        made = passes(layout, head_grads)
        assert superfluous_waits(made) == [] or num_blocks > 3
        caught += sum(isinstance(w, After) for p in made if p is not None for _, w in each_wait(p))
        collectives = [(op.kind, op.unit) for op in made.first.ops if op.stream == Stream.COLLECTIVE]
        copies = [op.unit for op in made.first.ops if op.kind == Kind.STREAM_IN]
        assert collectives == [(Kind.GATHER, unit) for unit in copies]
        landings = [op.unit for op in made.backward.ops if op.kind == Kind.STREAM_OUT]
        assert [op.unit for op in made.backward.ops if op.kind == Kind.REDUCE] == landings
    print(f"dropped waits caught: {caught} of {caught}")


# Only an optimizer that is not applied in the backward pass orthogonalizes on the device.
ON_DEVICE = [(layout, head_grads) for layout, head_grads in LAYOUTS if not layout.update_in_backward]


def test_every_legal_sequence_with_orthogonalized_updates_is_correct() -> None:
    count = 0
    for layout, head_grads in ON_DEVICE[::3]:
        for first, sharded in itertools.product(sorted({0, layout.num_blocks - 1}), (False, True)):
            made = passes(replace(layout, sharded=sharded), head_grads, first, orthogonalized=True)
            assert made.update is not None
            assert sum(op.kind == Kind.ORTHOGONALIZE for op in made.update.ops) == layout.num_blocks - first
            for name, sequence in sequences(made).items():
                assert check(sequence) == [], f"{layout} {head_grads=} {first=} {sharded=}, {name}"
            count += 1
    assert count > 100


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("place", _SOME, ids=str)
def test_each_wait_of_an_orthogonalized_update_is_needed(place: tuple[int, int, int], sharded: bool) -> None:
    for tied, accumulate in itertools.product((False, True), repeat=2):
        layout = build.Layout(place[0], tied, place[1], place[2], accumulate, sharded=sharded)
        made = passes(layout, False, orthogonalized=True)
        assert made.update is not None
        found = superfluous_waits(made)
        assert [each for each in found if each[0] == "update"] == []


def forget_passes() -> None:
    """Clear cached passes, which were built by other rules."""
    for made in (build._forward, build._backward, between._update_pass, between._save_pass, between.save_table):
        made.cache_clear()


@pytest.mark.parametrize("rule", ACROSS, ids=lambda rule: f"{rule[0]} {rule[1].name}")
def test_each_rule_across_passes_is_needed(rule: tuple[Stream, Buf], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ACROSS, rule)
    forget_passes()
    in_tiles = [(replace(layout, tiles=(3,) * layout.num_blocks), head_grads) for layout, head_grads in LAYOUTS[::5]]
    layouts = {Buf.PACKED: QUANTIZED, Buf.TILE: in_tiles, Buf.TILE_GRADS: in_tiles}
    found = next(problems(layouts.get(rule[1], LAYOUTS)), None)
    forget_passes()
    assert found is not None
    assert "races with" in found


def test_updates_wait_for_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(ACROSS_WRITES, Buf.HOST_WEIGHTS)
    forget_passes()
    found = list(problems(LAYOUTS[:64]))
    forget_passes()
    assert all("races with save" in problem for problem in found)
    assert {problem.split("pass ")[1].split(", ")[1].split()[0] for problem in found} == {"update", "update_rows"}


def test_checker_verifies_contents_and_slot_counts() -> None:
    layout = build.Layout(3)
    forward = build.forward(layout, keeps=range(3))
    ops = list(forward.ops)
    first = next(i for i, op in enumerate(ops) if op.kind == Kind.STREAM_IN and op.unit == block(0))
    ops[first] = Op(Kind.STREAM_IN, block(2), Stream.COPY_IN, ops[first].reads, ops[first].writes, ops[first].waits)
    assert any("finds block2" in str(p) for p in check([Schedule("forward", tuple(ops), forward.keeps)]))

    third = Op(Kind.STREAM_IN, block(9), Stream.COPY_IN, (), (Buffer(Buf.WEIGHTS, 2),))
    assert any("at most 2" in str(p) for p in check([Schedule("forward", (*forward.ops, third), forward.keeps)]))


def test_wait_on_later_operation_is_reported() -> None:
    forward = build.forward(build.Layout(2), keeps=range(2))
    ops = tuple(reversed(forward.ops))
    assert any("issued after" in str(p) for p in check([Schedule("forward", ops)]))


def test_without_wait_removes_exactly_one() -> None:
    backward = passes(build.Layout(4), head_grads=False).backward
    waits = list(each_wait(backward))
    assert len(list(each_wait(without_wait(backward, *waits[0])))) == len(waits) - 1


def test_traffic_is_independent_of_accumulation_and_slots_of_depth() -> None:
    for num_blocks in (4, 64):
        layout = build.Layout(num_blocks, accumulates=True, offloaded=num_blocks)
        made = passes(layout, head_grads=False)
        f, b = made.again, made.backward
        loads = [op for op in (*f.ops, *b.ops) if op.kind == Kind.STREAM_IN and op.unit.index is not None]
        assert len(loads) == 2 * num_blocks
        stores = [op for op in b.ops if op.kind == Kind.STREAM_OUT and op.unit.index is not None]
        assert len(stores) == num_blocks
        device = {x for op in (*f.ops, *b.ops) for x in op.reads + op.writes if not x.kind.startswith("host")}
        assert len(device) == 2 + 2 + 1 + 1 + 2 + 2 + 2  # W, R, A, S; head, rows and outer, each with their gradients
