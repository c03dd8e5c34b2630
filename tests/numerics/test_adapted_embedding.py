"""Adapters of the input embedding, trained copies of it and trained tokens: as in plain PEFT over several steps."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.thinned_cases import covering, thinned

pytest.importorskip("peft", reason="needs the whole installation")

from peft import LoraConfig, get_peft_model

import horizon_lm
from horizon_lm.device.cuda import CudaDevice
from horizon_lm.errors import ModelNotSupportedError
from tests.seams.compare import difference
from tests.support import tiny_models
from tests.support.emulated_gpu import emulated_gpu

pytestmark = pytest.mark.filterwarnings("ignore")
MODULES = ["q_proj", "v_proj", "down_proj"]
TOKENS = [40, 1, 7, 22, 5, 63, 13, 2, 3]


def lora(**settings: Any) -> Callable[[], Any]:
    return lambda: LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": MODULES} | settings))


KINDS: dict[str, Callable[[], Any]] = {
    "copy": lora(modules_to_save=["embed_tokens"]),
    "copies": lora(modules_to_save=["lm_head", "embed_tokens"]),
    "copy-of-head": lora(modules_to_save=["lm_head"]),
    "lora": lora(target_modules=[*MODULES, "embed_tokens"]),
    "lora-of-both": lora(target_modules=[*MODULES, "embed_tokens", "lm_head"]),
    "tokens": lora(trainable_token_indices=TOKENS),
}
FAMILIES = ["llama", "gemma3_text"]


def build(family: str, tied: bool) -> Any:
    return tiny_models.build(family, tie_word_embeddings=tied)


def adapted(model: Any, *configs: Any) -> Any:
    """Return a model with adapters that change what it computes."""
    for number, config in enumerate(configs):
        torch.manual_seed(1 + number)
        if number:
            model.add_adapter(f"adapter{number}", config)
        else:
            model = get_peft_model(model, config)
    torch.manual_seed(3)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if any(part in name for part in ("lora_", "modules_to_save", "trainable_tokens")):
                param.data.add_(torch.randn(param.shape).to(param.dtype) * 0.02)
    return model


def stream(model: Any, device: Any = "cpu", **settings: Any) -> Any:
    return horizon_lm.stream(model, device, "float32", **settings)


def steps(model: Any, optimizer: Any, count: int = 4) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Train, and evaluate the base between steps. Return the losses, and the trained weights."""
    losses = []
    for seed in range(count):
        torch.manual_seed(seed)
        loss = model.train()(**tiny_models.batch(seed=seed)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), model.disable_adapter():
            base = model.eval()(**tiny_models.batch(seed=seed + 1)).loss
        losses += [loss.detach().clone(), base.clone()]
    return losses, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize(
    ("family", "kind", "tied"),
    thinned(itertools.product(FAMILIES, KINDS, [False, True]), every=5, keep=[("llama", "lora", True)]),
)
def test_steps_are_those_of_plain_peft(family: str, kind: str, tied: bool) -> None:
    config, learning = KINDS[kind], {"lr": 1e-2, "weight_decay": 0.1}
    plain = adapted(build(family, tied), config())
    trained = [param for param in plain.parameters() if param.requires_grad]
    losses, expected = steps(plain, torch.optim.AdamW(trained, **learning))
    for model in (stream(adapted(build(family, tied), config())), adapted(stream(build(family, tied)), config())):
        found, got = steps(model, horizon_lm.AdamW(model, **learning))
        torch.testing.assert_close(found, losses, rtol=3e-6, atol=0)
        assert difference(expected, got, 1e-5) is None


@pytest.mark.parametrize(
    ("kind", "settings"),
    covering(("copy", "lora", "tokens"), [{"device_micro_batch_size": 1}, {"head": "whole"}]),
    ids=str,
)
def test_other_settings(kind: str, settings: Any) -> None:
    losses, expected = steps(*_with_optimizer(stream(adapted(build("llama", True), KINDS[kind]()))))
    found, got = steps(*_with_optimizer(stream(adapted(build("llama", True), KINDS[kind]()), **settings)))
    torch.testing.assert_close(found, losses, rtol=3e-6, atol=0)
    assert difference(expected, got, 1e-4) is None


def _with_optimizer(model: Any) -> tuple[Any, Any]:
    return model, horizon_lm.AdamW(model, lr=1e-2)


@pytest.mark.parametrize("kind", ["copy", "copies", "tokens"])
def test_the_copy_in_use_is_switched(kind: str) -> None:
    """Two adapters, each with an embedding of its own, are trained in turn."""
    results = []
    for streams in (False, True):
        torch.manual_seed(0)
        model = adapted(build("llama", False), KINDS[kind](), lora(modules_to_save=["embed_tokens"], r=2)())
        model = stream(model) if streams else model
        losses = []
        for name in ("adapter1", "default", "adapter1"):
            model.set_adapter(name)
            loss = model.train()(**tiny_models.batch()).loss
            loss.backward()
            grads = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.grad is not None}
            with torch.no_grad():
                logits = model.eval()(input_ids=tiny_models.batch()["input_ids"]).logits
            losses.append((loss.detach(), logits, grads))
            model.zero_grad()
        results.append(losses)
    for plain, streamed in zip(*results, strict=True):
        torch.testing.assert_close(streamed[:2], plain[:2], rtol=3e-6, atol=1e-6)
        assert difference(plain[2], streamed[2], 0.0) is None


def test_a_copy_tied_to_a_copy_of_the_head_is_rejected() -> None:
    config = lora(modules_to_save=["lm_head", "embed_tokens"], ensure_weight_tying=True)
    with pytest.raises(ModelNotSupportedError, match="ensure_weight_tying"):
        stream(adapted(build("llama", True), config()))


@pytest.mark.parametrize("kind", thinned(["lora-of-both", "copy", "tokens"]))
def test_the_host_waits_for_no_lookup_on_an_emulated_gpu(kind: str) -> None:
    expected = steps(*_with_optimizer(stream(adapted(build("llama", True), KINDS[kind]()))))
    with emulated_gpu() as gpu:
        model = stream(
            adapted(build("llama", True), KINDS[kind]()), CudaDevice(), compile=False, attn_implementation="sdpa"
        )
        got = steps(*_with_optimizer(model))
        gpu.waits.clear()
        with torch.no_grad():
            model.eval()(**tiny_models.batch())
        waits = [wait for wait in gpu.waits if "embedding" in wait or "trained_tokens" in wait]
        assert not waits, waits
    assert [loss.item() for loss in got[0]] == [loss.item() for loss in expected[0]]
    assert difference(expected[1], {name: value.cpu() for name, value in got[1].items()}, 0.0) is None
