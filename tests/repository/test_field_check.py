"""The MegaTrain step of `benchmarks/field_schedule.py`: its operations and its simulated time."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from field_schedule import FieldSettings, FieldStep, field_pass, field_time
from simulated_models import source_of

from horizon_lm.common.units import block
from horizon_lm.planning.arithmetic.catalog import Hardware, find_profile
from horizon_lm.planning.arithmetic.outline import ModelOutline
from horizon_lm.planning.arithmetic.residency import Residency
from horizon_lm.planning.arithmetic.step import Step, StepSettings
from horizon_lm.planning.arithmetic.step_cost import rates
from horizon_lm.planning.arithmetic.step_time import Simulation
from horizon_lm.runs.config import plan_config
from horizon_lm.schedule.ops import UPDATES, Kind, Op, Schedule, Stream
from horizon_lm.schedule.simulate import Cost, Timeline, simulate, step_seconds

NUM_BLOCKS = 6
SETTINGS = [
    FieldSettings(4), FieldSettings(4, interval=1), FieldSettings(4, double_buffered=False),
    FieldSettings(4, slab_pool=False),
]  # fmt: skip
MACHINES = ["rtx-3090", "gh200"]


@cache
def outline(model: str = "SmolLM2-135M", num_blocks: int = NUM_BLOCKS, length: int = 256) -> ModelOutline:
    run = plan_config(model_name_or_path=model, device="cuda")
    return source_of(model, num_hidden_layers=num_blocks).outline(run, length=length, masked=False)


def count(schedule: Schedule, kind: Kind, stream: Stream) -> Counter[str]:
    return Counter(op.unit for op in schedule.ops if (op.kind, op.stream) == (kind, stream))


# Operations


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_a_step_has_three_loads_and_forward_passes_per_block_and_one_update(
    settings: FieldSettings, tied: bool
) -> None:
    schedule = field_pass(NUM_BLOCKS, tied, settings)
    forwards = count(schedule, Kind.FORWARD, Stream.COMPUTE) + count(schedule, Kind.BACKWARD, Stream.COMPUTE)
    for unit in map(block, range(NUM_BLOCKS)):
        assert count(schedule, Kind.STREAM_IN, Stream.COPY_IN)[unit] == 3
        assert count(schedule, Kind.UPDATE_ROWS, Stream.HOST)[unit] == 3  # packed for each load
        assert count(schedule, Kind.STAGE, Stream.COMPUTE)[unit] == 3  # copied into a template
        assert forwards[unit] == 3  # the backward pass recomputes its block
        assert count(schedule, Kind.BACKWARD, Stream.COMPUTE)[unit] == 1
        assert count(schedule, Kind.STREAM_OUT, Stream.COPY_OUT)[unit] == 1
    assert [op.stream for op in schedule.ops if op.kind == Kind.UPDATE] == [Stream.HOST]
    assert schedule.ops[-1].kind == Kind.UPDATE


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_the_optimizer_runs_alone(settings: FieldSettings) -> None:
    for spans in two_steps(settings).passes:
        update = next(span for span in spans if span.op.kind == Kind.UPDATE)
        assert all(span.end <= update.start for span in spans if span is not update)
    first, second = two_steps(settings).passes
    assert min(span.start for span in second) >= max(span.end for span in first)


def two_steps(settings: FieldSettings, change: Callable[[Schedule], Schedule] = lambda schedule: schedule) -> Timeline:
    step = FieldStep(outline(), settings)
    gpu = find_profile("rtx-3090")
    return simulate([change(schedule) for schedule in step.passes()] * 2, step.cost(gpu, packing=1e9), rates(gpu))


def races(timeline: Timeline) -> list[tuple[Op, Op]]:
    """Return pairs of operations that overlap although one of them writes a buffer that the other uses."""
    spans = [span for schedule in timeline.passes for span in schedule]
    return [
        (a.op, b.op)
        for i, a in enumerate(spans)
        for b in spans[i + 1 :]
        if min(a.end, b.end) - max(a.start, b.start) > 1e-9
        and (set(a.op.writes) & {*b.op.reads, *b.op.writes} or set(b.op.writes) & set(a.op.reads))
    ]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_nothing_races(settings: FieldSettings) -> None:
    assert not races(two_steps(settings))


def test_the_check_for_races_finds_them() -> None:
    def without_waits(schedule: Schedule) -> Schedule:
        return replace(schedule, ops=tuple(replace(op, waits=()) for op in schedule.ops))

    assert races(two_steps(FieldSettings(4), without_waits))


# Simulated time


def never_rises(taken: list[float]) -> bool:
    """Return whether times never rise by more than 0.1%; faster copies take memory bandwidth from packing."""
    return all(after <= 1.001 * before for before, after in pairwise(taken))


def seconds(
    machine: Hardware, settings: FieldSettings = SETTINGS[0], free: Callable[[Op], bool] = lambda op: False
) -> float:
    step = FieldStep(outline(), settings)
    cost = step.cost(machine)

    def price(op: Op) -> float:
        return 0.0 if free(op) else cost(op)

    return step_seconds(step.passes(), price, rates(machine), num_steps=3)


@pytest.mark.parametrize("machine", MACHINES)
def test_fewer_loads_are_never_slower(machine: str) -> None:
    gpu = find_profile(machine)
    loads = [op for op in field_pass(NUM_BLOCKS, True, SETTINGS[0]).ops if op.kind == Kind.STREAM_IN]
    taken = [
        seconds(gpu, free=set(loads[-number:]).__contains__ if number else lambda op: False) for number in (0, 3, 9, 19)
    ]
    assert never_rises(taken)
    assert taken[-1] < taken[0]


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("rate", ["link_in", "link_out", "host_bandwidth", "device_bandwidth"])
def test_more_bandwidth_is_never_slower(machine: str, rate: str) -> None:
    gpu = find_profile(machine)
    taken = []
    for factor in (0.25, 0.5, 1, 2, 4):
        value = getattr(gpu, rate)
        more = {key: factor * each for key, each in value.items()} if rate == "host_bandwidth" else factor * value
        taken.append(seconds(replace(gpu, **{rate: more, "link_both": 1e15})))
    assert never_rises(taken)


@pytest.mark.parametrize("machine", MACHINES)
def test_double_buffering_and_slab_pool_save_time(machine: str) -> None:
    gpu = find_profile(machine)
    full = seconds(gpu)
    assert full < seconds(gpu, FieldSettings(4, double_buffered=False))
    assert full <= seconds(gpu, FieldSettings(4, slab_pool=False))


@pytest.mark.parametrize("machine", MACHINES)
def test_our_schedule_is_faster(machine: str) -> None:
    gpu = find_profile(machine)
    residency = Residency(NUM_BLOCKS)
    ours = Step(outline(), StepSettings(4, precision="bf16", head_chunk_tokens=512, **residency.options()))
    assert Simulation(ours, gpu).step_time().seconds < seconds(gpu)


def test_times_add_up_to_the_step() -> None:
    gpu = find_profile("rtx-3090")
    step = FieldStep(outline(), SETTINGS[0])
    time = field_time(step, gpu)
    cost: Cost = step.cost(gpu)
    assert time.seconds == pytest.approx(time.computing + time.optimizer + time.waiting)
    assert time.optimizer == pytest.approx(30 * outline().layout.num_parameters / gpu.host_rate)
    host = sum(cost(op) for op in step.passes()[0].ops if op.kind in UPDATES and op.unit == block(0))
    assert host == pytest.approx((3 * 4 + 4) * outline().layout.numel(block(0)))  # packed three times, landed once


def test_memory_equals_the_published_peak() -> None:
    """The published peak for 158 rows of Qwen2.5-7B is 74.2 GB, which their code counts in units of 2**30."""
    step = FieldStep(outline("Qwen2.5-7B", 28, 1024), FieldSettings(158))
    assert step.device_bytes() == pytest.approx(74.2 * 2**30, rel=0.05)
