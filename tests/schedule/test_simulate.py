"""Simulated times compared with times computed by hand, and with rules for real schedules."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from horizon_lm.common.units import EMBED, HEAD, OUTER, Unit, block
from horizon_lm.schedule import between, build
from horizon_lm.schedule.ops import After, Buf, Buffer, Kind, LastUse, Op, Schedule, ScheduleError, Stream, Wait, uses
from horizon_lm.schedule.simulate import Cost, Rates, Timeline, simulate, step_seconds
from tests.support.thinned_cases import thinned

RATES = Rates(link_in=10.0, link_out=5.0, host=20.0)

FIRST = block(0)


def op(kind: Kind, stream: Stream, *waits: Wait, unit: Unit = FIRST) -> Op:
    return Op(kind, unit, stream, waits=waits)


def stream_in(*waits: Wait, unit: Unit = FIRST) -> Op:
    return op(Kind.STREAM_IN, Stream.COPY_IN, *waits, unit=unit)


def update(*waits: Wait, unit: Unit = FIRST) -> Op:
    return Op(Kind.UPDATE, unit, Stream.HOST, writes=(Buffer(Buf.HOST_WEIGHTS, unit),), waits=waits)


def times(timeline: Timeline) -> list[tuple[Any, Any]]:
    return [(pytest.approx(span.start), pytest.approx(span.end)) for spans in timeline.passes for span in spans]


def end(timeline: Timeline) -> float:
    """Return the end of the last operation."""
    return max((span.end for span in timeline.spans), default=0.0)


def priced(**costs: float) -> Cost:
    """Return costs by kind, or by kind and unit."""
    return lambda op: costs.get(f"{op.kind}_{op.unit}", costs.get(op.kind, 0.0))


# Computed by hand


def test_copy_then_compute() -> None:
    compute = op(Kind.FORWARD, Stream.COMPUTE, After(0))
    timeline = simulate([Schedule("forward", (stream_in(), compute))], priced(stream_in=40.0, forward=3.0), RATES)
    assert times(timeline) == [(0, 4), (4, 7)]  # 40 bytes at 10 per second, then 3 seconds
    assert end(timeline) == pytest.approx(7)
    assert [span.op.kind for span in timeline.spans] == [Kind.STREAM_IN, Kind.FORWARD]


def test_update_gets_bandwidth_left_by_copies() -> None:
    out = op(Kind.STREAM_OUT, Stream.COPY_OUT)
    timeline = simulate(
        [Schedule("forward", (stream_in(), out, update()))], priced(stream_in=20.0, stream_out=20.0, update=75.0), RATES
    )
    # Both copies until 2: 20 - 10 - 5 = 5 per second. One until 4: 15 per second. Then 20 per second for the last 35
    # bytes.
    assert times(timeline) == [(0, 2), (0, 4), (0, 5.75)]


def test_two_updates_share_bandwidth() -> None:
    rows = op(Kind.UPDATE_ROWS, Stream.COPY_IN, unit=EMBED)
    timeline = simulate([Schedule("forward", (rows, update()))], priced(update_rows=20.0, update=60.0), RATES)
    assert times(timeline) == [(0, 2), (0, 4)]  # 10 per second each, then 20; the link is not involved


def test_host_memory_bounds_links() -> None:
    rates = Rates(link_in=30.0, link_out=10.0, host=20.0)
    out = op(Kind.STREAM_OUT, Stream.COPY_OUT)
    timeline = simulate(
        [Schedule("forward", (stream_in(), out, update()))], priced(stream_in=15.0, stream_out=5.0, update=20.0), rates
    )
    assert times(timeline) == [(0, 1), (0, 1), (0, 2)]  # half their rates, and no bandwidth left for the update


def test_directions_share_a_link() -> None:
    out = op(Kind.STREAM_OUT, Stream.COPY_OUT)
    both = Schedule("forward", (stream_in(), out))
    cost = priced(stream_in=20.0, stream_out=20.0)
    rates = replace(RATES, link_both=12.0)  # instead of 15
    # 8 and 4 per second until 2.5; then the rest of the slower copy at 5 per second.
    assert times(simulate([both], cost, rates)) == [(0, 2.5), (0, 4.5)]
    assert times(simulate([Schedule("forward", (stream_in(),))], cost, rates)) == [(0, 2)]


def test_collectives_have_links_of_their_own_and_run_in_their_order() -> None:
    rates = replace(RATES, gather=8.0, reduce=2.0)
    gather, reduce = op(Kind.GATHER, Stream.COLLECTIVE), op(Kind.REDUCE, Stream.COLLECTIVE)
    timeline = simulate(
        [Schedule("forward", (stream_in(), gather, reduce))], priced(stream_in=40.0, gather=40.0, reduce=40.0), rates
    )
    assert times(timeline) == [(0, 4), (0, 5), (5, 25)]


def test_collectives_through_host_cross_both_directions_of_a_link() -> None:
    rates = replace(RATES, through_host=True)
    gather, out = op(Kind.GATHER, Stream.COLLECTIVE), op(Kind.STREAM_OUT, Stream.COPY_OUT, After(0))
    gathered = simulate([alone(gather)], priced(gather=40.0), rates)
    assert times(gathered) == [(0, 8)]  # as fast as the slower direction: 5 per second
    copied = simulate([Schedule("forward", (stream_in(), gather))], priced(stream_in=25.0, gather=40.0), rates)
    assert times(copied) == [(0, 5), (0, 8)]  # in and gather have 5 per second each, so the gather is not slower
    sent = simulate([Schedule("forward", (gather, out))], priced(gather=40.0, stream_out=5.0), rates)
    assert times(sent) == [(0, 8), (8, 9)]
    less = simulate([Schedule("forward", (gather, update()))], priced(gather=40.0, update=80.0), rates)
    assert times(less) == [(0, 8), (0, 8)]  # the update has what the gather leaves, which writes and reads host memory


def test_inline_copies_run_one_after_the_other() -> None:
    ops = (stream_in(), op(Kind.FORWARD, Stream.COMPUTE, After(0)), stream_in(unit=block(1)), update())
    cost = priced(stream_in=20.0, forward=3.0, update=100.0)
    timeline = simulate([Schedule("forward", ops)], cost, replace(RATES, inline=True))
    # The second copy queues behind the computation. Copies leave 10 per second for the update, computations 20.
    assert times(timeline) == [(0, 2), (2, 5), (5, 7), (0, 7)]


def test_updates_and_compute_slow_each_other() -> None:
    ops = (op(Kind.FORWARD, Stream.COMPUTE), update())
    rates = replace(RATES, compute_share=0.5, update_share=0.25)
    # At half its speed while the update has 5 per second, until 8; then the rest at full speed.
    assert times(simulate([Schedule("forward", ops)], priced(forward=5.0, update=40.0), rates)) == [(0, 9), (0, 8)]
    assert times(simulate([Schedule("forward", ops)], priced(forward=1.0, update=40.0), rates)) == [(0, 2), (0, 3.5)]


def test_stream_runs_in_list_order() -> None:
    ops = (update(unit=block(0)), stream_in(After(0), unit=block(0)), stream_in(unit=block(1)))
    timeline = simulate([Schedule("forward", ops)], priced(update=100.0, stream_in=10.0), RATES)
    assert times(timeline) == [(0, 5), (5, 6), (6, 7)]  # block1 could start immediately, but queues behind block0


def test_wait_across_passes() -> None:
    cost = priced(update_block0=40.0, update_block1=60.0, stream_in=10.0)
    updates = Schedule("update", (update(unit=block(0)), update(unit=block(1))))

    def forward(*waits: Wait) -> Schedule:
        return Schedule("forward", (stream_in(*waits),))

    precise = forward(LastUse(Buffer(Buf.HOST_WEIGHTS, block(0)), Stream.HOST))
    assert times(simulate([updates, precise], cost, RATES)) == [(0, 2), (2, 5.5), (2, 3)]
    assert times(simulate([updates, forward()], cost, RATES))[2] == (0, 1)
    assert times(simulate([precise, updates], cost, RATES))[0] == (0, 1)  # waits refer to earlier passes only


def test_free_operations_take_no_time() -> None:
    ops = (stream_in(), op(Kind.FORWARD, Stream.COMPUTE, After(0)), update(After(1)))
    assert times(simulate([Schedule("forward", ops)], lambda op: 0.0, RATES)) == [(0, 0)] * 3
    assert end(simulate([], lambda op: 0.0, RATES)) == 0


@pytest.mark.parametrize(
    "ops",
    [
        (stream_in(After(1)), op(Kind.FORWARD, Stream.COMPUTE, After(0))),
        (stream_in(After(1)), stream_in()),  # queued behind the operation that it waits for
        (stream_in(After(7)),),
    ],
    ids=["each other", "own stream", "nothing"],
)
def test_deadlock_is_an_error(ops: tuple[Op, ...]) -> None:
    with pytest.raises(ScheduleError, match=r"deadlock.*stream_in block0 on copy_in"):
        simulate([Schedule("forward", ops)], lambda op: 1.0, RATES)


# Rules on real schedules


def training_step(layout: build.Layout, head_grads: bool = True) -> list[Schedule]:
    kept = range(layout.num_blocks)
    blocks = [block(u) for u in kept]
    updated = [OUTER, *blocks, *([] if layout.tied else [HEAD])]
    trainable = [EMBED, *blocks, HEAD, OUTER]
    return [
        build.forward(layout, keeps=kept, table_update=True, head_grads=head_grads),
        build.backward(layout, order=[EMBED, *map(block, kept)], trainable=trainable, head_grads=head_grads),
        *([] if layout.update_in_backward else [between.update(layout, updated)]),
    ]


LAYOUTS = [build.Layout(4, *flags) for flags in itertools.product((False, True), repeat=4)]


def all_ops(sequence: list[Schedule]) -> list[Op]:
    return [op for schedule in sequence for op in schedule.ops]


def alone(op: Op) -> Schedule:
    return Schedule("alone", (replace(op, waits=()),))


def random_cost(seed: int) -> Cost:
    """Return random costs of copies, computations and updates, some of them zero."""
    chance = random.Random(seed)
    costs: dict[str, float] = {}
    scales = {kind: 10 ** chance.uniform(-1, 1) for kind in Kind}

    def cost(op: Op) -> float:
        return costs.setdefault(str(op), chance.choice([0.0, 1.0, 1.0]) * chance.random() * scales[op.kind])

    return cost


def broken_rules(sequence: list[Schedule], timeline: Timeline) -> list[str]:
    """Return violations: overlapping or reordered operations of a stream, broken waits, races."""
    broken = []
    spans = [span for schedule in timeline.passes for span in schedule]
    assert [span.op for span in spans] == all_ops(sequence)
    for stream in Stream:
        own = [span for span in spans if span.op.stream == stream]
        broken += [f"order: {a.op}, {b.op}" for a, b in itertools.pairwise(own) if b.start < a.end]
    for number, schedule in enumerate(sequence):
        earlier = [span for others in timeline.passes[:number] for span in others]
        for span in timeline.passes[number]:
            for wait in span.op.waits:
                if isinstance(wait, After):
                    before = [timeline.passes[number][wait.index]]
                else:
                    before = [other for other in earlier if wait in uses(other.op)]  # all waits, not only the last one
                broken += [f"wait: {span.op} of {schedule.name}, {wait}" for b in before if span.start < b.end]
    for a, b in itertools.combinations(spans, 2):
        shared = (set(a.op.writes) & {*b.op.reads, *b.op.writes}) | (set(b.op.writes) & set(a.op.reads))
        # Boundaries of different steps are in different memory.
        if any(x.kind != Buf.HOST_BOUNDARY for x in shared) and max(a.start, b.start) < min(a.end, b.end):
            broken.append(f"race: {a.op}, {b.op}")
    return broken


def test_step_seconds_in_steady_state() -> None:
    passes = training_step(build.Layout(4))
    cost = random_cost(0)
    a, b = (step_seconds(passes, cost, RATES, num_steps) for num_steps in (4, 9))
    assert a == pytest.approx(b)


@pytest.mark.parametrize("layout", thinned(LAYOUTS), ids=str)
def test_real_schedules_keep_every_wait(layout: build.Layout) -> None:
    sequence = training_step(layout) * 3
    for seed in range(5):
        cost = random_cost(seed)
        timeline = simulate(sequence, cost, RATES)
        assert broken_rules(sequence, timeline) == []
        # Some operation always runs at full speed, so a timeline is never longer than sequential execution.
        assert end(timeline) <= sum(end(simulate([alone(op)], cost, RATES)) for op in all_ops(sequence)) * 1.0001
        assert simulate(sequence, cost, RATES) == timeline


def test_rules_detect_missing_waits() -> None:
    sequence = training_step(build.Layout(4)) * 3
    bare = [replace(p, ops=tuple(replace(op, waits=()) for op in p.ops)) for p in sequence]
    timeline = simulate(bare, random_cost(0), RATES)
    as_asked = Timeline(
        tuple(
            tuple(replace(span, op=op) for span, op in zip(spans, schedule.ops, strict=True))
            for spans, schedule in zip(timeline.passes, sequence, strict=True)
        )
    )
    found = broken_rules(sequence, as_asked)
    assert {text.partition(":")[0] for text in found} == {"wait", "race"}
