"""Define objectives and their losses, and adapt a user's loss function."""

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import torch

from horizon_lm.common.constants import IGNORE_INDEX
from horizon_lm.device.base import Device
from horizon_lm.device.host_copy import HostCopy
from horizon_lm.engine.streamed import engine_of
from horizon_lm.errors import ConfigError
from horizon_lm.runs.data.batch import Batch


@dataclass(frozen=True, slots=True)
class TokenSums:
    """Sums of a statistic over the targets of R rows or pairs.

    Attributes:
        sums: shape (R,).
        counts: number of targets, shape (R,), on the host.
    """

    sums: HostCopy
    counts: torch.Tensor

    def of_micro_batches(self, num_rows: int) -> list[tuple[float, int]]:
        """Return the sum and the number of targets of each micro-batch of ``num_rows`` rows; the last one may be smaller."""
        sums = self.sums.read().double().split(num_rows)
        counts = self.counts.split(num_rows)
        return [(float(s.sum()), int(n.sum())) for s, n in zip(sums, counts, strict=True)]

    def means(self, num_rows: int) -> list[float]:
        """Return the mean over the targets of each micro-batch of ``num_rows`` rows; 0 without targets, as in TRL."""
        return [total / max(1, count) for total, count in self.of_micro_batches(num_rows)]


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of a batch.

    Attributes:
        value: scalar tensor with its graph, the mean over the batch's targets or pairs.
        weight: number of targets or pairs, which weights the batch in a mean over batches.
        metrics: sums over the same targets or pairs by name; they are logged as means.
        token_metrics: sums over targets by name; they are logged as TRL does, as means of the means of micro-batches.
    """

    value: torch.Tensor
    weight: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    token_metrics: Mapping[str, TokenSums] = field(default_factory=dict)


def without_adapters(model: Any) -> AbstractContextManager[Any]:
    """Context manager: compute with the base of a PEFT model; no change to any other model."""
    return getattr(model, "disable_adapter", nullcontext)()


def num_targets(batch: Batch) -> torch.Tensor:
    """Return the number of targets of each row, shape (B,)."""
    return (batch.labels[:, 1:] != IGNORE_INDEX).sum(1)


def add_aux_loss(loss: torch.Tensor, aux_loss: torch.Tensor | None, batch: Batch) -> torch.Tensor:
    """Return a loss plus the auxiliary loss that balances the experts of a mixture, if there is one.

    Each rank balances the experts over its own rows. Its auxiliary loss is weighted by its share of the rows, so that the sum over the
    ranks is the mean of their auxiliary losses.
    """
    if aux_loss is None:
        return loss
    aux_loss = aux_loss.to(loss.device)
    return loss + (aux_loss if batch.share == 1 else aux_loss * batch.share)


def share_aux_loss(loss: torch.Tensor, output: Any, model: Any, batch: Batch) -> torch.Tensor:
    """Return the loss in a model's output, with the auxiliary loss in it weighted by the batch's share of the step.

    The model has added the whole auxiliary loss already, so the part of it beyond the share is subtracted.
    """
    aux_loss = getattr(output, "aux_loss", None)
    if aux_loss is None or batch.share == 1:
        return loss
    return loss - (1 - batch.share) * model.router_aux_loss_coef * aux_loss.to(loss.device)


@contextmanager
def evaluation_mode(model: Any) -> Iterator[None]:
    """Context manager: evaluate a model without gradients, and restore its mode and all random states."""
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), _random_states_restored(engine_of(model).device):
            yield
    finally:
        model.train(was_training)


@contextmanager
def _random_states_restored(device: Device) -> Iterator[None]:
    """Context manager: restore the random states of Python, numpy and torch, on the host and on the device."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with device.rng_state_restored():
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)


class Objective(Protocol):
    """A function from a model and a batch to a loss. The batch has all rows of a step, regardless of micro-batches."""

    def __call__(self, model: Any, batch: Batch) -> Loss: ...


class CustomObjective:
    """The objective of a user's loss function.

    Args:
        function: function that takes the streamed model and a `Batch`, and returns the loss as a scalar tensor, or the
            loss and a dict of metrics. Of several ranks, each gets its rows of a step.
    """

    def __init__(self, function: Callable[[Any, Batch], Any]) -> None:
        self._function = function

    def __call__(self, model: Any, batch: Batch) -> Loss:
        result = self._function(model, batch if batch.share == 1 else _with_share_of_targets(batch))
        loss, metrics = result if isinstance(result, tuple) else (result, {})
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise ConfigError("an objective must return a scalar tensor, or a scalar tensor and a dict of numbers")
        loss = loss if batch.share == 1 else loss * batch.share
        return Loss(loss, 1.0, {name: _number(value) for name, value in metrics.items()})


def _with_share_of_targets(batch: Batch) -> Batch:
    """Return a rank's batch for a user's loss function, which divides a sum over targets by ``num_trained``.

    The loss is multiplied by the rank's share of the rows afterwards, but its share of the targets may be another. With the number set
    here, the product is the sum over the rank's targets, divided by the normalizer of the step.
    """
    return batch if batch.is_stand_in else replace(batch, num_trained=batch.normalizer * batch.share)


def _number(value: Any) -> float:
    """Return a number, which may be a tensor with one element."""
    return float(value.item() if isinstance(value, torch.Tensor) else value)
