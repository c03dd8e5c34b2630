"""Products in FP8 in a plan: their work, the casts of weights, the rates of machines, and the machines without any."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

from horizon_lm.common.units import block
from horizon_lm.errors import ConfigError
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.arithmetic.catalog import Hardware, published
from horizon_lm.planning.arithmetic.float8 import require_float8
from horizon_lm.planning.arithmetic.outline import ModelOutline, Work
from horizon_lm.planning.arithmetic.plan import make_plan
from horizon_lm.planning.arithmetic.request import Machine, Request
from horizon_lm.planning.arithmetic.step import Step, StepSettings
from horizon_lm.planning.arithmetic.step_cost import StepCost
from horizon_lm.planning.measure.model_outline import outline_model
from horizon_lm.schedule.ops import Kind, Op, Stream
from tests.support import tiny_models

LENGTH, HIDDEN, WIDTH = 128, 64, 160
# Attention (with a quarter of keys and values twice) and feed-forward layer of a block.
WEIGHTS = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2 + 3 * HIDDEN * WIDTH


@cache
def outline(products: str) -> ModelOutline:
    source = ModelSource(tiny_models.build("llama", hidden_size=HIDDEN, intermediate_size=WIDTH).config, "tiny")
    return outline_model(source, length=LENGTH, dtype=torch.bfloat16, on_accelerator=True, products=products)


def test_every_product_of_a_linear_layer_is_counted_once() -> None:
    """The output and the gradient of the input in FP8, the gradient of the weight in bfloat16."""
    (plain,), (float8,) = (outline(each).kinds for each in ("plain", "float8"))
    operations = 2.0 * WEIGHTS * LENGTH
    assert plain.forward.at(1).products == operations
    assert (float8.forward.at(1).products, float8.forward.at(1).float8) == (0, operations)
    assert (float8.backward.at(1).products, float8.backward.at(1).float8) == (operations, operations)
    # A recompute leaves out the down projection.
    assert float8.recompute.at(1).float8 == operations - 2.0 * HIDDEN * WIDTH * LENGTH
    assert float8.forward.at(1).attention == plain.forward.at(1).attention


def test_casts_of_weights_are_counted_once_for_all_rows() -> None:
    (plain,), (float8,) = (outline(each).kinds for each in ("plain", "float8"))
    assert plain.casts == Work()
    assert plain.footprint.at(3).casts == 0
    rows_and_columns = 5 * HIDDEN + 2 * (HIDDEN // 2) + 2 * WIDTH + HIDDEN + (HIDDEN * 6 + WIDTH)
    assert float8.footprint.at(1).casts == float8.footprint.at(3).casts
    assert 2 * WEIGHTS < float8.footprint.at(1).casts < 2 * WEIGHTS + 8 * rows_and_columns
    # Each weight is read twice in bfloat16, and written as codes, for each of its two products.
    assert float8.casts.moved_bytes > 2 * (2 + 2 + 1) * WEIGHTS


def machine(**changes: Any) -> Machine:
    return Machine("a machine", on_host=False, hardware=replace(published()["h100"], **changes))


def seconds(products: str, hardware: Hardware, kind: Kind, micro_batch: int | None = None) -> float:
    settings = StepSettings(
        64, products=products, compiled=True, activation_checkpoints=3, device_micro_batch_size=micro_batch
    )
    return StepCost(Step(outline(products), settings), hardware)(Op(kind, block(1), Stream.COMPUTE))


def test_products_take_the_time_of_their_rate() -> None:
    """With casts, and all that is read and written, for free."""
    free = {
        "device_bandwidth": float("inf"),
        "op_seconds": 0.0,
        "attention": {"bfloat16": float("inf"), "float32": 1.0},
    }
    hardware = machine(matmul={"bfloat16": 1.0, "float32": 1.0}, float8=4.0, **free).hardware
    assert hardware is not None
    operations = 2.0 * WEIGHTS * LENGTH * 64
    assert seconds("plain", hardware, Kind.FORWARD) == pytest.approx(operations)
    assert seconds("float8", hardware, Kind.FORWARD) == pytest.approx(operations / 4)
    recompute = operations - 2.0 * HIDDEN * WIDTH * LENGTH * 64
    assert seconds("float8", hardware, Kind.BACKWARD) == pytest.approx(operations + (operations + recompute) / 4)


def test_casts_take_bandwidth_once_a_pass() -> None:
    """The same for a batch at once and in micro-batches, but for the sums of gradients and the parts of whole batches."""
    free = {"matmul": {"bfloat16": float("inf"), "float32": 1.0}, "float8": float("inf"), "op_seconds": 0.0}
    hardware = machine(device_bandwidth=1.0, **free).hardware
    assert hardware is not None
    added = {
        size: seconds("float8", hardware, Kind.FORWARD, size) - seconds("plain", hardware, Kind.FORWARD, size)
        for size in (None, 32)
    }
    assert added[None] == pytest.approx(added[32], rel=0.02)


# Machines


def test_published_rates_are_twice_those_of_bfloat16() -> None:
    """By the data sheets: dense, with results summed in float32; cards before Ada, and AMD's, have none."""
    for name, each in published().items():
        has_float8 = each.capability >= 8.9
        assert each.float8 == (2 * each.matmul["bfloat16"] if has_float8 else 0), name
        assert ("float8" in each.sources) == has_float8, name
    assert published()["rtx-4090"].float8 == pytest.approx(0.92 * 330.3e12, rel=0.001)


def plan(name: str, **settings: Any) -> Any:
    on = Machine(name, on_host=False, hardware=published()[name])
    request = Request(64, **{"products": "float8", "compiled": True, **settings})
    return make_plan(outline("float8"), request, on)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("a100-sxm-80gb", {}, r"needs a GPU with compute capability 8\.9 or later .*; A100 SXM 80 GB, EPYC 7742 has 8\.0\. Leave"),
        ("rtx-3090", {}, r"has 8\.6\. Leave products: plain"),
        ("mi300x", {}, r"the profile of MI300X .* has no rate of products in FP8, .* give it as float8 in MACHINE\.json"),
        ("h100", {"precision": "float32"}, "needs weights in bfloat16 on a GPU; use precision fp32_master or bf16"),
    ],
)  # fmt: skip
def test_machines_without(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(name, **settings)


def test_a_plan_that_is_not_priced_needs_no_rate() -> None:
    request = Request(8, products="float8")
    require_float8(request, machine(float8=0.0), priced=False)
    with pytest.raises(ConfigError, match="has no rate of products in FP8"):
        require_float8(request, machine(float8=0.0), priced=True)
    require_float8(replace(request, products="plain"), machine(float8=0.0), priced=True)
    require_float8(request, replace(machine(), hardware=None), priced=True)


def test_a_plan_has_the_products_of_its_request() -> None:
    found = plan("h100")
    assert found.step.settings.products == "float8"
    assert found.time is not None
