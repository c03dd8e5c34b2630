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
from tests.support.thinned_cases import thinned
from tests.support.training_steps import feed, masters, same, train

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


def test_fp32_master_is_an_exact_float32_master() -> None:
    """The same gradients give the same bits as weights in float32."""
    models = [streamed(precision) for precision in ("fp32_master", "float32")]
    for model, optimizer in models:
        model(**tiny_models.batch()).loss.backward()
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            for param in model.parameters():
                param.grad.copy_(torch.randn(param.shape, generator=generator).bfloat16())
            optimizer.step()
        horizon_lm.synchronize(model)
    assert same(models[0][0], models[1][0])


def test_bf16_follows_float32_on_average() -> None:
    model, optimizer = streamed("bf16", lr=1e-4)  # far below the spacing of bf16 weights
    start = masters(model)
    model(**tiny_models.batch()).loss.backward()
    feed(model, [optimizer], 20)
    horizon_lm.synchronize(model)
    exact, exact_optimizer = streamed("float32", lr=1e-4)
    exact.load_state_dict(start)
    exact(**tiny_models.batch()).loss.backward()
    feed(exact, [exact_optimizer], 20)
    horizon_lm.synchronize(exact)
    name = "model.layers.1.mlp.up_proj.weight"
    got, expected = ((masters(each)[name] - start[name]).flatten() for each in (model, exact))
    assert 0.8 < (got @ expected / (expected @ expected)).item() < 1.2


@pytest.mark.parametrize(
    ("precision", "moments"), thinned([("bf16", "bfloat16"), ("float32", "float32"), ("fp32_master", "8bit")], every=2)
)
def test_update_in_backward_gives_the_same_bits(precision: str, moments: str) -> None:
    models = [streamed(precision, moments=moments, update_in_backward=in_backward) for in_backward in (False, True)]
    for model, optimizer in models:
        train(model, optimizer, range(3))
    assert same(models[0][0], models[1][0])


@pytest.mark.filterwarnings(
    "ignore::horizon_lm.errors.ForeignWriteWarning"
)  # of weights before the state with their low halves
@pytest.mark.parametrize(
    ("precision", "moments"), [("float32", "bfloat16"), ("fp32_master", "float32"), ("bf16", "8bit")]
)
def test_resume_is_exact(precision: str, moments: str, tmp_path: Path) -> None:
    pytest.importorskip("xxhash", reason="needs the whole installation")
    model, optimizer = streamed(precision, moments=moments)
    train(model, optimizer, range(3))
    horizon_lm.save_checkpoint(tmp_path / "checkpoint", model, optimizer)
    saved = copy.deepcopy(optimizer.state_dict()), {k: v.clone() for k, v in model.state_dict().items()}
    train(model, optimizer, range(3, 5))
    other, other_optimizer = streamed(precision, moments=moments)
    horizon_lm.load_checkpoint(tmp_path / "checkpoint", other, other_optimizer)
    train(other, other_optimizer, range(3, 5))
    assert same(model, other)
    other.load_state_dict(saved[1])
    other_optimizer.load_state_dict(saved[0])
    train(other, other_optimizer, range(3, 5))
    assert same(model, other)


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


@pytest.mark.parametrize("moments", ["float32", "bfloat16", "8bit"])
def test_moments_take_half_of_adamw(moments: str) -> None:
    found = []
    for cls in (horizon_lm.Lion, horizon_lm.AdamW):
        model = horizon_lm.stream(tiny_models.build("llama"))
        cls(model, moments=moments)
        found.append(horizon_lm.stats(model)["host_bytes_by_kind"]["moments"])
    assert 2 * found[0] == found[1]


@pytest.mark.parametrize("moments", thinned(["8bit", "bfloat16"], every=2))
def test_reduced_precision_moments_train_like_fp32(moments: str) -> None:
    def losses(kind: str) -> list[float]:
        model, optimizer = streamed("fp32_master", moments=kind, lr=3e-4)
        found = []
        for step in range(24):
            loss = model(**tiny_models.batch(seed=step % 3)).loss
            found.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return found

    full, few = losses("float32"), losses(moments)
    assert full[-1] < full[0] - 0.3
    assert few[-1] == pytest.approx(full[-1], abs=0.05 * (full[0] - full[-1]))


def test_settings_are_checked() -> None:
    model = horizon_lm.stream(tiny_models.build("llama"))
    with pytest.raises(ConfigError, match=r"lr=-1, betas=\(0\.9, 0\.99\), weight_decay=0\.0: out of range"):
        horizon_lm.Lion(model, lr=-1)
    with pytest.raises(ConfigError, match=r"horizon_lm\.Lion"):
        horizon_lm.Lion(tiny_models.build("llama"))
