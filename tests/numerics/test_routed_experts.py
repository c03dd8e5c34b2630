"""Passes of few tokens stream only the experts that these tokens are routed to, and compute the same bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.common.units import block, tile
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.engine.passes.expert_tiles import ExpertTiles
from horizon_lm.engine.units.tiled_computation import WholeCall
from horizon_lm.schedule import build
from horizon_lm.schedule.ops import Kind, Schedule
from tests.support import tiny_models
from tests.support.schedule_proofs import without_wait
from tests.support.thinned_cases import covering, thinned

EXPERTS = 16  # of which a token reads two, so that up to four tokens read at most half
FAMILIES = {
    "mixtral": "num_local_experts", "qwen3_moe": "num_experts", "qwen3_next": "num_experts", "gpt_oss": "num_local_experts",
    "deepseek_v3": "n_routed_experts",
}  # fmt: skip


@contextmanager
def all_experts() -> Iterator[None]:
    """Stream all experts, as for many tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ExpertTiles, "routed", lambda self, num_tokens: frozenset())
        yield


def streamed(family: str, device: Any = "cpu", **options: Any) -> Any:
    model = tiny_models.build(family, **{FAMILIES[family]: EXPERTS})
    return horizon_lm.stream(model, device, **options).eval()


@torch.no_grad()
def answer(model: Any) -> tuple[torch.Tensor, ...]:
    """Return the logits of each token of a greedy answer to a prompt of two tokens, and those of a batch of many tokens."""
    prompt = torch.tensor([[5, 9]])
    made = model.generate(prompt, max_new_tokens=6, do_sample=False, output_logits=True, return_dict_in_generate=True)
    many = tiny_models.batch(rows=3, length=11)["input_ids"]
    return (made.sequences, *made.logits, model(many).logits, model(prompt).logits)


def same(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return len(a) == len(b) and all(map(torch.equal, a, b))


def moved(model: Any) -> dict[str, int]:
    """Return the bytes of chosen experts that were moved, by block."""
    found = horizon_lm.stats(model)["moved_bytes"]
    tiles = {key.removeprefix(f"{Kind.STREAM_IN}:"): count for key, count in found.items() if key.endswith(".tile0")}
    return {unit.removesuffix(".tile0"): count for unit, count in tiles.items() if count}


@pytest.mark.parametrize(("family", "precision"), covering(FAMILIES, ("float32", "bf16")))
def test_same_bits(family: str, precision: str) -> None:
    with all_experts():
        whole = streamed(family, precision=precision)
        expected = answer(whole)
    assert not moved(whole)
    model = streamed(family, precision=precision)
    assert same(answer(model), expected)
    assert moved(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_equal_to_plain_transformers(family: str) -> None:
    plain = tiny_models.build(family, **{FAMILIES[family]: EXPERTS}).eval()
    expected = answer(plain)
    model = streamed(family, precision="float32")
    torch.testing.assert_close(answer(model), expected, rtol=2e-5, atol=2e-6)


@torch.no_grad()
def test_bytes_of_a_token() -> None:
    """A token moves the weights of two experts and all that is no expert's."""
    model = streamed("qwen3_moe", precision="bf16")
    model(torch.tensor([[7]]))
    config = model.config
    expert = 3 * config.hidden_size * config.moe_intermediate_size * 2
    assert list(moved(model).values()) == [2 * expert] * config.num_hidden_layers
    found, slabs = horizon_lm.stats(model)["moved_bytes"], model._horizon.engine.store.units
    for unit in (block(0), block(1)):
        assert found[f"{Kind.STREAM_IN}:{unit}"] == slabs[unit].plain.weights.nbytes - EXPERTS * expert


@torch.no_grad()
@pytest.mark.parametrize(("tokens", "is_routed"), [(1, True), (4, True), (5, False)])
def test_up_to_half_of_the_experts(tokens: int, is_routed: bool) -> None:
    model = streamed("qwen3_moe")
    model(torch.arange(5, 5 + tokens)[None])
    assert bool(moved(model)) == is_routed


def test_not_with_gradients() -> None:
    model = streamed("qwen3_moe")
    model(torch.tensor([[7]]))
    assert not moved(model)


@torch.no_grad()
def test_resident_blocks_are_not_streamed() -> None:
    model = streamed("qwen3_moe", resident_blocks=2, activation_checkpoints="device")
    model(torch.tensor([[7]]))
    assert list(moved(model)) == ["block0"]


@torch.no_grad()
def test_dense_blocks_are_streamed_whole() -> None:
    model = streamed("deepseek_v3")
    model(torch.tensor([[7]]))
    assert "block0" not in moved(model)
    assert "block1" in moved(model)


@torch.no_grad()
@pytest.mark.parametrize(
    ("family", "kind"),
    thinned(
        [("qwen3_moe", "nf4"), ("gpt_oss", "mxfp4"), ("qwen3_moe", "4bit"), ("qwen3_moe", "int4"), ("qwen3_moe", "fp8")]
    ),
)
def test_quantized_experts(family: str, kind: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from tests.support.quantized_folders import opened, save_published

    folder = save_published(family, kind, tmp_path / "model", **{FAMILIES[family]: EXPERTS})

    with all_experts():
        whole = opened(folder, kind).eval()
        expected = answer(whole)
    model = opened(folder, kind).eval()
    assert same(answer(model), expected)
    some, every = (sum(moved(each).values()) for each in (model, whole))
    assert some > 0 == every
    assert sum(horizon_lm.stats(model)["moved_bytes"].values()) < sum(horizon_lm.stats(whole)["moved_bytes"].values())


@pytest.mark.parametrize("seed", range(3))
def test_any_order_that_the_waits_allow(seed: int) -> None:
    expected = answer(streamed("qwen3_moe", precision="float32"))
    device = SimulatedDevice(seed, eagerness=[None, 0.3, 0.9][seed])
    assert same(answer(streamed("qwen3_moe", device, precision="float32")), expected)


@pytest.mark.parametrize(("kind", "unit"), [(Kind.ROUTE, block(0)), (Kind.FORWARD, tile(2, 0))])
def test_a_dropped_wait_changes_the_numbers(kind: Kind, unit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control. The other waits of a routed pass are no data hazard: they order what the host already has ordered."""
    expected = answer(streamed("qwen3_moe", precision="float32"))
    made = build._forward

    def without(*args: Any) -> Schedule:
        schedule = made(*args)
        position = schedule.positions.get((kind, unit))
        if position is None or not any(op.kind == Kind.ROUTE for op in schedule.ops):
            return schedule
        (wait,) = schedule.ops[position].waits
        return without_wait(schedule, position, wait)

    monkeypatch.setattr(build, "_forward", without)
    devices = [SimulatedDevice(seed, eagerness=eagerness) for seed, eagerness in enumerate([0.0, 0.3, 0.9])]
    assert not all(same(answer(streamed("qwen3_moe", device, precision="float32")), expected) for device in devices)


@torch.no_grad()
def test_experts_that_are_not_streamed_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: the slots hold nothing that could stand in for them."""
    expected = answer(streamed("qwen3_moe", precision="float32"))
    model = streamed("qwen3_moe", SimulatedDevice(0), precision="float32")
    monkeypatch.setattr(WholeCall, "chosen", lambda self: [])
    got = answer(model)
    assert not same(got[1:-2], expected[1:-2])
