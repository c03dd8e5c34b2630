"""A model that is given other options goes on as if it had been streamed with them, and keeps nothing on the device."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.common.units import HEAD, block
from horizon_lm.errors import StreamingError
from horizon_lm.planning.arithmetic.residency import Residency
from horizon_lm.schedule.ops import Kind
from tests.support import tiny_models
from tests.support.device_short_of_memory import Computation, ShortDevice
from tests.support.gradients import losses_together

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


@pytest.mark.parametrize("head", ["chunked", "whole"])
def test_an_earlier_loss_is_given_up(head: str) -> None:
    """Its backward pass would land what was computed in buffers that are freed."""
    model = horizon_lm.stream(tiny_models.build("llama"), "cpu", precision="float32", head=head)
    earlier = model(**tiny_models.batch(seed=0)).loss
    losses = horizon_lm.run_together([lambda seed=seed: model(**tiny_models.batch(seed=seed)).loss for seed in (1, 2)])
    with pytest.raises(
        StreamingError, match=r"other options between .* Call backward before, or set device_micro_batch_size"
    ):
        earlier.backward()
    assert all(param.grad is None for param in model.parameters())
    sum(losses).backward()
    assert all(param.grad is not None for param in model.parameters())


def test_a_backward_pass_that_failed_in_other_code_is_abandoned() -> None:
    expected, model = (horizon_lm.stream(tiny_models.build("llama"), "cpu", precision="float32") for _ in range(2))

    def fail(*args: Any) -> None:
        raise torch.OutOfMemoryError("in a hook")

    hook = model.model.norm.register_full_backward_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        model(**tiny_models.batch(seed=0)).loss.backward()
    hook.remove()
    model.zero_grad()
    for each in (expected, model):
        losses_together(each, [tiny_models.batch(seed=seed) for seed in (1, 2)])
    for got, right in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(got.grad, right.grad)


@pytest.mark.parametrize(
    "other",
    [{"expert_tile": 1}, {"expert_tile": None}, {"head": "whole"}, {"compile": True}, {"mlp_chunk_tokens": 4}],
    ids=str,
)
def test_other_options_are_rejected(other: dict[str, Any]) -> None:
    model = horizon_lm.stream(tiny_models.build("qwen3_moe"), "cpu", expert_tile=2)
    forward = model._horizon
    with pytest.raises(StreamingError, match=f"{next(iter(other))} cannot be changed .* stream it again"):
        forward.reconfigure(replace(forward.engine.options, **other))
    assert forward.engine.options.expert_tile == 2
