"""Train with every kind of pass after every other kind, to show what the order of operations changes."""

from collections.abc import Iterator
from typing import Any

import torch

import horizon_lm
from tests.support import tiny_models

Result = tuple[list[float], list[torch.Tensor]]
SETTINGS: dict[str, dict[str, Any]] = {
    "boundaries on the device": {},
    "boundaries on the host": {"activation_checkpoints": "host"},
    "micro-batches": {"activation_checkpoints": "host", "device_micro_batch_size": 1},
    "whole head": {"head": "whole", "activation_checkpoints": "host"},
    "resident blocks": {"activation_checkpoints": "host", "resident_blocks": 2, "resident_graphs": 1},
    "update in backward": {"activation_checkpoints": "host", "update_in_backward": True},
    "update in backward, tied": {"tied": True, "update_in_backward": True},
}


def losses_of(model: Any, num_steps: int) -> Iterator[float]:
    """Return losses from every kind of pass after every other kind: abandoned forward passes, evaluation, two forward
    passes in a row.
    """
    optimizer = horizon_lm.AdamW(model, lr=1e-2, max_grad_norm=0.5)

    def forward(seed: int) -> torch.Tensor:
        return model(**tiny_models.batch(seed=seed)).loss

    for step in range(num_steps):
        with torch.no_grad():
            yield forward(98).item()
        loss = forward(step)
        yield loss.item()
        forward(50)
        (3 * loss).backward()
        with torch.no_grad():
            yield forward(99).item()
        loss = forward(7) + forward(8)
        yield loss.item()
        loss.backward()
        forward(51)
        loss = forward(9)
        yield loss.item()
        (2 * loss).backward()
        forward(10).backward()
        optimizer.step()
        optimizer.zero_grad()
        # The first forward pass after an update completes it; all later passes must wait for that.
        loss = forward(11)
        with torch.no_grad():
            yield forward(97).item()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        (forward(12) + forward(13)).backward()
        optimizer.step()
        optimizer.zero_grad()
        forward(14).backward()
        optimizer.step()
        optimizer.zero_grad()


def losses_of_one_backward(model: Any, num_steps: int) -> Iterator[float]:
    """Return the losses of steps with one backward pass each, which updates the weights."""
    optimizer = horizon_lm.AdamW(model, lr=1e-2, update_in_backward=True)

    def forward(seed: int) -> torch.Tensor:
        return model(**tiny_models.batch(seed=seed)).loss

    def step(loss: torch.Tensor) -> None:
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for seed in range(num_steps):
        loss = forward(seed)
        yield loss.item()
        yield forward(50).item()  # abandoned
        with torch.no_grad():
            yield forward(99).item()
        step(3 * loss)
        with torch.no_grad():
            yield forward(99).item()
        pending = forward(51)  # occupies the head's buffer, so that the next forward pass cannot use it
        yield pending.item()
        loss = forward(8)
        yield loss.item()
        step(loss)
        del pending
        with torch.no_grad():
            yield forward(97).item()
        loss = forward(9)
        yield loss.item()
        step(2 * loss)
        pending = forward(52)
        loss = forward(10)
        yield loss.item()
        step(loss)
        del pending
        loss = forward(11)
        with torch.no_grad():
            yield forward(96).item()
        step(loss)


def train(
    device: Any, expected: Result | None = None, num_steps: int = 2, tied: bool = False, update_in_backward: bool = False,
    **settings: Any,
) -> Result:  # fmt: skip
    """Return losses and final weights. Stop at the first unexpected loss."""
    model = horizon_lm.stream(tiny_models.build("llama", tie_word_embeddings=tied), device, **settings)
    losses: list[float] = []
    for loss in (losses_of_one_backward if update_in_backward else losses_of)(model, num_steps):
        losses.append(loss)
        if expected is not None and loss != expected[0][len(losses) - 1]:
            return losses, []
    horizon_lm.synchronize(model)
    store = model._horizon.engine.store
    return losses, [store.master(name).clone() for name in store.unit_of]


def same(a: Result, b: Result) -> bool:
    return a[0] == b[0] and len(a[1]) == len(b[1]) and all(torch.equal(x, y) for x, y in zip(a[1], b[1], strict=True))
