"""Helpers for the bodies of rows, which run on plain and on streamed models."""

from collections.abc import Iterable
from typing import Any

import torch

import horizon_lm
from horizon_lm.engine.opening.streamed_model import StreamedModel
from tests.support import tiny_models


def is_streamed(model: Any) -> bool:
    """Return whether a model, or the model that it wraps, is streamed."""
    return any(isinstance(module, StreamedModel) for module in model.modules())


def loss(model: Any, **arguments: Any) -> torch.Tensor:
    """Return the loss of the usual batch."""
    return model(**(tiny_models.batch() | arguments)).loss


def evaluated(model: Any, **arguments: Any) -> float:
    """Return the loss of the usual batch in evaluation mode, without gradients."""
    training = model.training
    model.eval()
    with torch.no_grad():
        value = float(loss(model, **arguments).detach())
    model.train(training)
    return value


def gradients(model: Any, **arguments: Any) -> dict[str, Any]:
    """Clear all gradients, then return the loss and the gradients of the usual batch."""
    model.zero_grad()
    value = loss(model, **arguments)
    value.backward()
    return {"loss": float(value.detach()), "gradients": copied_gradients(model)}


def copied_gradients(model: Any) -> dict[str, torch.Tensor | None]:
    """Return copies of the gradients of all parameters."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def copied_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return copies of the weights, as in a checkpoint."""
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def train(model: Any, optimizer: Any, steps: int = 3, **arguments: Any) -> list[float]:
    """Run training steps, each on a different batch, and return the losses."""
    losses = []
    for step in range(steps):
        value = model(**(tiny_models.batch(seed=step) | arguments)).loss
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(value.detach()))
    return losses


def adamw(
    model: Any, lr: float = 1e-2, weight_decay: float = 0.1, params: Iterable[Any] | None = None, **ours: Any
) -> Any:
    """Return Horizon-LM's AdamW for a streamed model, torch's for a plain one. ``ours``: settings only for
    Horizon-LM's.
    """
    if is_streamed(model):
        return horizon_lm.AdamW(model, lr=lr, weight_decay=weight_decay, params=params, **ours)
    params = model.parameters() if params is None else params
    return torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay, foreach=False)
