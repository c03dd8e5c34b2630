"""Weights that transformers keeps in float32 are stored, streamed and updated in float32, as plain transformers trains them."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import horizon_lm
from horizon_lm.device.simulated import SimulatedDevice
from horizon_lm.engine.host.slab_parts import SlabPart
from tests.census.inputs import text_batch
from tests.census.tiny_models import build
from tests.support import tiny_models
from tests.support.float32_llama import float32_llama
from tests.support.pass_sequences import same, train
from tests.support.thinned_cases import covering, thinned

SINCE = {
    "bailing_hybrid": "5.23",
    "deepseek_v4": "5.23",
}  # older versions keep none, or cannot compute them in bfloat16
TYPES = ["bailing_hybrid", "deepseek_v4", "ernie4_5_moe", "hunyuan_v1_moe", "hy_v4", "olmo_hybrid"]
STEPS = 3


def folder_of(model_type: str, folder: Path) -> Any:
    """Save a model of this type in bfloat16, but for what transformers keeps in float32, and return its class."""
    if transformers.__version__ < SINCE.get(model_type, "5"):
        pytest.skip("this transformers has no such weights")
    model = build(model_type)
    model.save_pretrained(folder / "float32")
    opened = type(model).from_pretrained(folder / "float32", dtype=torch.bfloat16)
    opened.save_pretrained(folder)
    return type(model)


def kept_of(model: Any) -> dict[str, torch.nn.Parameter]:
    """Return the weights in float32 of a model in bfloat16."""
    return {name: each for name, each in model.named_parameters() if each.dtype == torch.float32}


def opened(folder: Path, **options: Any) -> Any:
    settings = {"precision": "fp32_master", "compute_dtype": torch.bfloat16, "head": "whole", "device": "cpu"}
    return horizon_lm.from_pretrained(folder, allow_unproven_model=True, **(settings | options)).train()


def trained(model: Any, optimizer: Any, batch: Any, steps: int = STEPS) -> list[dict[str, torch.Tensor]]:
    """Return the gradients of the trained weights in each step."""
    found = []
    for _ in range(steps):
        model(**batch, use_cache=False).loss.backward()
        found.append({n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad and p.grad is not None})
        optimizer.step()
        optimizer.zero_grad()
    return found


def train_only(model: Any, names: Any) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)


@pytest.mark.parametrize(("model_type", "precision"), covering(TYPES, ("bf16", "fp32_master")))
def test_values_and_logits_are_those_of_transformers(model_type: str, precision: str, tmp_path: Path) -> None:
    plain = folder_of(model_type, tmp_path).from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    tiny_models.attending_as_streamed(plain)
    kept, batch = kept_of(plain), text_batch(model_type)
    assert any(not torch.equal(each.bfloat16().float(), each) for each in kept.values())
    model = opened(tmp_path, precision=precision)
    assert kept_of(model).keys() == kept.keys()
    for name, own in model.named_parameters():
        assert torch.equal(own, plain.get_parameter(name)), name
    with torch.no_grad():
        expected = plain(**batch, use_cache=False).logits
        assert torch.equal(model(**batch, use_cache=False).logits, expected)
        if model_type == "hunyuan_v1_moe":  # whose logits in bfloat16 are too coarse to show it
            return
        for each in kept.values():
            each.copy_(each.bfloat16())
        assert not torch.equal(plain(**batch, use_cache=False).logits, expected)


@pytest.mark.parametrize("options", [{}, {"device": "simulated"}], ids=str)
@pytest.mark.parametrize("model_type", ["ernie4_5_moe", "hy_v4"])
def test_gradients_and_steps_are_those_of_a_float32_parameter(
    model_type: str, options: dict[str, Any], tmp_path: Path
) -> None:
    plain = folder_of(model_type, tmp_path).from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    tiny_models.attending_as_streamed(plain)
    kept, batch = kept_of(plain), text_batch(model_type)
    model = opened(tmp_path, **options)
    for each in (plain, model):
        train_only(each, kept)
    before = {name: each.detach().clone() for name, each in kept.items()}
    settings = {"lr": 1e-2, "weight_decay": 0.1}
    theirs = trained(plain, torch.optim.AdamW(list(kept.values()), fused=True, **settings), batch)
    ours = trained(model, horizon_lm.AdamW(model, **settings), batch)
    horizon_lm.synchronize(model)
    for name, each in kept.items():
        assert all(step[name].dtype == torch.float32 for step in ours if name in step)
        assert name not in theirs[0] or torch.equal(ours[0][name], theirs[0][name]), name
        movement = (each - before[name]).norm()
        assert (model.get_parameter(name) - each).norm() <= 1e-5 * movement, name
        assert name not in theirs[0] or movement > 0


@pytest.mark.parametrize("precision", ["bf16", "fp32_master"])
def test_an_exported_checkpoint_keeps_them_in_float32(precision: str, tmp_path: Path) -> None:
    pytest.importorskip("xxhash", reason="needs the whole installation")
    folder_of("ernie4_5_moe", tmp_path / "model")
    model = opened(tmp_path / "model", precision=precision)
    optimizer = horizon_lm.AdamW(model, lr=1e-2)
    trained(model, optimizer, text_batch("ernie4_5_moe"), 2)
    horizon_lm.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    horizon_lm.export_checkpoint(tmp_path / "checkpoint", tmp_path / "exported")
    assert type(model.config).from_pretrained(tmp_path / "exported").dtype == torch.bfloat16
    exported = opened(tmp_path / "exported", precision=precision)
    assert kept_of(exported)
    for name, each in kept_of(exported).items():
        assert torch.equal(each, model.get_parameter(name)), name


@pytest.mark.parametrize("four_bits", thinned([True, False], every=2))
def test_adapters_on_a_base_with_such_weights(four_bits: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="needs the whole installation")
    plain = folder_of("ernie4_5_moe", tmp_path).from_pretrained(tmp_path, dtype=torch.bfloat16).train()
    kept, batch = kept_of(plain), text_batch("ernie4_5_moe")
    model = opened(tmp_path, load_in_4bit=four_bits)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], init_lora_weights=False)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, config)
    base = {name.replace(".base_layer.", "."): each for name, each in model.named_parameters()}
    for name, each in kept.items():
        assert torch.equal(base[name], each), name
    optimizer = horizon_lm.AdamW(adapted, lr=1e-2)
    trained(adapted, optimizer, batch)
    horizon_lm.synchronize(adapted)
    for name, each in kept.items():
        assert torch.equal(base[name], each), name
    if four_bits:
        return
    torch.manual_seed(0)
    other = peft.get_peft_model(plain, config, autocast_adapter_dtype=False)
    again = opened(tmp_path)
    torch.manual_seed(0)
    again = peft.get_peft_model(again, config)
    for name, parameter in other.named_parameters():
        if "lora" in name:
            parameter.data = again.get_parameter(name).data.detach().clone().bfloat16()
    with torch.no_grad():
        expected = other(**batch, use_cache=False).logits
        assert torch.equal(again(**batch, use_cache=False).logits, expected)


def test_slabs_that_are_not_moved_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    with float32_llama():
        expected = train("cpu", num_steps=1)
        own_rows = SlabPart.own_rows
        monkeypatch.setattr(SlabPart, "own_rows", lambda part, some: [own_rows(part, some)[0], []])
        assert not same(train(SimulatedDevice(0), expected, num_steps=1), expected)


@pytest.mark.parametrize("update_in_backward", [False, True])
def test_a_model_in_float32_is_trained_as_before(update_in_backward: bool) -> None:
    """Slabs of their own change no bit in ``float32``, where all weights are."""
    expected = _trained_llama(update_in_backward)
    with float32_llama():
        found = _trained_llama(update_in_backward)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], each) for name, each in expected.items())


def _trained_llama(update_in_backward: bool) -> dict[str, torch.Tensor]:
    """Return all weights after some steps."""
    model = horizon_lm.stream(tiny_models.build("llama"), "cpu", precision="float32")
    optimizer = horizon_lm.AdamW(model, lr=1e-2, update_in_backward=update_in_backward)
    for seed in range(STEPS):
        model(**tiny_models.batch(seed=seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    horizon_lm.synchronize(model)
    return {name: each.clone() for name, each in model.state_dict().items()}
