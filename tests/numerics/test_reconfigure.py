"""A model that is given other options goes on as if it had been streamed with them, and keeps nothing on the device."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.planning.residency import Residency
from horizon_lm.schedule.ops import Kind
from horizon_lm.units import HEAD, block
from tests.support import tiny_models
from tests.support.device_short_of_memory import Computation, ShortDevice

LARGE: dict[str, Any] = {
    "activation_checkpoints": "device",
    "resident_blocks": 3,
    "resident_graphs": 2,
    "head_chunk_tokens": 8,
}
SMALL: dict[str, Any] = {
    "activation_checkpoints": 1,
    "resident_blocks": 1,
    "device_micro_batch_size": 2,
    "head_chunk_tokens": 3,
}


def make(device: ShortDevice, options: dict[str, Any], in_backward: bool) -> tuple[Any, Any]:
    model = horizon_lm.stream(tiny_models.build("llama"), device, precision="bf16", **options)
    return model, horizon_lm.AdamW(model, lr=1e-2, update_in_backward=in_backward)


def step(model: Any, optimizer: Any, seed: int) -> list[torch.Tensor]:
    """Run a step, and return the weights after it."""
    model(**tiny_models.batch(seed=seed)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    horizon_lm.synchronize(model)
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize(
    ("failure", "in_backward"),
    [
        ((Kind.FORWARD, block(1)), False),
        ((Kind.FORWARD, block(1)), True),
        ((Kind.FORWARD, HEAD), True),
        ((Kind.BACKWARD, block(2)), False),
        ((Kind.BACKWARD, block(0)), False),
        (None, False),
    ],
)
def test_a_reconfigured_engine_equals_a_fresh_one(failure: Computation | None, in_backward: bool) -> None:
    device, fresh = ShortDevice([failure] if failure else []), ShortDevice()
    model, optimizer = make(device, LARGE, in_backward)
    if failure:
        with pytest.raises(torch.OutOfMemoryError):
            step(model, optimizer, seed=1)
    else:
        model(**tiny_models.batch(seed=0)).loss.backward()  # its gradients are dropped
    optimizer.zero_grad()
    assert device.counters.allocated_total > 0
    forward = model._horizon
    smaller = {**Residency(1, 1).options(), "device_micro_batch_size": 2, "head_chunk_tokens": 3}
    forward.reconfigure(replace(forward.engine.options, **smaller))
    assert +device.counters.allocated == {}

    other, other_optimizer = make(fresh, SMALL, in_backward)
    assert +fresh.counters.allocated == {}
    for seed in (1, 2):
        for got, expected in zip(step(model, optimizer, seed), step(other, other_optimizer, seed), strict=True):
            assert torch.equal(got, expected)
        assert +device.counters.allocated == +fresh.counters.allocated
