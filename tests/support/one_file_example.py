"""Training with examples/in_one_file.py and with the library, from the same model and batches."""

import importlib.util
from pathlib import Path
from typing import Any

import torch

import horizon_lm
from tests.support import tiny_models

PATH = Path(__file__).parents[2] / "examples" / "in_one_file.py"
LR = 3e-3
BATCHES = [tiny_models.batch(seed=step, padding="none")["input_ids"] for step in range(5)]
Weights = dict[str, torch.Tensor]


def load() -> Any:
    spec = importlib.util.spec_from_file_location("in_one_file", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(module: Any, model: Any, batches: list[torch.Tensor] = BATCHES) -> tuple[list[torch.Tensor], Weights]:
    """Return the losses of some steps, and the weights after them."""
    losses = list(module.train(model, batches, lr=LR))
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def train_streamed(model: Any) -> tuple[list[torch.Tensor], Weights]:
    """Return the losses and the weights that the library computes."""
    model = horizon_lm.stream(model, device="cpu", precision="float32", head="whole")
    optimizer = horizon_lm.AdamW(model, lr=LR)
    losses = []
    for ids in BATCHES:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    horizon_lm.synchronize(model)
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}
