"""The plan cuts the experts of a mixture into tiles where whole blocks do not fit, and rejects tiles that cannot be."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.common.optimizers import OPTIMIZERS
from horizon_lm.errors import ConfigError, ModelNotSupportedError
from horizon_lm.memory.layout.ranks import Shard
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.arithmetic import plan as planning
from horizon_lm.planning.arithmetic.catalog import Hardware
from horizon_lm.planning.arithmetic.choose import Choice, with_device_room
from horizon_lm.planning.arithmetic.device_memory import device_use
from horizon_lm.planning.arithmetic.interconnect import Interconnect
from horizon_lm.planning.arithmetic.outline import ModelOutline
from horizon_lm.planning.arithmetic.plan import Plan, make_plan
from horizon_lm.planning.arithmetic.request import Limit, Machine, Request
from horizon_lm.planning.arithmetic.step import Step
from horizon_lm.planning.arithmetic.step_time import Simulation, staged
from horizon_lm.planning.measure.model_outline import outline_model
from tests.support import tiny_models
from tests.support.handmade_outlines import machine
from tests.support.thinned_cases import thinned


def outline_of(family: str, mlp_chunk_tokens: int | None = None, **settings: Any) -> ModelOutline:
    source = ModelSource(tiny_models.build(family, **settings).config, "tiny")
    return outline_model(
        source, length=32, dtype=torch.bfloat16, on_accelerator=True, mlp_chunk_tokens=mlp_chunk_tokens
    )


@pytest.fixture(scope="module")
def outline() -> ModelOutline:
    return outline_of("qwen3_moe", num_experts=16, moe_intermediate_size=512)


GPU = Machine("by hand", False, machine(), device_limits=[Limit("memory", 10**9)])
REQUEST = Request(per_device_train_batch_size=4, expert_tile="auto", compiled=True)


FOUR = {"num_ranks": 4, "shard": Shard(0, 4)}


def plan(outline: ModelOutline, room: int | None = None, **changes: Any) -> Plan:
    on = GPU if room is None else with_device_room(GPU, room)
    links = Interconnect(changes["num_ranks"], peer=3e11) if "num_ranks" in changes else None
    return make_plan(outline, replace(REQUEST, **changes), replace(on, interconnect=links))


def smallest(outline: ModelOutline, tile: int | None, **changes: Any) -> int:
    """Return the bytes of the smallest step with tiles of this size."""
    made = plan(outline, 1, expert_tile=tile, **changes)
    return device_use(made.step).total


def test_whole_blocks_that_fit_stay_whole(outline: ModelOutline) -> None:
    made = plan(outline)
    assert made.step.settings.expert_tile is None
    assert made.step.settings.compiled


@pytest.mark.parametrize("ranks", thinned([{}, FOUR], every=2), ids=["one rank", "four ranks"])
def test_blocks_that_do_not_fit_twice_are_cut(outline: ModelOutline, ranks: dict[str, Any]) -> None:
    """Into the largest tiles that fit, or smaller ones if a step is shorter with them; these are not compiled."""
    room = smallest(outline, 4, **ranks)
    assert room < smallest(outline, 8, **ranks) < smallest(outline, None, **ranks)
    made = plan(outline, room, **ranks)
    assert made.fits
    assert made.time is not None
    assert made.step.settings.expert_tile in (4, 2, 1)
    assert not made.step.settings.compiled
    assert any(each.startswith("expert_tile: ") and "do not fit" in each for each in made.reasons)
    assert made.request.expert_tile == "auto"
    assert not plan(outline, room, expert_tile=None, **ranks).fits


def test_tiles_are_not_compared_if_the_smallest_does_not_fit(
    outline: ModelOutline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search for remedies makes dozens of such plans. The step that is planned is chosen once more, with its reasons."""
    tried: list[int | None] = []

    def choose(outline: ModelOutline, request: Request, machine: Machine) -> Choice:
        tried.append(request.expert_tile)
        return chosen(outline, request, machine)

    chosen = planning.choose
    monkeypatch.setattr(planning, "choose", choose)
    made = plan(outline, smallest(outline, 1) // 2)
    assert tried[1:] == [None, 1, made.step.settings.expert_tile]
    tried.clear()
    plan(outline, smallest(outline, 4))
    assert len(tried) > 4  # a control: where it fits, they are


@pytest.mark.parametrize(("op_seconds", "is_cut"), [(1e-4, True), (0.0, False)], ids=["slow launches", "free launches"])
def test_blocks_that_fit_are_cut_if_a_step_is_notably_shorter(
    outline: ModelOutline, op_seconds: float, is_cut: bool
) -> None:
    """With tiles there are fewer micro-batches, of more rows. They launch fewer kernels, which matters if launches take time."""
    rows: dict[str, Any] = {"per_device_train_batch_size": 64, "compiled": False}
    room = smallest(outline, None, **rows)
    assert plan(outline, room, expert_tile=None, **rows).fits
    on = replace(with_device_room(GPU, room), hardware=replace(machine(), op_seconds=op_seconds))
    made = make_plan(outline, replace(REQUEST, **rows), on)
    assert made.fits
    assert (made.step.settings.expert_tile is not None) == is_cut
    assert any("shorter than with whole blocks" in each for each in made.reasons) == is_cut


def test_a_step_of_one_micro_batch_is_compared_too() -> None:
    """Slots of a tile are smaller than those of a block, so the rest of all blocks stays on the device, and is loaded once."""
    small_experts = outline_of("qwen3_moe", num_experts=16, moe_intermediate_size=16)
    rows = {"device_micro_batch_size": 4}
    room = smallest(small_experts, None, **rows)
    on = replace(with_device_room(GPU, room), hardware=replace(machine(), link_in=1e8, op_seconds=0.0))
    made, whole = (make_plan(small_experts, replace(REQUEST, expert_tile=tile, **rows), on) for tile in ("auto", None))
    assert made.fits
    assert whole.fits
    assert made.step.settings.slices == whole.step.settings.slices == [4]
    assert made.step.settings.resident_blocks > whole.step.settings.resident_blocks
    assert made.time.seconds < 0.9 * whole.time.seconds
    assert any("shorter than with whole blocks" in each for each in made.reasons)


def test_blocks_whose_feed_forward_layers_are_chunked_are_cut() -> None:
    chunked = outline_of("deepseek_v3", mlp_chunk_tokens=8, n_routed_experts=16, moe_intermediate_size=512)
    room = smallest(chunked, 4, mlp_chunk_tokens=8)
    made = plan(chunked, room, mlp_chunk_tokens=8)
    assert made.fits
    assert made.step.settings.expert_tile in (4, 2, 1)
    assert not plan(chunked, room, expert_tile=None, mlp_chunk_tokens=8).fits


def test_steps_with_other_tiles_are_compared_at_the_rates_of_the_plan(
    outline: ModelOutline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without page-locked memory, the transfers of all of them are staged."""
    on = replace(with_device_room(GPU, smallest(outline, 4)), page_lock_error="not allowed")
    rates = []

    class Recorded(Simulation):
        def __init__(self, step: Step, hardware: Hardware, *others: Any) -> None:
            rates.append(hardware.link_both)
            super().__init__(step, hardware, *others)

    monkeypatch.setattr("horizon_lm.planning.arithmetic.plan.Simulation", Recorded)
    made = make_plan(outline, REQUEST, on)
    assert made.step.settings.expert_tile is not None
    assert len(rates) > 1
    assert set(rates) == {staged(machine()).link_both} != {machine().link_both}


def test_a_device_that_is_too_small_for_any_tile(outline: ModelOutline) -> None:
    made = plan(outline, smallest(outline, 1) // 2)
    assert not made.fits
    assert made.time is not None
    assert made.device.deficit < plan(outline, smallest(outline, 1) // 2, expert_tile=None).device.deficit


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"compile": True}, "compile=True compiles whole blocks, .* leave one of them unset"),
        ({"optimizer": OPTIMIZERS["muon"]}, "use AdamW, or leave it unset"),
    ],
    ids=str,
)
def test_tiles_that_cannot_be_are_rejected(outline: ModelOutline, changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        plan(outline, expert_tile=2, **changes)
    room = smallest(outline, 4)
    assert plan(outline, room, **changes).step.settings.expert_tile is None


def test_models_without_experts_have_no_tiles() -> None:
    dense = outline_of("llama")
    with pytest.raises(ModelNotSupportedError, match=r"no experts that can be cut into tiles .* leave it unset"):
        plan(dense, expert_tile=2)
    assert plan(dense).step.settings.expert_tile is None


def test_stream_does_not_choose() -> None:
    with pytest.raises(ConfigError, match="expert_tile is 'auto'; choose a number of experts, or None"):
        horizon_lm.stream(tiny_models.build("qwen3_moe"), "cpu", expert_tile="auto")  # type: ignore[arg-type]


def test_muon_has_whole_blocks() -> None:
    model = horizon_lm.stream(tiny_models.build("qwen3_moe"), "cpu", expert_tile=2)
    with pytest.raises(ConfigError, match="use AdamW, or leave it unset"):
        horizon_lm.Muon(model, lr=1e-2)
