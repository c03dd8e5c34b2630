"""The costs of a step's operations, and the overlap of the optimizer, compared with arithmetic."""

import re
from dataclasses import replace
from math import inf
from typing import Any

import pytest

from horizon_lm.common.optimizers import OPTIMIZERS
from horizon_lm.common.units import EMBED, HEAD, block
from horizon_lm.optim.choosing import optimizer_class
from horizon_lm.optim.muon import Muon
from horizon_lm.planning.arithmetic.catalog import Hardware
from horizon_lm.planning.arithmetic.plan import Plan, make_plan
from horizon_lm.planning.arithmetic.render import detail_lines
from horizon_lm.planning.arithmetic.request import Machine, Request, Saves
from horizon_lm.planning.arithmetic.residency import Residency
from horizon_lm.planning.arithmetic.step import Step, StepSettings
from horizon_lm.planning.arithmetic.step_cost import StepCost, rates, update_bytes
from horizon_lm.planning.arithmetic.step_time import Simulation
from horizon_lm.schedule.ops import UPDATES, Kind, Op, Stream
from horizon_lm.schedule.simulate import step_seconds
from tests.support.handmade_outlines import BLOCK, HIDDEN, TABLE, dense, laid_out, machine

PARAMETERS = 28 * BLOCK + 2 * TABLE + HIDDEN


def step(tokens: int, num_blocks: int = 28, **settings: Any) -> Step:
    """Return a step with sequences of 4096 tokens, with all boundaries and nothing else on the device."""
    settings = {"activation_checkpoints": num_blocks} | settings
    return Step(dense(num_blocks), StepSettings(tokens // 4096, **settings))


def total(of: Step, hardware: Hardware, *kinds: Kind) -> float:
    cost = StepCost(of, hardware)
    return sum(cost(op) for each in of.passes() for op in each.ops if op.kind in kinds)


# Work and traffic


@pytest.mark.parametrize(("chunked", "head_factor"), [(True, 6), (False, 6)])
@pytest.mark.parametrize("micro_batch", [None, 1, 3])
def test_work_is_minimal(chunked: bool, head_factor: int, micro_batch: int | None) -> None:
    one = machine(matmul={"bfloat16": 1.0, "float32": 1.0}, attention={"bfloat16": float("inf"), "float32": 1.0})
    of = step(4 * 4096, 4, head="chunked" if chunked else "whole", device_micro_batch_size=micro_batch)
    tokens = 4 * 4096
    expected = 8 * 4 * BLOCK * tokens + head_factor * TABLE * tokens
    assert total(of, one, Kind.FORWARD, Kind.BACKWARD) == pytest.approx(expected)


def test_resident_graph_is_not_recomputed() -> None:
    one = machine(matmul={"bfloat16": 1.0, "float32": 1.0}, attention={"bfloat16": float("inf"), "float32": 1.0})
    of = step(4096, 4, **Residency(4, 2, 1).options())
    assert total(of, one, Kind.FORWARD, Kind.BACKWARD) == pytest.approx((3 * 8 + 6) * BLOCK * 4096 + 6 * TABLE * 4096)


class HalfByte:
    """A codec that takes half a byte a weight."""

    def num_bytes(self, shape: tuple[int]) -> int:
        return shape[0] // 2


@pytest.mark.parametrize(
    ("device", "bandwidth", "seconds"),
    [("cuda", 100.0, 0.5 * BLOCK), ("cuda", 1.0, 2.5 * BLOCK), ("cpu", 1.0, 3 * BLOCK)],
)
def test_a_gpu_copies_codes_while_it_decodes_others(device: str, bandwidth: float, seconds: float) -> None:
    """The slower of the two counts: half a byte a weight at the link's rate, or this and two bytes at the device's."""
    layout = laid_out(1, trained=lambda unit: False, codecs={"block0.weight": HalfByte()})
    of = Step(replace(dense(1), layout=layout), StepSettings(1, activation_checkpoints=1))
    one = machine(device=device, device_bandwidth=bandwidth, link_in=1.0, link_both=1.0, host_bandwidth={"1": 1.0})
    assert StepCost(of, one)(Op(Kind.STREAM_IN, block(0), Stream.COPY_IN)) == pytest.approx(seconds)


def test_attention_has_its_own_rate() -> None:
    one = machine(matmul={"bfloat16": float("inf"), "float32": 1.0}, attention={"bfloat16": 1.0, "float32": 1.0})
    scores_and_values = 2 * 2 * 4096 * 4096 * 3584 / 2
    found = total(step(4096, 4), one, Kind.FORWARD, Kind.BACKWARD)
    assert found == pytest.approx(4 * scores_and_values * (1 + 1 + 2.5))


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("resident", [0, 1, 4])
def test_traffic_is_minimal(in_backward: bool, resident: int) -> None:
    of = step(4096, 4, update_in_backward=in_backward, **Residency(4, resident).options())
    rows = 4096 * HIDDEN
    once = TABLE + HIDDEN + rows
    moves = (8 - resident) * BLOCK  # resident blocks once, other blocks in the forward and in the backward pass
    assert total(of, machine(), Kind.STREAM_IN) == 2 * (moves + once)
    assert total(of, machine(), Kind.STREAM_OUT) == 2 * (4 * BLOCK + once)
    assert total(of, machine(), *UPDATES) == 26 * (4 * BLOCK + 2 * TABLE + HIDDEN)


def test_only_offloaded_boundaries_move() -> None:
    of = step(8192, 4, activation_checkpoints=1)
    assert total(of, machine(), Kind.OFFLOAD) == total(of, machine(), Kind.FETCH) == 3 * 8192 * HIDDEN * 2


@pytest.mark.parametrize(
    ("precision", "moments", "grad_bytes", "expected"),
    [
        ("fp32_master", "float32", 2, 26), ("bf16", "float32", 2, 22), ("float32", "float32", 4, 28),
        ("fp32_master", "bfloat16", 2, 18), ("bf16", "8bit", 2, 10), ("fp32_master", "float32", 4, 28),
    ],
)  # fmt: skip
def test_update_bytes(precision: str, moments: str, grad_bytes: int, expected: int) -> None:
    settings = StepSettings(1, precision=precision, moments=moments, grad_bytes=grad_bytes)
    assert update_bytes(settings, machine()) == expected
    measured = machine(update_seconds={precision: 0.5e-9})
    full = replace(settings, moments="float32")
    assert update_bytes(full, measured) == pytest.approx(0.5e-9 * 200e9)  # the bytes that take this long
    assert update_bytes(settings, measured) / update_bytes(full, measured) == expected / update_bytes(full, machine())


def test_update_bytes_of_another_optimizer() -> None:
    """The measured seconds are those of AdamW; one moment less is read and written."""
    full = StepSettings(1, precision="fp32_master")
    lion = replace(full, optimizer=OPTIMIZERS["lion"])
    assert update_bytes(lion, machine()) == 18
    measured = machine(update_seconds={"fp32_master": 0.5e-9})
    assert update_bytes(lion, measured) / update_bytes(full, measured) == pytest.approx(18 / 26)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_table_agrees_with_the_rules(name: str) -> None:
    entry, cls = OPTIMIZERS[name], optimizer_class(name)
    assert (entry.name, entry.num_moments) == (cls.rule.name, len(cls.rule.moments))
    assert entry.orthogonalizes == issubclass(cls, Muon)


@pytest.mark.parametrize(
    ("name", "note"), [("adamw", "two per parameter (AdamW)"), ("lion", "one per parameter (Lion)")]
)
def test_plan_has_the_moments_of_the_optimizer(name: str, note: str) -> None:
    request = Request(optimizer=OPTIMIZERS[name], activation_checkpoints=28)
    plan = make_plan(dense(), request, Machine("here", True, None))
    (moments,) = [item for item in plan.host.items if item.name == "moments"]
    assert moments.note == note
    assert moments.bytes == pytest.approx(4 * OPTIMIZERS[name].num_moments * PARAMETERS, rel=1e-3)


def test_frozen_unit_has_no_gradient_or_update() -> None:
    of = step(4096, 4)
    of = replace(
        of, outline=replace(of.outline, layout=laid_out(4, trained=lambda unit: unit not in (block(0), EMBED)))
    )
    ops = [op for each in of.passes() for op in each.ops]
    assert not [op for op in ops if op.kind in (Kind.STREAM_OUT, *UPDATES) and op.unit in (block(0), EMBED)]
    assert total(of, machine(), *UPDATES) == 26 * (3 * BLOCK + TABLE + HIDDEN)


@pytest.mark.parametrize("micro_batch", [None, 1])
def test_only_gradients_of_trained_weights_are_moved_on_the_device(micro_batch: int | None) -> None:
    of = step(2 * 4096, 4, device_micro_batch_size=micro_batch)
    without_blocks = laid_out(4, trained=lambda unit: unit not in map(block, range(4)))
    frozen = replace(of, outline=replace(of.outline, layout=without_blocks))
    one = machine(device_bandwidth=1.0)
    saved = total(of, one, Kind.BACKWARD) - total(frozen, one, Kind.BACKWARD)
    assert saved == pytest.approx(4 * BLOCK * (4 if micro_batch is None else 24))


# The device is the host


def test_update_and_compute_threads_share_cores() -> None:
    here = machine(device="cpu", cores=2, host_bandwidth={"1": 20e9, "2": 30e9})
    shared = rates(here, computing_threads=2)
    assert shared.inline
    assert shared.compute_share == pytest.approx(2 / 3)  # three threads on two cores
    assert shared.update_share == pytest.approx(2 / 3 * 20 / 30)
    apart = rates(replace(here, cores=8, host_bandwidth={"1": 20e9, "4": 60e9, "8": 80e9}), computing_threads=4)
    assert (apart.compute_share, apart.update_share) == (1.0, pytest.approx(60 / 80))


# Exposed optimizer time


def share(hardware: Hardware, tokens: float, **settings: Any) -> float:
    """Return the share of a step in which the optimizer is exposed."""
    rows = max(1, round(tokens / 512))
    time = Simulation(
        Step(dense(length=512), StepSettings(rows, activation_checkpoints=28, **settings)), hardware
    ).step_time()
    return time.exposed_update_seconds / time.seconds


def test_step_of_updates_only_is_bytes_over_bandwidth() -> None:
    of, hardware = step(8192), machine()
    cost = StepCost(of, hardware)

    def only_updates(op: Op) -> float:
        return cost(op) if op.kind in UPDATES else 0.0

    assert step_seconds(of.passes(), only_updates, rates(hardware)) == pytest.approx(26 * PARAMETERS / 200e9)


def test_exposed_update_time_grows_with_slower_memory() -> None:
    shares = [share(machine(host_bandwidth={"16": host}), 32_768) for host in (400e9, 300e9, 200e9, 150e9, 120e9)]
    assert shares == sorted(shares)
    assert shares[0] < 0.03 < 0.2 < shares[-1]


@pytest.mark.parametrize("precision", ["fp32_master", "bf16"])
@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize("hardware", [machine(), machine(matmul={"bfloat16": 100e12, "float32": 1.0},
                                      attention={"bfloat16": 100e12, "float32": 1.0}, link_in=25e9, link_out=25e9,
                                      host_bandwidth={"8": 70e9})], ids=["server", "desktop"])  # fmt: skip
def test_updates_are_overlapped_only_above_threshold(hardware: Hardware, precision: str, in_backward: bool) -> None:
    settings = {"precision": precision, "update_in_backward": in_backward}
    time = Simulation(
        Step(dense(length=512), StepSettings(64, activation_checkpoints=28, **settings)), hardware
    ).step_time()
    threshold = time.hidden_from_tokens["update"]
    # b/2 · R/B tokens, with b bytes per update and those of a weight that is loaded meanwhile, and in a backward pass of its gradient, for
    # all parameters over those of blocks; a third of that during a backward pass (architecture, 3.5), and attention shortens it.
    rate = hardware.matmul["bfloat16"] / hardware.host_rate
    moved = update_bytes(StepSettings(1, precision=precision), hardware) + (4 if in_backward else 2)
    formula = moved / (6 if in_backward else 2) * rate
    formula *= PARAMETERS / (28 * BLOCK)
    assert 0.95 * formula < threshold < formula
    assert share(hardware, 1.3 * threshold, **settings) < 0.03
    assert share(hardware, 0.7 * threshold, **settings) > 0.06
    assert share(hardware, 0.25 * threshold, **settings) > 0.3


def test_few_updates_wait_for_no_copies() -> None:
    """They run beside the copies, with what these leave of host memory's bandwidth: their threshold is not that of the copies."""
    of, hardware = step(8192), machine(link_in=50e9, link_out=50e9, host_bandwidth={"16": 200e9})
    layout = laid_out(tensors={"weight": BLOCK - 1000, "few": 1000})
    for unit, slabs in layout.units.items():
        slabs.lay_out_grads([f"{unit}.few"])
    few = replace(of, outline=replace(of.outline, layout=layout))
    thresholds = Simulation(few, hardware).step_time().hidden_from_tokens
    assert thresholds["update"] < 0.01 * thresholds["copy_in"]


def test_bottleneck_is_named() -> None:
    def limit(**changes: Any) -> str:
        return Simulation(step(8 * 4096), machine(**changes)).step_time().limited_by

    assert limit(host_bandwidth={"16": 2000e9}) == "compute"
    assert limit(host_bandwidth={"16": 50e9}) == "update"
    assert limit(host_bandwidth={"16": 2000e9}, link_in=5e9) == "copy_in"


def test_utilization_and_model_flops() -> None:
    of, hardware = step(16 * 4096), machine()
    time = Simulation(of, hardware).step_time()
    assert time.tokens_per_second == pytest.approx(16 * 4096 / time.seconds)
    assert set(time.busy) == set(map(str, Stream)) - {"disk", "collective"}
    assert all(0 < part <= 1 for part in time.busy.values())
    tokens = 16 * 4096
    flops = 6 * (28 * BLOCK + TABLE) * tokens + 3 * 28 * 2 * tokens * 4096 * 3584
    assert time.model_tflops == pytest.approx(flops / time.seconds / 1e12)
    assert max(span.end for span in time.spans if span.op.stream == Stream.COMPUTE) == pytest.approx(time.seconds)
    assert not [span for span in time.spans if span.op.unit == HEAD and span.end < span.start]


@pytest.mark.parametrize(
    ("bandwidth", "moments", "named"), [(60e9, "float32", True), (400e9, "float32", False), (60e9, "bfloat16", False)]
)
def test_plan_suggests_smaller_moments(bandwidth: float, moments: str, named: bool) -> None:
    """For a 7B model with 64k tokens per step, updates are overlapped from some bandwidth on."""
    request = Request(per_device_train_batch_size=16, moments=moments, activation_checkpoints=28)
    plan = make_plan(dense(), request, Machine("by hand", False, machine(host_bandwidth={"16": bandwidth})))
    found = [re.search(r"moments: bfloat16 would make a step (\d+)% shorter", reason) for reason in plan.reasons]
    assert any(found) == named
    if named:
        assert plan.time is not None
        of = replace(plan.step, settings=replace(plan.step.settings, moments="bfloat16"))
        shorter = 1 - Simulation(of, machine(host_bandwidth={"16": bandwidth})).step_time().seconds / plan.time.seconds
        assert [match[1] for match in found if match] == [f"{100 * shorter:.0f}"]


@pytest.mark.parametrize(
    ("bandwidth", "chosen", "reason"),
    [
        (60e9, "bfloat16", r"moments: bfloat16, because updates are not fully overlapped: a step is \d+% shorter"),
        (400e9, "float32", "moments: float32, because updates are overlapped"),
        (None, "float32", "moments: float32, because the time of a step is unknown"),
    ],
)
def test_plan_chooses_moments(bandwidth: float | None, chosen: str, reason: str) -> None:
    hardware = None if bandwidth is None else machine(host_bandwidth={"16": bandwidth})
    where = Machine("by hand", False, hardware)

    def planned(moments: str) -> Plan:
        request = Request(per_device_train_batch_size=16, moments=moments, activation_checkpoints=28)
        return make_plan(dense(), request, where)

    plan, same = planned("auto"), planned(chosen)
    assert (plan.request, plan.time, plan.budgets) == (same.request, same.time, same.budgets)
    assert re.match(reason, plan.reasons[0])
    assert list(plan.reasons[1:]) == list(same.reasons)


@pytest.mark.parametrize(
    ("experts", "capability", "named"),
    [(128, 8.9, True), (128, 12.0, True), (128, 9.0, False), (128, 10.3, False), (128, 0.0, False), (0, 8.9, False)],
)
def test_plan_names_experts_without_a_kernel(experts: int, capability: float, named: bool) -> None:
    where = Machine("by hand", False, machine(capability=capability))
    plan = make_plan(replace(dense(), experts=experts), Request(activation_checkpoints=28), where)
    assert any("torch multiplies the 128 experts of a block one by one" in reason for reason in plan.reasons) == named


# Checkpoints


def test_a_slower_disk_costs_more_of_the_steps() -> None:
    """A checkpoint is written while training goes on; updates that come too early wait for it."""
    of = step(2**17)
    saves = [Simulation(of, machine(disk_write=rate)).save_time() for rate in (1e8, 1e9, 3e9, 6e9, 1e11)]
    stalls, seconds = [each.stall_seconds for each in saves], [each.seconds for each in saves]
    assert stalls == sorted(stalls, reverse=True)
    assert seconds == sorted(seconds, reverse=True)
    assert stalls[0] > 10 * stalls[1] / 2 > 0
    assert {each.num_bytes for each in saves} == {12 * PARAMETERS}  # bf16 and its low halves, and two moments


@pytest.mark.parametrize(("of_best", "named"), [(0, True), (4, True), (10, False)])
def test_plan_advises_on_save_steps_where_they_cause_saves(of_best: int, named: bool) -> None:
    saves = Saves(num=10, of_best=of_best, kept=2)
    request = Request(activation_checkpoints=28, num_steps=11, saves=saves)
    plan = make_plan(dense(), request, Machine("by hand", False, machine(disk_write=1e8)))
    text = "\n".join(detail_lines(plan))
    assert "the steps lose" in text
    assert ("save_steps: " in text) == named


def test_a_disk_that_takes_no_time_costs_nothing() -> None:
    assert Simulation(step(2**17), machine(disk_write=inf)).save_time().stall_seconds == 0


def test_a_disk_that_is_much_slower_than_a_step_stops_the_next_updates() -> None:
    """At the limit, the steps lose all of the time in which the checkpoint is written, but the step that hides it."""
    of, slow = step(2**17), machine(disk_write=1e7)
    saved = Simulation(of, slow).save_time()
    assert saved.seconds == pytest.approx(12 * PARAMETERS / 1e7, rel=1e-3)
    assert saved.seconds - 2 * Simulation(of, slow).step_time().seconds < saved.stall_seconds < saved.seconds
