"""Optimizers: Horizon-LM's own and others."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers.optimization import Adafactor

from tests.seams.foreign import Adam8bit, Lion
from tests.seams.seam import REJECTED, Case, row
from tests.seams.tiny import tiny
from tests.seams.use import adamw, copied_gradients, copied_weights, evaluated, is_streamed, train
from tests.support import tiny_models

SECTION = "Optimizers"


def _muon(model: Any) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in model.parameters() if p.ndim == 2], lr=1e-2)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False),
    "adamw-foreach": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=True),
    "adamw-fused": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=1e-1, momentum=0.9),
    "muon": _muon,
    "adafactor": lambda model: Adafactor(model.parameters(), lr=1e-2, relative_step=False),
    "adam-8bit": lambda model: Adam8bit(model.parameters(), lr=1e-2),
    "lion": lambda model: Lion(model.parameters(), lr=1e-3),
}
_RESIDENT: dict[str, dict[str, Any]] = {
    "none-resident": {},
    "all-resident": {"resident_blocks": 3, "activation_checkpoints": "device"},
    "graphs-resident": {"resident_blocks": 3, "resident_graphs": 3, "activation_checkpoints": "device"},
}


def _matrix(*precisions: str) -> dict[str, Case]:
    """Return cases of every optimizer, with and without resident blocks."""
    return {
        f"{name}-{residency}": Case(
            options={"precision": precision, "head": "whole", **options}, arguments={"optimizer": name}
        )
        for precision in precisions
        for name in OPTIMIZERS
        for residency, options in _RESIDENT.items()
        if residency != "graphs-resident" or name == "adamw"
    }


@row(
    "W5.optimizer",
    SECTION,
    "Train with another optimizer in precision `float32`: torch's (for-loop, foreach, fused; SGD, Muon), transformers' Adafactor, "
    "8-bit and hand-written ones, with and without resident blocks",
    cases=_matrix("float32"),
)
def foreign_optimizer(model: Any, optimizer: str) -> Any:
    losses = train(model, OPTIMIZERS[optimizer](model), steps=10)
    return {"losses": losses, "after": evaluated(model), "weights": copied_weights(model)}


@row(
    "W5.optimizer-bf16",
    SECTION,
    "Train with such an optimizer in precision `bf16`; `p.grad` has the parameter's dtype",
    cases=_matrix("bf16"),
)
def foreign_optimizer_in_bf16(model: Any, optimizer: str) -> Any:
    """Return the difference between the loss and that of the weights as reported by the model."""
    made = OPTIMIZERS[optimizer](model)
    train(model, made, steps=9)
    model(**tiny_models.batch()).loss.backward()
    same_dtype = all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())
    made.step()
    reported = evaluated(model)
    own = tiny_models.build("llama")
    own.load_state_dict(copied_weights(model))
    gap = abs(evaluated(own) - reported)
    return {"off": gap > 1e-5 and gap, "same dtype": same_dtype}


@row(
    "W13.optimizer",
    SECTION,
    "Train with such an optimizer in precision `fp32_master`, whose weights have low halves unknown to other optimizers",
    REJECTED,
    cases=_matrix("fp32_master"),
    says="bf16.*float32|float32.*bf16",
)
def foreign_optimizer_in_fp32_master(model: Any, optimizer: str) -> Any:
    return train(model, OPTIMIZERS[optimizer](model), steps=1)


def _with_spare(where: str) -> Any:
    """Return a model with a parameter that its forward method does not use."""
    model = tiny_models.build("llama")
    owner = {"block": model.model.layers[1].mlp, "outside": model.model}[where]
    owner.register_parameter("spare", nn.Parameter(torch.ones(8)))
    return model


def _embedded(model: Any, seed: int) -> dict[str, Any]:
    """Return a batch that does not use the embedding."""
    hidden = torch.randn(3, 11, 32, generator=torch.Generator().manual_seed(seed))
    return {k: v for k, v in tiny_models.batch(seed=seed).items() if k != "input_ids"} | {"inputs_embeds": hidden}


def _ids(model: Any, seed: int) -> dict[str, Any]:
    return tiny_models.batch(seed=seed)


def _now_and_then(model: Any, seed: int) -> dict[str, Any]:
    return (_embedded if seed % 2 else _ids)(model, seed)


_UNUSED = {
    f"{name}-{by}": Case(
        build,
        {"head": "whole" if name == "vision-tower" else head, **options},
        {"by": by, "batch": batch, "ours": ours},
    )
    for name, build, batch, options in (
        ("in-a-block", partial(_with_spare, "block"), _ids, {}),
        ("outside-blocks", partial(_with_spare, "outside"), _ids, {}),
        ("embedding", partial(tiny_models.build, "llama"), _embedded, {}),
        ("embedding-now-and-then", partial(tiny_models.build, "llama"), _now_and_then, {}),
        ("resident", partial(_with_spare, "block"), _ids, {"resident_blocks": 3, "resident_graphs": 3}),
        ("micro-batches", partial(_with_spare, "block"), _ids, {"device_micro_batch_size": 2}),
        ("vision-tower", partial(tiny, "muse_glimmer"), _ids, {}),
    )
    for by, head, ours in (
        ("ours", "chunked", {}),
        ("ours-in-backward", "chunked", {"update_in_backward": True}),
        ("torch", "whole", None),
    )
}


@row(
    "W1.unused",
    SECTION,
    "Train while some parameters get no gradient: as in torch, their `grad` is None, and no optimizer decays them",
    cases=_UNUSED,
    tolerance=1e-4,
)
def unused(model: Any, by: str, batch: Any, ours: dict[str, Any] | None) -> Any:
    optimizer = adamw(model, **ours) if ours is not None else torch.optim.AdamW(
        model.parameters(), lr=1e-2, weight_decay=0.1, foreach=False
    )  # fmt: skip
    losses, empty = [], []
    for seed in range(3):
        loss = model(**batch(model, seed)).loss
        loss.backward()
        losses.append(float(loss))
        if not ours:
            empty.append([name for name, p in model.named_parameters() if p.grad is None])
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "empty": empty, "weights": copied_weights(model)}


@row("W1.unused-head", SECTION, "Train with a loss on hidden states only: the head has no gradient and does not change")
def unused_head(model: Any) -> Any:
    optimizer = adamw(model)
    for seed in range(2):
        inputs = {k: v for k, v in tiny_models.batch(seed=seed).items() if k != "labels"}
        hidden = model(**inputs, output_hidden_states=True).hidden_states[-2]
        hidden.pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return copied_weights(model)


@row(
    "W1.first-without",
    SECTION,
    "Accumulate gradients when the first backward pass of a step does not reach a parameter",
)
def first_backward_without(model: Any) -> Any:
    for batch in (_embedded(model, 1), _ids(model, 2), _embedded(model, 3)):
        model(**batch).loss.backward()
    grads = copied_gradients(model)
    optimizer = adamw(model)
    optimizer.step()
    return {"gradients": grads, "weights": copied_weights(model)}


_STEPS = {
    "ours": Case(arguments={"ours": True}),
    "ours-bf16": Case(options={"precision": "bf16"}, arguments={"ours": True}),
    "ours-fp32_master": Case(options={"precision": "fp32_master"}, arguments={"ours": True}),
    "torch": Case(arguments={"ours": False}),
}


@row("step.without-backward", SECTION, "Call `optimizer.step()` without a backward pass: nothing happens", cases=_STEPS)
def step_without_backward(model: Any, ours: bool) -> Any:
    optimizer = adamw(model) if ours else torch.optim.AdamW(model.parameters())
    before = copied_weights(model)
    optimizer.step()
    after = copied_weights(model)
    return [torch.equal(before[name], after[name]) for name in before]


def _in_backward(model: Any) -> Any:
    return adamw(model, **({"update_in_backward": True} if is_streamed(model) else {}))


@row(
    "W18.clip-in-backward",
    SECTION,
    "Clip with torch's `clip_grad_norm_` and `update_in_backward`, which keeps no gradients",
    REJECTED,
    edits=True,
    keeps_gradients=False,
)
def clip_in_backward(model: Any) -> Any:
    optimizer = model.kept = _in_backward(model)  # keep the optimizer alive as long as the model
    model(**tiny_models.batch()).loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    return float(norm)


@row(
    "W18.read-in-backward",
    SECTION,
    "Read `p.grad` after a backward pass with `update_in_backward`",
    REJECTED,
    edits=True,
    keeps_gradients=False,
)
def read_in_backward(model: Any) -> Any:
    model.kept = _in_backward(model)
    model(**tiny_models.batch()).loss.backward()
    return copied_gradients(model)


@row("optimizer.clip", SECTION, "Clip with torch's `clip_grad_norm_` or `clip_grad_value_` before a step")
def clip(model: Any) -> Any:
    optimizer, norms = adamw(model), []
    for step in range(3):
        model(**tiny_models.batch(seed=step)).loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return {"norms": norms, "weights": copied_weights(model)}


@row("optimizer.edit-grad", SECTION, "Change gradients in place before a step: scale them, add noise, set some to None")
def edit_gradients(model: Any) -> Any:
    optimizer = adamw(model)
    for step in range(3):
        model(**tiny_models.batch(seed=step)).loss.backward()
        params = list(model.parameters())
        params[0].grad = None
        for param in params[1:]:
            param.grad.mul_(0.5).add_(0.01)
        torch._foreach_mul_([p.grad for p in params[1:]], 2.0)
        optimizer.step()
        optimizer.zero_grad()
    return copied_weights(model)
