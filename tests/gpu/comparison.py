"""Loss and gradients of a step, of plain Hugging Face and of a streamed model on the device under test."""

import copy
from typing import Any

import torch

import horizon_lm
from tests.gpu.accelerator import Accelerator


def plain_step(model: Any, batch: dict[str, torch.Tensor], accelerator: Accelerator, dtype: torch.dtype) -> Any:
    """Return loss and gradients of plain Hugging Face on the device, as fp32 tensors on the CPU."""
    plain = copy.deepcopy(model).to(accelerator.torch_device, dtype)
    loss = plain(**{k: v.to(accelerator.torch_device) for k, v in batch.items()}, use_cache=False).loss
    loss.backward()
    return loss.float().cpu(), {name: p.grad.float().cpu() for name, p in plain.named_parameters()}


def streamed_step(model: Any, batch: dict[str, torch.Tensor], accelerator: Accelerator, **settings: Any) -> Any:
    streamed = horizon_lm.stream(
        copy.deepcopy(model), accelerator.open(), **{"compile": False, "check_recompute": True} | settings
    )
    for _ in range(2):  # the second pass is planned and warm
        streamed.zero_grad()
        loss = streamed(**batch).loss
        loss.backward()
    return loss.float().cpu(), {name: p.grad.float() for name, p in streamed.named_parameters()}


def error_of(grads: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> float:
    """Return the norm of the difference of all gradients, relative to their norm."""
    difference = sum((grads[name] - g).square().sum() for name, g in reference.items())
    return float((difference / sum(g.square().sum() for g in reference.values())).sqrt())
