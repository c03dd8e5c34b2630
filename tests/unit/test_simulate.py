"""The simulator against times known by hand, against its own rules on real schedules, and against the threshold formula."""

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest

from horizon_lm.plan.hardware import (
    H200_SERVER,
    QWEN25_7B,
    RTX_4090_DESKTOP,
    UPDATE_BYTES,
    Hardware,
    Step,
    hiding_tokens,
)
from horizon_lm.schedule import build
from horizon_lm.schedule.check import uses
from horizon_lm.schedule.ops import (
    EMBED,
    HEAD,
    OUTER,
    UPDATES,
    After,
    Buf,
    Buffer,
    Kind,
    LastUse,
    Op,
    Pass,
    ScheduleError,
    Stream,
    Wait,
    block,
)
from horizon_lm.schedule.simulate import Cost, Rates, Timeline, simulate, step_seconds, without_updates

RATES = Rates(link_in=10.0, link_out=5.0, host=20.0)
FOUR_BLOCKS = replace(QWEN25_7B, num_blocks=4)


def op(kind: Kind, stream: Stream, *waits: Wait, unit: str = "block0") -> Op:
    return Op(kind, unit, stream, waits=waits)


def stream_in(*waits: Wait, unit: str = "block0") -> Op:
    return op(Kind.STREAM_IN, Stream.COPY_IN, *waits, unit=unit)


def update(*waits: Wait, unit: str = "block0") -> Op:
    return Op(Kind.UPDATE, unit, Stream.HOST, writes=(Buffer(Buf.HOST_WEIGHTS, unit),), waits=waits)


def times(timeline: Timeline) -> list[tuple[Any, Any]]:
    return [(pytest.approx(span.start), pytest.approx(span.end)) for spans in timeline.passes for span in spans]


def priced(**costs: float) -> Cost:
    """Costs by kind, or by kind and unit."""
    return lambda op: costs.get(f"{op.kind}_{op.unit}", costs.get(op.kind, 0.0))


# By hand


def test_a_copy_then_a_computation() -> None:
    compute = op(Kind.FORWARD, Stream.COMPUTE, After(0))
    timeline = simulate([Pass("forward", (stream_in(), compute))], priced(stream_in=40.0, forward=3.0), RATES)
    assert times(timeline) == [(0, 4), (4, 7)]  # 40 bytes at 10 a second, then 3 seconds
    assert timeline.makespan == pytest.approx(7)
    assert [span.op.kind for span in timeline.spans] == [Kind.STREAM_IN, Kind.FORWARD]


def test_an_update_takes_what_the_copies_leave() -> None:
    out = op(Kind.STREAM_OUT, Stream.COPY_OUT)
    timeline = simulate(
        [Pass("forward", (stream_in(), out, update()))], priced(stream_in=20.0, stream_out=20.0, update=75.0), RATES
    )
    # Both copies until 2: 20 - 10 - 5 = 5 a second. One until 4: 15 a second. Then 20 a second for the last 35 bytes.
    assert times(timeline) == [(0, 2), (0, 4), (0, 5.75)]


def test_two_updates_share() -> None:
    rows = op(Kind.UPDATE_ROWS, Stream.COPY_IN, unit=EMBED)
    timeline = simulate([Pass("forward", (rows, update()))], priced(update_rows=20.0, update=60.0), RATES)
    assert times(timeline) == [(0, 2), (0, 4)]  # 10 a second each, then 20; the link has no part in it


def test_links_are_no_faster_than_the_memory_behind_them() -> None:
    rates = Rates(link_in=30.0, link_out=10.0, host=20.0)
    out = op(Kind.STREAM_OUT, Stream.COPY_OUT)
    timeline = simulate(
        [Pass("forward", (stream_in(), out, update()))], priced(stream_in=15.0, stream_out=5.0, update=20.0), rates
    )
    assert times(timeline) == [(0, 1), (0, 1), (0, 2)]  # half their rates, and nothing left for the update


def test_a_stream_runs_in_list_order() -> None:
    ops = (update(unit="block0"), stream_in(After(0), unit="block0"), stream_in(unit="block1"))
    timeline = simulate([Pass("forward", ops)], priced(update=100.0, stream_in=10.0), RATES)
    assert times(timeline) == [(0, 5), (5, 6), (6, 7)]  # block1 could start at once, but stands behind block0


def test_a_wait_across_passes() -> None:
    cost = priced(update_block0=40.0, update_block1=60.0, stream_in=10.0)
    updates = Pass("update", (update(unit="block0"), update(unit="block1")))

    def forward(*waits: Wait) -> Pass:
        return Pass("forward", (stream_in(*waits),))

    precise = forward(LastUse(Buffer(Buf.HOST_WEIGHTS, "block0"), Stream.HOST))
    assert times(simulate([updates, precise], cost, RATES)) == [(0, 2), (2, 5.5), (2, 3)]
    assert times(simulate([updates, forward()], cost, RATES))[2] == (0, 1)
    assert times(simulate([precise, updates], cost, RATES))[0] == (0, 1)  # only earlier passes are waited for


def test_operations_that_cost_nothing_take_no_time() -> None:
    ops = (stream_in(), op(Kind.FORWARD, Stream.COMPUTE, After(0)), update(After(1)))
    assert times(simulate([Pass("forward", ops)], lambda op: 0.0, RATES)) == [(0, 0)] * 3
    assert simulate([], lambda op: 0.0, RATES).makespan == 0


@pytest.mark.parametrize(
    "ops",
    [
        (stream_in(After(1)), op(Kind.FORWARD, Stream.COMPUTE, After(0))),
        (stream_in(After(1)), stream_in()),  # behind the one that it waits for
        (stream_in(After(7)),),
    ],
    ids=["each other", "own stream", "nothing"],
)
def test_a_deadlock_is_an_error(ops: tuple[Op, ...]) -> None:
    with pytest.raises(ScheduleError, match=r"deadlock.*stream_in block0 on copy_in"):
        simulate([Pass("forward", ops)], lambda op: 1.0, RATES)


# Rules on real schedules


def training_step(layout: build.Layout, head_grads: bool = True) -> list[Pass]:
    kept = range(layout.num_blocks)
    blocks = [block(u) for u in kept]
    updated = [OUTER, *blocks, *([] if layout.tied else [HEAD])]
    trainable = [EMBED, *blocks, HEAD, OUTER]
    return [
        build.forward(layout, keeps=kept, table_update=True, head_grads=head_grads),
        build.backward(layout, blocks=kept, trainable=trainable, head_grads=head_grads),
        *([] if layout.update_in_backward else [build.update(layout, updated)]),
    ]


LAYOUTS = [build.Layout(4, *flags) for flags in itertools.product((False, True), repeat=4)]


def all_ops(sequence: list[Pass]) -> list[Op]:
    return [op for schedule in sequence for op in schedule.ops]


def alone(op: Op) -> Pass:
    return Pass("alone", (replace(op, waits=()),))


def random_cost(seed: int) -> Cost:
    """Any relation of copies, computations and updates, with some that are free."""
    chance = random.Random(seed)
    costs: dict[str, float] = {}
    scales = {kind: 10 ** chance.uniform(-1, 1) for kind in Kind}

    def cost(op: Op) -> float:
        return costs.setdefault(str(op), chance.choice([0.0, 1.0, 1.0]) * chance.random() * scales[op.kind])

    return cost


def broken_rules(sequence: list[Pass], timeline: Timeline) -> list[str]:
    """Operations of a stream that overlap or change places, waits that are not kept, accesses that race."""
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
                    before = [other for other in earlier if wait in uses(other.op)]  # all of them, not only the last
                broken += [f"wait: {span.op} of {schedule.name}, {wait}" for b in before if span.start < b.end]
    for a, b in itertools.combinations(spans, 2):
        shared = (set(a.op.writes) & {*b.op.reads, *b.op.writes}) | (set(b.op.writes) & set(a.op.reads))
        # Boundaries of two steps are not the same memory.
        if any(x.kind != Buf.HOST_BOUNDARY for x in shared) and max(a.start, b.start) < min(a.end, b.end):
            broken.append(f"race: {a.op}, {b.op}")
    return broken


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_real_schedules_keep_every_wait(layout: build.Layout) -> None:
    sequence = training_step(layout) * 3
    for seed in range(5):
        cost = random_cost(seed)
        timeline = simulate(sequence, cost, RATES)
        assert broken_rules(sequence, timeline) == []
        # Something is always running at full speed, so no time line is longer than that of one thing after the other.
        assert (
            timeline.makespan <= sum(simulate([alone(op)], cost, RATES).makespan for op in all_ops(sequence)) * 1.0001
        )
        assert simulate(sequence, cost, RATES) == timeline


def test_the_rules_notice_a_schedule_without_waits() -> None:
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


# Costs of a model


@pytest.mark.parametrize(("head_grads", "head_factor"), [(True, 6), (False, 8)])
def test_work_is_minimal(head_grads: bool, head_factor: int) -> None:
    step = Step(FOUR_BLOCKS, tokens=1000, length=500)
    ops = all_ops(training_step(build.Layout(4), head_grads))
    in_blocks, in_head = 8 * 4 * FOUR_BLOCKS.block * 1000, head_factor * FOUR_BLOCKS.head * 1000
    assert sum(step.flops(op) for op in ops) == in_blocks + in_head
    scores_and_values = 2 * 2 * 1000 * 500 * 3584 / 2
    assert sum(step.attention_flops(op) for op in ops) == 4 * scores_and_values * (1 + 1 + 2.5)


@pytest.mark.parametrize("in_backward", [False, True])
def test_traffic_is_minimal(in_backward: bool) -> None:
    model = FOUR_BLOCKS
    step = Step(model, tokens=1000, length=500)
    ops = all_ops(training_step(build.Layout(4, update_in_backward=in_backward)))
    of_blocks, of_rows = 4 * model.block, 1000 * model.hidden
    once = model.head + model.outer + of_rows

    def traffic(*kinds: Kind) -> float:
        return sum(step.num_bytes(op) for op in ops if op.kind in kinds)

    assert traffic(Kind.STREAM_IN) == 2 * (2 * of_blocks + once)
    assert traffic(Kind.STREAM_OUT) == 2 * (of_blocks + once)
    assert traffic(*UPDATES) == UPDATE_BYTES["fp32_master"] * model.num_parameters
    assert sum(replace(step, precision="bf16").num_bytes(op) for op in ops if op.kind in UPDATES) == (
        22 * model.num_parameters
    )


def test_the_model_is_the_published_one() -> None:
    assert QWEN25_7B.num_parameters == 7_615_616_512
    assert QWEN25_7B.block == 233_057_792


# Exposed optimizer time


def exposed(hardware: Hardware, layout: build.Layout, tokens: float, precision: str = "fp32_master") -> float:
    """Share of a step."""
    cost = Step(QWEN25_7B, int(tokens), 4096, precision).cost(hardware)
    passes = training_step(layout)
    seconds = step_seconds(passes, cost, hardware.rates)
    return (seconds - step_seconds(passes, without_updates(cost), hardware.rates)) / seconds


def test_a_step_is_that_of_many() -> None:
    passes = training_step(build.Layout(4))
    cost = Step(FOUR_BLOCKS, 8192, 4096).cost(H200_SERVER)
    a, b = (step_seconds(passes, cost, H200_SERVER.rates, num_steps) for num_steps in (4, 9))
    assert a == pytest.approx(b)
    # With nothing but updates, a step is their bytes over the bandwidth.
    alone = step_seconds(passes, lambda op: cost(op) if op.kind in UPDATES else 0.0, H200_SERVER.rates)
    assert alone == pytest.approx(26 * FOUR_BLOCKS.num_parameters / H200_SERVER.host)


def test_exposed_time_comes_from_updates_and_grows_as_memory_slows() -> None:
    passes = training_step(build.Layout(4))
    # With free updates, host memory that is faster than the links changes nothing.
    slow, fast = (replace(H200_SERVER, host=host) for host in (120e9, 400e9))
    free = [
        step_seconds(passes, without_updates(Step(FOUR_BLOCKS, 8192, 4096).cost(hw)), hw.rates) for hw in (slow, fast)
    ]
    assert free[0] == pytest.approx(free[1])
    layout = build.Layout(28)
    shares = [exposed(replace(H200_SERVER, host=host), layout, 32_768) for host in (400e9, 300e9, 200e9, 150e9, 120e9)]
    assert shares == sorted(shares)
    assert shares[0] < 0.03 < 0.2 < shares[-1]


@pytest.mark.parametrize("hardware", [H200_SERVER, RTX_4090_DESKTOP], ids=lambda hw: hw.name)
@pytest.mark.parametrize("precision", list(UPDATE_BYTES))
@pytest.mark.parametrize("in_backward", [False, True])
def test_updates_hide_above_the_threshold_and_not_below(hardware: Hardware, precision: str, in_backward: bool) -> None:
    layout = build.Layout(28, update_in_backward=in_backward)
    threshold = hiding_tokens(hardware, QWEN25_7B, precision, in_backward)
    # The formula leaves out transfers and attention, so it is right to a fifth.
    assert exposed(hardware, layout, 1.2 * threshold, precision) < 0.03
    assert exposed(hardware, layout, 0.8 * threshold, precision) > 0.06
    assert exposed(hardware, layout, 0.25 * threshold, precision) > 0.3


def test_the_threshold_is_the_documented_one() -> None:
    # Every parameter is multiplied with: 13·R/B and 11·R/B (architecture, 3.5).
    model = replace(QWEN25_7B, table=0, outer=0)
    hardware = Hardware("", flops=600e12, link=55e9, host=200e9, sources="")
    assert hiding_tokens(hardware, model, "fp32_master") == pytest.approx(39_000)
    assert hiding_tokens(hardware, model, "bf16") == pytest.approx(33_000)
