"""A block may write to a container among its arguments, but not read what another block has written there."""

from collections import UserDict
from typing import Any

import pytest
import torch

import horizon_lm
from tests.support import tiny_models


class _Shared(UserDict[str, Any]):
    """A container that pytree does not know, so that all blocks get the same one, as that of Gemma 4 for shared keys."""


def model_with_container(container: Any, change: Any) -> Any:
    """Return a Llama whose model gives all blocks a container, which ``change`` gets with the block's number and hidden states."""
    model = tiny_models.build("llama")
    for index, layer in enumerate(model.model.layers):

        def forward(
            hidden: torch.Tensor, *args: Any, index: int = index, plain: Any = layer.forward, **kwargs: Any
        ) -> Any:
            change(kwargs.pop("shared"), index, hidden)
            return plain(hidden, *args, **kwargs)

        layer.forward = forward
    run = model.model.forward
    model.model.forward = lambda *args, **kwargs: run(*args, shared=container(), **kwargs)
    return model


def write(shared: Any, index: int, hidden: torch.Tensor) -> None:
    shared["hidden"] = hidden, hidden


def read(shared: Any, index: int, hidden: torch.Tensor) -> None:
    write(shared, index, hidden) if index == 0 else shared["hidden"][0].sum()


def unpack(shared: Any, index: int, hidden: torch.Tensor) -> None:
    if index == 0:
        write(shared, index, hidden)
    else:
        _first, _second = shared["hidden"]


def remove(shared: Any, index: int, hidden: torch.Tensor) -> None:
    write(shared, index, hidden) if index == 0 else shared.pop("hidden")


def append(shared: Any, index: int, hidden: torch.Tensor) -> None:
    shared.append(hidden)


def trained(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("settings", [{}, {"device_micro_batch_size": 1}], ids=["whole", "micro_batches"])
def test_state_that_no_block_reads(settings: dict[str, Any]) -> None:
    ids = torch.randint(0, 50, (2, 8))
    expected = trained(model_with_container(_Shared, write), ids)
    model = horizon_lm.stream(
        model_with_container(_Shared, write), precision="float32", head="whole", allow_unproven_model=True, **settings
    )
    found = trained(model, ids)
    assert all(torch.allclose(found[name], expected[name], atol=1e-6) for name in expected)


@pytest.mark.parametrize(
    ("container", "change"), [(_Shared, read), (_Shared, unpack), (_Shared, remove), (dict, write), (list, append)]
)
def test_state_that_a_block_reads_or_could_read_unnoticed(container: Any, change: Any) -> None:
    model = horizon_lm.stream(
        model_with_container(container, change), precision="float32", head="whole", allow_unproven_model=True
    )
    ids = torch.randint(0, 50, (2, 8))
    with pytest.raises(horizon_lm.ModelNotSupportedError, match="passes state to later blocks"):
        trained(model, ids)


def test_evaluation_may_pass_state() -> None:
    """Without gradients nothing is missed."""
    ids = torch.randint(0, 50, (2, 8))
    plain, streamed = (model_with_container(_Shared, read) for _ in range(2))
    streamed = horizon_lm.stream(streamed, precision="float32", head="whole", allow_unproven_model=True)
    with torch.no_grad():
        expected, found = (model(input_ids=ids, use_cache=False).logits for model in (plain, streamed))
    assert torch.equal(found, expected)
