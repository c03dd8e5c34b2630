"""Passes that compute different lists of blocks follow each other without a race: batches with images and without."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from horizon_lm.common.units import EMBED, HEAD, OUTER, Unit, block
from horizon_lm.schedule import between, build
from horizon_lm.schedule.ops import Kind, Schedule, Stream
from tests.support.schedule_proofs import check

DECODER = [block(index) for index in (5, 6, 7)]
TOWER, OTHER = [block(index) for index in (0, 1, 2)], [block(index) for index in (3, 4)]
ORDERS = {
    "text": [EMBED, *DECODER],
    "images after the embedding": [EMBED, *TOWER, *DECODER],
    "images first": [*TOWER, EMBED, *DECODER],
    "two towers": [EMBED, *OTHER, *TOWER, *DECODER],
    "embeddings of the caller": [*OTHER, *DECODER],
}
LAYOUTS = [
    build.Layout(8, tied, offloaded, resident, accumulates, in_backward, adapters, sharded)
    for (offloaded, resident), tied, accumulates, in_backward, adapters, sharded in itertools.product(
        ((0, 0), (8, 0), (6, 2), (8, 8), (0, 4)), *[(False, True)] * 5
    )
]


def steps(layout: build.Layout, order: Sequence[Unit], unused: Sequence[Unit] = ()) -> dict[str, list[Schedule]]:
    """Return the passes of a step whose batch computes these units, of which some get no gradient."""
    blocks = [unit for unit in order if unit != EMBED]
    trained = [OUTER] if layout.adapters else [EMBED, *map(block, range(8)), HEAD, OUTER]
    table_update = EMBED in trained or (layout.tied and HEAD in trained)
    fresh = {"order": order, "keeps": [unit.block_index for unit in blocks], "head_grads": HEAD in trained}
    first = build.forward(layout, **fresh, table_update=table_update)
    again = build.forward(layout, **fresh, changed=False)
    differentiated = [unit for unit in order if unit not in unused]
    backward = build.backward(layout, order=differentiated, trainable=trained, head_grads=HEAD in trained)
    updated = [
        unit for unit in (OUTER, *map(block, range(8)), HEAD) if unit in trained and (unit, layout.tied) != (HEAD, True)
    ]
    end = [] if layout.update_in_backward else [between.update(layout, updated)]
    evaluation = build.forward(layout, order=order, changed=False)
    return {
        "step": [first, backward, *end],
        "evaluated": [first, evaluation, backward, *end],
        "accumulated": [first, backward, again, backward, *end] if end else [first, backward],
        "begun": [first, backward],
        "ended": [again, backward, *end] if end else [first, backward],
    }


def alternations(layout: build.Layout) -> Iterator[tuple[str, list[Schedule]]]:
    """Yield sequences of passes in which batches of two kinds follow each other."""
    for (one, first), (other, second) in itertools.permutations(ORDERS.items(), 2):
        a, b = steps(layout, first), steps(layout, second, unused=[TOWER[-1]])
        for kind in ("step", "evaluated", "accumulated"):
            yield f"{one}, {other}: {kind}", [*a[kind], *b[kind]] * 2
        yield f"{one}, {other}: within a step", [*a["begun"], *b["ended"]] * 2


@pytest.mark.parametrize("layout", LAYOUTS[::7])
def test_batches_of_different_kinds_follow_each_other_without_a_race(layout: build.Layout) -> None:
    assert [f"{name}: {problem}" for name, passes in alternations(layout) for problem in check(passes)] == []


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_they_do_so_in_every_layout(layout: build.Layout) -> None:
    assert [f"{name}: {problem}" for name, passes in alternations(layout) for problem in check(passes)] == []


def test_a_block_with_the_slot_of_the_block_before_it_is_not_prefetched() -> None:
    forward = build.forward(build.Layout(8), order=[EMBED, *TOWER[:2], *OTHER, *DECODER])
    copied = {op.unit: number for number, op in enumerate(forward.ops) if op.kind == Kind.STREAM_IN}
    computed = {op.unit: number for number, op in enumerate(forward.ops) if op.stream == Stream.COMPUTE}
    assert copied[OTHER[0]] > computed[TOWER[1]]  # 3 after 1
    assert copied[DECODER[0]] < computed[OTHER[1]]  # 5 after 4
    # The same pass with the copy one computation earlier overwrites weights that are still read.
    ops = list(forward.ops)
    ops.insert(computed[TOWER[1]], ops.pop(copied[OTHER[0]]))
    wrong = replace(forward, ops=build.derive_waits([replace(op, waits=()) for op in ops]))
    assert any("finds block3" in str(problem) for problem in check([wrong]))


def test_a_backward_pass_visits_units_in_the_reverse_order() -> None:
    order = [*TOWER, EMBED, *DECODER]
    backward = build.backward(build.Layout(8), order=order, trainable=[EMBED, OUTER, HEAD, *TOWER, *DECODER])
    computed = [op.unit for op in backward.ops if op.stream == Stream.COMPUTE]
    assert computed == [HEAD, *reversed(order), OUTER]
