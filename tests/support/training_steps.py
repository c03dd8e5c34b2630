"""Steps of a tiny training, with batches or with given gradients, and the weights that they leave."""

from collections.abc import Callable, Iterable
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


def train(model: Any, optimizer: Any, steps: Iterable[int]) -> list[float]:
    """Run steps, whose numbers are the seeds of their batches. Return the losses."""
    losses = [step(model, optimizer, seed) for seed in steps]
    horizon_lm.synchronize(model)
    return losses


def feed(model: Any, optimizers: Iterable[Any], num_steps: int, allocate: Callable[[], object] = lambda: None) -> None:
    """Make steps with given gradients, which are heavy-tailed with a scale that differs by parameter.

    Args:
        model: a plain or a streamed model, whose parameters have gradients to overwrite.
        optimizers: those of its parameters.
        num_steps: number of steps.
        allocate: called before each step, to allocate gradients that the step before has used up.
    """
    generator = torch.Generator().manual_seed(0)
    for _ in range(num_steps):
        allocate()
        for index, param in enumerate(model.parameters()):
            grad = torch.randn(param.shape, generator=generator)
            param.grad.copy_(grad * grad.abs() * 10.0 ** (-(index % 5)))
        for optimizer in optimizers:
            optimizer.step()


def weights(model: Any) -> list[torch.Tensor]:
    horizon_lm.synchronize(model)
    return [p.detach().clone() for p in model.parameters()]


def masters(model: Any) -> dict[str, torch.Tensor]:
    horizon_lm.synchronize(model)
    store = model._horizon.engine.store
    return {name: store.master(name).clone() for name in store.unit_of}


def same(model: Any, other: Any) -> bool:
    """Return whether two streamed models have the same weights, to the bit."""
    expected = masters(other)
    return all(torch.equal(master, expected[name]) for name, master in masters(model).items())
