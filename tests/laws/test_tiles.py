"""Law: experts in tiles have the numbers of plain autograd and of plain PEFT, in every family, with every function and kind of adapters."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.engine.units import tiled_computation
from horizon_lm.model import expert_adapters
from tests.census.comparison import compare_step, train_step
from tests.census.subject import Subject
from tests.support import tiny_models
from tests.support.expert_models import EXPERTS, NAMES, assert_same, loss_and_gradients, plain
from tests.support.thinned_cases import thinned

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
OF_EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def adapted(model: Any, **config: Any) -> Any:
    """Return a model with adapters that are not zero, the same each time."""
    peft = pytest.importorskip("peft", reason="needs the whole installation")
    torch.manual_seed(3)
    settings = {"r": 4, "target_modules": ["q_proj", "o_proj"], "init_lora_weights": False} | config
    return peft.get_peft_model(model, peft.LoraConfig(**settings))


KINDS: dict[str, Callable[[Any], Any]] = {
    "all weights": lambda model: model,
    "adapters": adapted,
    "adapters of experts": lambda model: adapted(model, target_parameters=list(OF_EXPERTS)),
}
EACH = pytest.mark.parametrize("kind", KINDS)


def in_tiles(model: Any, tile: int) -> Any:
    return horizon_lm.stream(model, "cpu", precision="float32", head="whole", expert_tile=tile)


@EACH
@pytest.mark.parametrize("family", NAMES)
def test_bits_of_plain_models(family: str, kind: str) -> None:
    """With the auxiliary loss, where a family has one; gradients of several backward passes are added."""
    reference = KINDS[kind](plain(family))
    expected = [loss_and_gradients(reference, **tiny_models.batch(seed=seed)) for seed in (1, 2)]
    assert all(bool(grad.any()) for name, grad in expected[0][1].items() if ".experts." in name)
    for tile in (1, 3, EXPERTS):
        model = in_tiles(KINDS[kind](plain(family)), tile)
        assert max(model._horizon.engine.tiles.counts) == -(-EXPERTS // tile)
        for seed, each in zip((1, 2), expected, strict=True):
            assert_same(loss_and_gradients(model, **tiny_models.batch(seed=seed)), each)


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [
        *((each, "all weights") for each in ("glm4_moe", "olmoe", "granitemoe", "granitemoehybrid", "ernie4_5_moe")),
        ("glm4_moe", "adapters of experts"),
        ("olmoe", "adapters of experts"),
    ],
)
def test_bits_of_plain_models_in_more_families(model_type: str, kind: str) -> None:
    subject = Subject("causal", model_type)
    for tile in (1, 3):
        if kind == "all weights":
            model = subject.stream(expert_tile=tile, head="whole")
            assert sum(model._horizon.engine.tiles.counts) > 1
            outcome = compare_step(train_step(model, subject.batch(), use_cache=False), subject.plain, exact=True)
            assert (outcome.status, outcome.detail) == ("right", "bit for bit")
        else:
            expected = loss_and_gradients(KINDS[kind](subject.copy()), **subject.batch())
            assert_same(loss_and_gradients(in_tiles(KINDS[kind](subject.copy()), tile), **subject.batch()), expected)


@pytest.mark.parametrize("kind", ["all weights", "adapters of experts"])
@pytest.mark.parametrize("function", ["eager", "grouped_mm", "batched_mm"])
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_functions_of_transformers(family: str, function: str, kind: str) -> None:
    """`batched_mm` multiplies a single row by another kernel than several, so that a tile with one row differs in the last bits."""
    models = KINDS[kind](plain(family)), in_tiles(KINDS[kind](plain(family)), 3)
    for model in models:
        (model if kind == "all weights" else model.get_base_model()).set_experts_implementation(function)
    expected, got = map(loss_and_gradients, models)
    if function == "batched_mm":
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    else:
        assert_same(got, expected)


FORMATS = [("qwen3_moe", "fp8"), ("gpt_oss", "mxfp4"), ("qwen3_moe", "nf4"), ("mixtral", "4bit"), ("qwen3_moe", "int4")]


@pytest.mark.parametrize(
    ("kind", "format_"), thinned(itertools.product(["adapters", "adapters of experts"], FORMATS), every=3), ids=str
)
def test_quantized_experts(kind: str, format_: tuple[str, str], tmp_path: Path) -> None:
    """Gradients of adapters, of the model with the weights that transformers decodes, and the bits of whole blocks."""
    pytest.importorskip("peft", reason="needs the whole installation")
    from tests.support.quantized_folders import dequantized, opened, save_published

    family, stored = format_
    folder = save_published(family, stored, tmp_path / "model", **{NAMES[family]: EXPERTS})
    expected = loss_and_gradients(KINDS[kind](dequantized(folder, stored, opened(folder, stored)).train()))
    whole = loss_and_gradients(KINDS[kind](opened(folder, stored, head="whole").train()))
    torch.testing.assert_close(whole, expected, rtol=1e-4, atol=1e-6)
    for tile in (1, 3):
        model = KINDS[kind](opened(folder, stored, head="whole", expert_tile=tile).train())
        assert_same(loss_and_gradients(model), whole)


@EACH
def test_experts_without_tokens(kind: str) -> None:
    batch = tiny_models.batch(rows=1, length=2, padding="none")
    expected = loss_and_gradients(KINDS[kind](plain("qwen3_moe")), **batch)
    assert_same(loss_and_gradients(in_tiles(KINDS[kind](plain("qwen3_moe")), 1), **batch), expected)


FROZEN: dict[str, Callable[[str], bool]] = {  # by what is trained
    "the rest": lambda name: ".experts." not in name,
    "experts": lambda name: ".experts." in name,
    "experts of the first block": lambda name: "layers.0.mlp.experts" in name,  # nothing before them is trained
    "half of an adapter": lambda name: "lora_" in name and ("lora_B" in name or ".experts." not in name),
}


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("trained", FROZEN)
def test_a_part_is_frozen(trained: str, family: str) -> None:
    def partly(model: Any) -> Any:
        for name, param in model.named_parameters():
            param.requires_grad_(FROZEN[trained](name))
        return model

    kind = "adapters of experts" if trained == "half of an adapter" else "all weights"
    expected = loss_and_gradients(partly(KINDS[kind](plain(family))))
    assert_same(loss_and_gradients(partly(in_tiles(KINDS[kind](plain(family)), 3))), expected)


def test_adapters_of_other_experts_change_the_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Control: each tile gets the adapters of the first experts."""
    right = expert_adapters.of_experts

    def of_the_first(name: str, values: torch.Tensor, count: int, experts: slice) -> torch.Tensor:
        return right(name, values, count, slice(0, experts.stop - experts.start))

    monkeypatch.setattr(tiled_computation, "of_experts", of_the_first)
    expected = loss_and_gradients(KINDS["adapters of experts"](plain("qwen3_moe")))
    loss, _ = loss_and_gradients(in_tiles(KINDS["adapters of experts"](plain("qwen3_moe")), 4))
    assert not torch.equal(loss, expected[0])
