"""The checker accepts every schedule we build, and notices each single wait that is dropped."""

import itertools

import pytest

from horizon_lm.schedule import build
from horizon_lm.schedule.check import Passes, check, each_wait, sequences, superfluous_waits, without_wait
from horizon_lm.schedule.ops import EMBED, HEAD, OUTER, Buf, Buffer, Kind, Op, Pass, Stream, block

NUM_BLOCKS = (1, 2, 3, 4, 5)


def passes(layout: build.Layout, head_grads: bool, first_trained: int = 0) -> Passes:
    kept = range(first_trained, layout.num_blocks)
    trained = [*map(block, kept), HEAD] + ([EMBED, OUTER] if first_trained == 0 else [])
    updated = [u for u in (OUTER, *map(block, kept), HEAD) if u in trained and not (layout.tied and u == HEAD)]
    fresh = {"updated": updated, "table_update": EMBED in trained or layout.tied}
    return Passes(
        first=build.forward(layout, keeps=kept, **fresh, head_grads=head_grads),
        again=build.forward(layout, keeps=kept, updated=None, head_grads=head_grads),
        second=build.forward(layout, keeps=kept, updated=None),
        evaluating=build.forward(layout, **fresh),
        evaluation=build.forward(layout, updated=None),
        backward=build.backward(layout, blocks=kept, trainable=trained, head_grads=head_grads),
        recomputing=build.backward(layout, blocks=kept, trainable=trained),
        update=None if layout.update_in_backward else build.update(layout, updated),
    )


LAYOUTS = [
    pytest.param(
        build.Layout(n, tied, host, accumulate, in_backward),
        head_grads,
        id=f"{n} {tied=} {host=} {accumulate=} {in_backward=} {head_grads=}",
    )
    for n, tied, host, accumulate, in_backward, head_grads in itertools.product(NUM_BLOCKS, *[(False, True)] * 5)
]


@pytest.mark.parametrize(("layout", "head_grads"), LAYOUTS)
def test_every_legal_sequence_is_correct(layout: build.Layout, head_grads: bool) -> None:
    for first_trained in range(layout.num_blocks):
        for name, sequence in sequences(passes(layout, head_grads, first_trained)).items():
            assert check(sequence) == [], name


@pytest.mark.parametrize(("layout", "head_grads"), [p for p in LAYOUTS if p.values[0].num_blocks < 4])
def test_each_dropped_wait_is_caught(layout: build.Layout, head_grads: bool) -> None:
    made = passes(layout, head_grads)
    missed = superfluous_waits(made)
    total = sum(1 for schedule in made if schedule is not None for _ in each_wait(schedule))
    print(f"dropped waits caught: {total - len(missed)} of {total}")
    assert missed == []


def test_the_checker_reads_contents_and_bounds() -> None:
    layout = build.Layout(3)
    forward = build.forward(layout, keeps=range(3))
    ops = list(forward.ops)
    first = next(i for i, op in enumerate(ops) if op.kind == Kind.STREAM_IN and op.unit == block(0))
    ops[first] = Op(Kind.STREAM_IN, block(2), Stream.COPY_IN, ops[first].reads, ops[first].writes, ops[first].waits)
    assert any("finds block2" in str(p) for p in check([Pass("forward", tuple(ops), forward.keeps)]))

    third = Op(Kind.STREAM_IN, block(9), Stream.COPY_IN, (), (Buffer(Buf.WEIGHTS, 2),))
    assert any("at most 2" in str(p) for p in check([Pass("forward", (*forward.ops, third), forward.keeps)]))


def test_a_wait_on_a_later_operation_is_refused() -> None:
    forward = build.forward(build.Layout(2), keeps=range(2))
    ops = tuple(reversed(forward.ops))
    assert any("issued after" in str(p) for p in check([Pass("forward", ops)]))


def test_without_wait_removes_exactly_one() -> None:
    backward = passes(build.Layout(4), head_grads=False).backward
    waits = list(each_wait(backward))
    assert len(list(each_wait(without_wait(backward, *waits[0])))) == len(waits) - 1


def test_traffic_does_not_depend_on_accumulation_and_slots_not_on_depth() -> None:
    for num_blocks in (4, 64):
        layout = build.Layout(num_blocks, accumulate=True, host_boundaries=True)
        made = passes(layout, head_grads=False)
        f, b = made.again, made.backward
        loads = [op for op in (*f.ops, *b.ops) if op.kind == Kind.STREAM_IN and op.unit.startswith("block")]
        assert len(loads) == 2 * num_blocks
        stores = [op for op in b.ops if op.kind == Kind.STREAM_OUT and op.unit.startswith("block")]
        assert len(stores) == num_blocks
        device = {x for op in (*f.ops, *b.ops) for x in op.reads + op.writes if not x.kind.startswith("host")}
        assert len(device) == 2 + 2 + 1 + 1 + 2 + 2 + 2  # W, R, A, S; head, rows and outer with their gradients
