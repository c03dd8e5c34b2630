"""Steps of a tiny training, and the weights that they leave."""

from typing import Any

import torch

import horizon_lm
from tests.support import tiny_models


def step(model: Any, optimizer: Any, seed: int, updated: list[bool] | None = None) -> float:
    """Run a step; ``updated`` gets an entry when its gradients are complete."""
    loss = model(**tiny_models.batch(seed=seed)).loss
    loss.backward()
    if updated is not None:
        updated.append(True)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def weights(model: Any) -> list[torch.Tensor]:
    horizon_lm.synchronize(model)
    return [p.detach().clone() for p in model.parameters()]


def masters(model: Any) -> dict[str, torch.Tensor]:
    horizon_lm.synchronize(model)
    store = model._horizon.engine.store
    return {name: store.master(name).clone() for name in store.unit_of}
