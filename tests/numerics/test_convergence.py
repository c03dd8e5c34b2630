"""bf16 weights rounded to nearest lose small updates; the supported precisions do not."""

from functools import cache
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import horizon_lm
from horizon_lm.memory.kernels import updates
from horizon_lm.memory.kernels.bits import inlined, nearest
from horizon_lm.optim import update_tasks

VOCABULARY, ROWS, LENGTH, STEPS = 64, 8, 32, 100


def batch(seed: int, shift: int) -> dict[str, torch.Tensor]:
    """Return sequences with a rule to learn: each token follows from the one before it, with a little noise."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=generator)
    for t in range(2, LENGTH):
        follows = torch.rand(ROWS, generator=generator) < 0.9
        ids[:, t] = torch.where(follows, (ids[:, t - 1] + shift) % VOCABULARY, ids[:, t])
    return {"input_ids": ids, "labels": ids}


@pytest.fixture(scope="module")
def pretrained() -> dict[str, torch.Tensor]:
    """Return the weights of a small model that has learned one rule."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(STEPS):
        model(**batch(step, shift=0)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.to(torch.bfloat16) for name, value in model.state_dict().items()}


def build() -> Any:
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64,
    )  # fmt: skip
    torch.manual_seed(0)
    return LlamaForCausalLM(config)


def fine_tune(
    weights: dict[str, torch.Tensor], lr: float, precision: str, steps: int = STEPS, **options: Any
) -> tuple[float, float]:
    """Return the validation loss after learning another rule, and the share of weights that did not change."""
    model = build().to(torch.bfloat16)
    model.load_state_dict(weights)
    model = horizon_lm.stream(model, precision=precision)
    optimizer = horizon_lm.AdamW(model, lr=lr, **options)
    for step in range(steps):
        model(**batch(1000 + step, shift=7)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        loss = sum(model(**batch(5000 + n, shift=7)).loss.item() for n in range(8)) / 8
    horizon_lm.synchronize(model)
    store = model._horizon.engine.store
    same = sum(int((store.master(name) == weights[name].float()).sum()) for name in store.unit_of)
    return loss, same / sum(value.numel() for name, value in weights.items() if name in store.unit_of)


MODES: dict[str, dict[str, Any]] = {
    "fp32_master": {"precision": "fp32_master"},
    "bf16, stochastic": {"precision": "bf16"},
    "fp32_master, bf16 moments": {"precision": "fp32_master", "moments": "bfloat16"},
    "bf16, bf16 moments": {"precision": "bf16", "moments": "bfloat16"},
    "fp32_master, 8-bit moments": {"precision": "fp32_master", "moments": "8bit"},
    "bf16, 8-bit moments": {"precision": "bf16", "moments": "8bit"},
    "bf16, in the backward": {"precision": "bf16", "update_in_backward": True},
}


@pytest.mark.parametrize(
    ("lr", "modes", "share_lost", "never_changed"),
    [
        (1e-5, ["fp32_master", "bf16, stochastic"], 0.3, 0.8),
        pytest.param(1e-4, list(MODES), 0.1, 0.2, marks=pytest.mark.slow),
    ],
)
def test_modes_keep_updates_that_rounding_to_nearest_loses(
    pretrained: dict[str, torch.Tensor],
    lr: float,
    modes: list[str],
    share_lost: float,
    never_changed: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, _ = fine_tune(pretrained, lr, "float32", steps=0)
    exact, _ = fine_tune(pretrained, lr, "float32")
    learned = before - exact
    results = {name: fine_tune(pretrained, lr, **MODES[name]) for name in modes}
    monkeypatch.setitem(updates.WEIGHT_CODECS, "bf16", (updates.WEIGHT_CODECS["bf16"][0], _write_nearest))
    for name in ("update_kernel", "rows_kernel"):  # compiled anew; other tests keep theirs
        monkeypatch.setattr(update_tasks, name, cache(getattr(updates, name).__wrapped__))
    lost, unchanged = fine_tune(pretrained, lr, "bf16")

    print(f"lr {lr}: before {before:.4f}, float32 {exact:.4f}; nearest {lost:.4f} ({unchanged:.1%} never changed)")
    for name, (loss, same) in results.items():
        print(f"  {name}: {loss:.4f} ({same:.1%} never changed)")
    assert learned > 0.1
    assert lost - exact > share_lost * learned
    assert unchanged > never_changed
    for name, (loss, _) in results.items():
        assert abs(loss - exact) < 0.1 * learned, name


@inlined
def _write_nearest(weights: Any, low: Any, i: int, value: Any, noise: Any) -> None:
    weights[i] = nearest(value)
