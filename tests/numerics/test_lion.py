"""Lion equals its authors' implementation in torch, and has everything that AdamW has: modes, resume, bytes of the plan."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import horizon_lm
from horizon_lm.errors import ConfigError
from tests.support import tiny_models
from tests.support.training_steps import feed, masters

HYPER = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}


class PublishedLion(torch.optim.Optimizer):
    """The step of github.com/google/automl, lion/lion_pytorch.py."""

    def __init__(self, params: Iterator[Any], lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                state = self.state[p]
                exp_avg = state.setdefault("exp_avg", torch.zeros_like(p))
                update = exp_avg * beta1 + p.grad * (1 - beta1)
                p.add_(update.sign_(), alpha=-group["lr"])
                exp_avg.mul_(beta2).add_(p.grad, alpha=1 - beta2)


def streamed(precision: str = "float32", **options: Any) -> tuple[Any, Any]:
    model = horizon_lm.stream(tiny_models.build("llama"), precision=precision)
    return model, horizon_lm.Lion(model, **(HYPER | options))


def test_twenty_steps_equal_the_published_optimizer() -> None:
    model, optimizer = streamed()
    model(**tiny_models.batch()).loss.backward()  # allocates the gradients
    reference = tiny_models.build("llama")
    for param in reference.parameters():
        param.grad = torch.zeros_like(param)
    start = copy.deepcopy(reference.state_dict())
    feed(reference, [PublishedLion(reference.parameters(), **HYPER)], 20)
    feed(model, [optimizer], 20)
    horizon_lm.synchronize(model)
    for name, master in masters(model).items():
        theirs = reference.get_parameter(name).detach()
        torch.testing.assert_close(master, theirs, rtol=0, atol=1e-6)
        assert (theirs - start[name]).abs().max() > 5 * HYPER["lr"]


def test_moments_of_another_optimizer_are_rejected(tmp_path: Path) -> None:
    pytest.importorskip("xxhash", reason="needs the whole installation")
    model, optimizer = streamed("fp32_master")
    other = horizon_lm.stream(tiny_models.build("llama"))
    adamw = horizon_lm.AdamW(other)
    with pytest.raises(ConfigError, match=r"has no eps in group 0; it is not from an AdamW"):
        adamw.load_state_dict(optimizer.state_dict())
    with pytest.raises(ConfigError, match=r"other moments than 'float32'.*exp_avg_sq"):
        optimizer.load_state_dict(adamw.state_dict())
    horizon_lm.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    with pytest.raises(
        ConfigError, match=r"saved with another optimizer: it has exp_avg of .*AdamW exp_avg, exp_avg_sq;"
    ):
        horizon_lm.load_checkpoint(tmp_path / "checkpoint", other, adamw)
