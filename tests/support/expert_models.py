"""Tiny models with experts, and the comparison of their gradients."""

from typing import Any

import torch

from tests.support import tiny_models

EXPERTS = 8
NAMES = {
    "mixtral": "num_local_experts", "qwen3_moe": "num_experts", "qwen3_next": "num_experts", "gpt_oss": "num_local_experts",
    "deepseek_v3": "n_routed_experts",
}  # fmt: skip


def plain(family: str, experts: int = EXPERTS, **config: Any) -> Any:
    """Return a tiny model of a family with this many experts in a block."""
    # The experts' width is a multiple of the elements that a CPU computes at once, 32 at most: torch computes what is left at
    # the end of all rows by another sigmoid, and all rows end elsewhere than those of a tile.
    width = {"intermediate_size": 64} if family == "gpt_oss" else {}
    return tiny_models.build(family, **{NAMES[family]: experts}, **width, **config)


def loss_and_gradients(model: Any, **batch: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss of a batch, and the gradients that it adds to those there are, by the names of their parameters."""
    loss = model(**(batch or tiny_models.batch())).loss
    loss.backward()
    return loss.detach(), {
        name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None
    }


def assert_same(got: Any, expected: Any) -> None:
    """Compare the loss and the gradients of two models bit for bit."""
    assert torch.equal(got[0], expected[0])
    assert got[1].keys() == expected[1].keys()
    for name, grad in expected[1].items():
        assert torch.equal(got[1][name], grad), name
