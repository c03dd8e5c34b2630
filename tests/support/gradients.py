"""Take the gradients of models, and compare them."""

from typing import Any

import torch

import horizon_lm


def gradients(model: Any) -> dict[str, torch.Tensor]:
    return {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


def assert_equal_gradients(got: Any, expected: Any) -> None:
    ours, theirs = gradients(got), gradients(expected)
    assert ours.keys() == theirs.keys()
    different = [name for name in theirs if not torch.equal(ours[name], theirs[name])]
    assert not different, f"gradients differ: {different}"


def assert_close_gradients(got: Any, expected: Any, tolerance: float = 1e-4) -> None:
    for name, theirs in gradients(expected).items():
        error = (gradients(got)[name] - theirs).norm()
        # Some gradients are zero except for rounding (a key's bias does not change attention).
        assert error < tolerance * theirs.norm() + 1e-6, f"{name}: error {error:.2e} of {theirs.norm():.2e}"


def without_dropout(model: Any) -> Any:
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout"):
            if isinstance(module.__dict__.get(name), float):
                setattr(module, name, 0.0)
    for name in ("attention_dropout", "dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "hidden_dropout"):
        if hasattr(model.config, name):
            setattr(model.config, name, 0.0)
    return model


def losses_together(model: Any, parts: list[dict[str, torch.Tensor]]) -> list[float]:
    losses = horizon_lm.run_together([lambda part=part: model(**part).loss / len(parts) for part in parts])
    sum(losses).backward()
    return [loss.item() for loss in losses]
