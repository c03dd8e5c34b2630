"""What an objective is."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from horizon_lm.data.loader import Batch
from horizon_lm.device.base import Device
from horizon_lm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Loss:
    """What an objective makes of a batch.

    Attributes:
        value: a scalar with its graph; the mean over ``weight`` things.
        weight: of the batch in a mean over several: its trained tokens, or its pairs.
        metrics: sums over the same things, by name; they are logged as means.
    """

    value: torch.Tensor
    weight: float
    metrics: Mapping[str, float] = field(default_factory=dict)


def with_balance(loss: torch.Tensor, aux_loss: torch.Tensor | None) -> torch.Tensor:
    """A loss with what the model adds to it for the balance of experts."""
    return loss if aux_loss is None else loss + aux_loss.to(loss.device)


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Put a model into evaluation mode, make no graphs, and leave all generators as they were before."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), _generators_forked(model._horizon.engine.device):
            yield
    finally:
        model.train(was_training)


@contextmanager
def _generators_forked(device: Device) -> Iterator[None]:
    """Leave the generators of Python, numpy and torch, on the host and on the device, as they were before."""
    of_python, of_numpy, of_torch = random.getstate(), np.random.get_state(), device.rng_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        device.set_rng_state(of_torch)


class Objective(Protocol):
    """A loss of a batch. The rows of a step are one batch, however few of them are on the device at once."""

    def __call__(self, model: Any, batch: Batch) -> Loss: ...


class OwnObjective:
    """A user's function as an objective.

    Args:
        function: given the streamed model and a `Batch`, returns the loss, a scalar tensor, or the loss and a dict of numbers
            to log.
    """

    def __init__(self, function: Callable[[Any, Batch], Any]) -> None:
        self._function = function

    def __call__(self, model: Any, batch: Batch) -> Loss:
        result = self._function(model, batch)
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError("an objective returns the loss as a tensor of one number, or it and a dict of numbers")
        return Loss(loss, 1.0, {name: _number(value) for name, value in metrics.items()})


def _number(value: Any) -> float:
    return float(value.item() if isinstance(value, torch.Tensor) else value)
