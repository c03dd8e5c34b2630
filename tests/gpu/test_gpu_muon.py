"""Muon on the device under test, which orthogonalizes there, beside torch's own Muon and AdamW on the same device."""

import copy
from typing import Any

import pytest
import torch

import horizon_lm
from tests.gpu.accelerator import Accelerator
from tests.gpu.comparison import error_of
from tests.support import tiny_models
from tests.support.thinned_cases import thinned

pytestmark = pytest.mark.gpu

HYPER: dict[str, Any] = {"lr": 1e-3, "momentum": 0.9, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 3


def _build(family: str) -> Any:
    return tiny_models.build(family, hidden_size=64, intermediate_size=128)


def _batch(seed: int) -> dict[str, torch.Tensor]:
    return tiny_models.batch(rows=2, length=16, padding="none", seed=seed)


def _moved(before: dict[str, torch.Tensor], model: Any) -> dict[str, torch.Tensor]:
    return {name: param.detach().float().cpu() - before[name] for name, param in model.named_parameters()}


def _by_torch(model: Any, matrices: set[str], accelerator: Accelerator) -> dict[str, torch.Tensor]:
    """Return how far the weights of a plain model have moved, with torch's Muon for the matrices of its blocks."""
    plain = copy.deepcopy(model).to(accelerator.torch_device)
    before = {name: param.detach().cpu().clone() for name, param in plain.named_parameters()}
    hidden = [param for name, param in plain.named_parameters() if name in matrices]
    others = [param for name, param in plain.named_parameters() if name not in matrices]
    settings = {name: HYPER[name] for name in ("lr", "weight_decay")}
    optimizers = [
        torch.optim.Muon(hidden, momentum=HYPER["momentum"], adjust_lr_fn="match_rms_adamw", **settings),
        torch.optim.AdamW(others, betas=HYPER["betas"], eps=HYPER["eps"], **settings),
    ]
    for seed in range(STEPS):
        plain(**{name: each.to(accelerator.torch_device) for name, each in _batch(seed).items()}).loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return _moved(before, plain)


def _by_ours(
    model: Any, device: Any, make: Any = horizon_lm.Muon, **options: Any
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return a streamed copy of a model that has made the steps, and how far its weights have moved."""
    streamed = horizon_lm.stream(copy.deepcopy(model), device, **{"precision": "float32", "compile": False} | options)
    before = {name: param.detach().float().clone() for name, param in streamed.named_parameters()}
    hyper = {name: value for name, value in HYPER.items() if make is horizon_lm.Muon or name != "momentum"}
    optimizer = make(streamed, **hyper, max_grad_norm=1.0)
    for seed in range(STEPS):
        streamed(**_batch(seed)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    horizon_lm.synchronize(streamed)
    return streamed, _moved(before, streamed)


@pytest.mark.parametrize(
    "options",
    thinned([{"activation_checkpoints": "host", "resident_blocks": 0}, {}, {"device_micro_batch_size": 1}]),
    ids=str,
)
def test_steps_equal_torch(accelerator: Accelerator, options: dict[str, Any]) -> None:
    model = _build("llama")
    streamed, ours = _by_ours(model, accelerator.open(), **options)
    matrices = set(streamed._horizon.engine.parts.hidden_matrices())
    assert len(matrices) == 7 * model.config.num_hidden_layers
    theirs = _by_torch(model, matrices, accelerator)
    print(f"error {error_of(ours, theirs):.1e}")
    assert error_of(ours, theirs) < 2e-2  # matrices are orthogonalized in bf16
    _, adamw = _by_ours(model, accelerator.open(), horizon_lm.AdamW, **options)
    assert error_of(adamw, theirs) > 0.2  # negative control


@pytest.mark.parametrize(
    ("family", "precision"), thinned([("mixtral", "fp32_master"), ("gpt_oss", "float32"), ("mixtral", "bf16")])
)
def test_experts_are_orthogonalized_as_on_the_cpu(accelerator: Accelerator, family: str, precision: str) -> None:
    """In each storage mode, with a stack of matrices a weight. Rounding to bf16 draws numbers, so that mode is compared coarsely."""
    model = _build(family)
    (_, ours), (_, expected) = (
        _by_ours(model, device, precision=precision, compute_dtype=torch.float32)
        for device in (accelerator.open(), "cpu")
    )
    print(f"{family}, {precision}: error {error_of(ours, expected):.1e}")
    assert error_of(ours, expected) < {"float32": 5e-2, "fp32_master": 0.2, "bf16": 0.6}[precision]
