"""The costs of steps whose experts are moved in tiles, compared with those of whole blocks."""

import itertools
from typing import Any

import pytest
import torch

from horizon_lm.model.source import ModelSource
from horizon_lm.planning.arithmetic.choose import choose
from horizon_lm.planning.arithmetic.device_memory import device_use, memory_curve
from horizon_lm.planning.arithmetic.outline import ModelOutline
from horizon_lm.planning.arithmetic.request import Machine, Request
from horizon_lm.planning.arithmetic.step import Step
from horizon_lm.planning.arithmetic.step_cost import StepCost
from horizon_lm.planning.arithmetic.step_time import Simulation
from horizon_lm.planning.measure.model_outline import outline_model
from horizon_lm.schedule.ops import Kind, Stream
from tests.support import tiny_models
from tests.support.handmade_outlines import machine

FAMILIES = ("qwen3_moe", "deepseek_v3")
COUNTING = {"matmul": {"bfloat16": 1.0, "float32": 1.0}, "attention": {"bfloat16": 1.0, "float32": 1.0}}


@pytest.fixture(scope="module", params=FAMILIES)
def outline(request: pytest.FixtureRequest) -> ModelOutline:
    config = tiny_models.build(request.param).config
    source = ModelSource(config, "tiny", attn_implementation=config._attn_implementation)
    return outline_model(source, length=32, dtype=torch.bfloat16, on_accelerator=True)


def step(outline: ModelOutline, **settings: Any) -> Step:
    request = Request(per_device_train_batch_size=4, activation_checkpoints="host", **settings)
    return choose(outline, request, Machine("by hand", False, machine())).step


def total(of: Step, *kinds: Kind, **rates: Any) -> float:
    cost = StepCost(of, machine(**rates))
    return sum(cost(op) for each in of.passes() for op in each.ops if op.kind in kinds)


COMPUTED = (Kind.ROUTE, Kind.FORWARD, Kind.RECOMPUTE, Kind.BACKWARD, Kind.STAGE)


@pytest.mark.parametrize("tile", [1, 3, 4, 9])
def test_work_and_traffic_are_those_of_whole_blocks(outline: ModelOutline, tile: int) -> None:
    whole, tiled = step(outline), step(outline, expert_tile=tile)
    assert total(tiled, *COMPUTED, **COUNTING) == pytest.approx(total(whole, *COMPUTED, **COUNTING))
    for kind in (Kind.STREAM_IN, Kind.STREAM_OUT, Kind.UPDATE):
        assert total(tiled, kind) == pytest.approx(total(whole, kind))
    for kind in (Kind.OFFLOAD, Kind.FETCH):  # the experts' outputs beside the blocks' inputs
        assert total(tiled, kind) == 2 * total(whole, kind)


def test_several_micro_batches_compute_the_core_once_more(outline: ModelOutline) -> None:
    whole, tiled = (step(outline, device_micro_batch_size=1, expert_tile=tile) for tile in (None, 2))
    cores = sum(4 * kind.core.recompute.at(1).products * len(kind.indices) for kind in outline.kinds if kind.core)
    cores += sum(4 * kind.core.recompute.at(1).attention * len(kind.indices) for kind in outline.kinds if kind.core)
    again = total(tiled, *COMPUTED, **COUNTING) - total(whole, *COMPUTED, **COUNTING)
    assert again == pytest.approx(cores)


def test_parts_of_a_block_are_its_whole(outline: ModelOutline) -> None:
    """Shared experts come after the routed ones; the last tile has one expert, the others three."""
    cost, of = StepCost(step(outline, expert_tile=3), machine(**COUNTING)), step(outline, expert_tile=3)
    forward = [op for op in of.passes()[0].ops if op.stream == Stream.COMPUTE and op.unit.index == 2]
    assert [str(op) for op in forward] == [
        "route block2",
        "forward block2.tile0",
        "forward block2.tile1",
        "forward block2",
    ]
    route, first, last, after = map(cost, forward)
    assert first == pytest.approx(3 * last)
    assert route > 0
    has_shared = 0 not in outline.layout.experts  # DeepSeek-V3's first block is dense
    assert (after > 0) == has_shared


@pytest.mark.parametrize(("micro_batch", "resident"), [*itertools.product((None, 1), (0, 1))])
def test_a_step_is_simulated(outline: ModelOutline, micro_batch: int | None, resident: int) -> None:
    of = step(outline, device_micro_batch_size=micro_batch, resident_blocks=resident, expert_tile=2)
    time = Simulation(of, machine()).step_time()
    assert time.seconds > 0
    curve = memory_curve(of, time.spans, 0)
    assert max(curve.device) <= device_use(of).total
    assert curve.device[-1] == curve.device[0]
