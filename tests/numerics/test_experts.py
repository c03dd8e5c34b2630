"""Experts without tokens on GPUs whose grouped product leaves their gradients unwritten."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers.integrations import moe

import horizon_lm
from horizon_lm.device.cuda import CudaDevice
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.measure.model_outline import outline_model
from tests.support import tiny_models
from tests.support.emulated_gpu import emulated_gpu


class Unwritten(torch.autograd.Function):
    """A stand-in for torch's grouped product of tokens (S, I) and weight (E, I, O) on a B200: the gradient of an expert without
    tokens is whatever its memory contained, here NaN.
    """

    @staticmethod
    def forward(ctx: Any, tokens: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(tokens, weight)
        ctx.groups = [slice(*pair) for pair in zip([0, *offsets.tolist()], offsets.tolist(), strict=False)]
        return torch.cat([tokens[group] @ weight[e] for e, group in enumerate(ctx.groups)])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        tokens, weight = ctx.saved_tensors
        of_weight = torch.full_like(weight, torch.nan)
        for expert, group in enumerate(ctx.groups):
            if group.start < group.stop:
                of_weight[expert] = tokens[group].T @ grad[group]
        return torch.cat([grad[group] @ weight[e].T for e, group in enumerate(ctx.groups)]), of_weight, None


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(moe, "_grouped_mm", moe._grouped_mm)  # restored afterwards
    with emulated_gpu():
        yield


def gradients(device: Any) -> dict[str, torch.Tensor]:
    """Return the gradients of a batch of two tokens, which leaves at least four of eight experts without tokens."""
    model = horizon_lm.stream(tiny_models.build("qwen3_moe", num_experts=8), device, precision="float32", compile=False)
    model.set_experts_implementation("grouped_mm")
    model(**tiny_models.batch(rows=1, length=2, padding="none")).loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def unwritten(tokens: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
    return Unwritten.apply(tokens, weight, offs)


def test_their_gradients_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gradients("cpu")
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", unwritten)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (10, 3))
    for _ in range(2):  # of a second model, too
        got = gradients(CudaDevice())
        torch.testing.assert_close(got, expected)
    experts = [grad for name, grad in got.items() if "experts" in name]
    assert all(sum((grad[expert] == 0).all() for expert in range(8)) >= 4 for grad in experts)


def test_the_stand_in_leaves_them_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: on Hopper, nothing is cleared."""
    monkeypatch.setattr(torch.nn.functional, "grouped_mm", unwritten)
    got = gradients(CudaDevice())
    assert any(grad.isnan().any() for name, grad in got.items() if "experts" in name)


@pytest.mark.parametrize(("family", "experts"), [("mixtral", 4), ("qwen3_moe", 4), ("deepseek_v3", 4), ("llama", 0)])
def test_a_plan_knows_their_number(family: str, experts: int) -> None:
    config = tiny_models.build(family).config
    assert outline_model(ModelSource(config, family), length=8, dtype=torch.bfloat16).experts == experts
