"""Gradients that other code's autograd adds to those of the model: of a loss with a penalty on the weights themselves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="needs the whole installation")

import peft

import horizon_lm
from horizon_lm.errors import StreamingError
from tests.seams.compare import difference
from tests.seams.use import copied_gradients, copied_weights
from tests.support import tiny_models


def penalty(model: Any) -> torch.Tensor:
    """Return the penalty on all trained matrices, of which the model's own gradients are small beside it."""
    terms = [param.pow(2).sum() for param in model.parameters() if param.requires_grad and param.dim() > 1]
    return 0.1 * torch.stack(terms).sum()


def loss(model: Any, seed: int) -> torch.Tensor:
    return model(**tiny_models.batch(seed=seed)).loss  # type: ignore[no-any-return]


def backward_of_each(*values: Callable[[], torch.Tensor]) -> None:
    for value in values:
        value().backward()


AFTER: dict[str, Callable[[Any, int], None]] = {
    "after": lambda model, seed: backward_of_each(lambda: loss(model, seed), lambda: penalty(model)),
    "between": lambda model, seed: backward_of_each(
        lambda: loss(model, seed), lambda: penalty(model), lambda: loss(model, seed + 1)
    ),
    "twice": lambda model, seed: backward_of_each(
        lambda: loss(model, seed), lambda: penalty(model), lambda: penalty(model)
    ),
}
BEFORE: dict[str, Callable[[Any, int], None]] = {
    "in one loss": lambda model, seed: (loss(model, seed) + penalty(model)).backward(),
    "first in one loss": lambda model, seed: (penalty(model) + loss(model, seed)).backward(),
    "before": lambda model, seed: backward_of_each(lambda: penalty(model), lambda: loss(model, seed)),
}
BUILDS: dict[str, Callable[[], Any]] = {
    "all weights": lambda: tiny_models.build("llama"),
    "tied": lambda: tiny_models.build("llama", tie_word_embeddings=True),
    "adapters": lambda: peft.get_peft_model(
        tiny_models.build("llama"),
        peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
    ),
}


def built(name: str) -> Any:
    torch.manual_seed(0)
    return BUILDS[name]()


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("order", AFTER)
@pytest.mark.parametrize("build", BUILDS)
def test_gradients_are_those_of_both(build: str, order: str, device: str) -> None:
    """So is the norm for clipping, which is summed while gradients land: nobody has read a gradient."""
    models = {"plain": built(build), "streamed": horizon_lm.stream(built(build), device, "float32")}
    for kind, model in models.items():
        trained = [param for param in model.parameters() if param.requires_grad]
        plain = torch.optim.AdamW(trained, lr=1e-3, weight_decay=0.0, fused=True)
        optimizer = plain if kind == "plain" else horizon_lm.AdamW(model, lr=1e-3, weight_decay=0.0, max_grad_norm=0.1)
        for seed in range(3):
            AFTER[order](model, seed)
            if kind == "plain":
                torch.nn.utils.clip_grad_norm_(trained, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        AFTER[order](model, 0)
    assert difference(*map(copied_weights, models.values()), 1e-5) is None
    assert difference(*map(copied_gradients, models.values()), 1e-5) is None


def test_adapters_are_added_after_a_penalty() -> None:
    """The parameters that stay are attached again, and a penalty on them is still followed."""
    found = []
    for model in (built("all weights"), horizon_lm.stream(built("all weights"), "cpu", "float32")):
        AFTER["after"](model, 0)
        model.zero_grad()
        torch.manual_seed(1)
        tuned = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
        AFTER["twice"](tuned, 1)
        found.append(copied_gradients(tuned))
    assert difference(*found, 1e-5) is None


@pytest.mark.parametrize("order", BEFORE)
@pytest.mark.parametrize("build", BUILDS)
def test_a_penalty_before_the_model_is_rejected(build: str, order: str) -> None:
    """Autograd makes a gradient of its own, which has no place in host memory."""
    model = horizon_lm.stream(built(build), "cpu", "float32")
    with pytest.raises(StreamingError, match=r"\.grad was replaced .* on its own and after that of the model"):
        BEFORE[order](model, 0)


def test_without_memory_for_gradients_they_are_rejected() -> None:
    model = horizon_lm.stream(built("all weights"), "cpu", "float32")
    horizon_lm.AdamW(model, lr=1e-3, update_in_backward=True)
    with pytest.raises(StreamingError):
        AFTER["after"](model, 0)
