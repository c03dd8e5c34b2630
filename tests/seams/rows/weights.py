"""Reading and writing of weights by other code."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import horizon_lm
from horizon_lm.device.simulated import SimulatedDevice
from tests.seams.seam import EITHER, REJECTED, Case, row
from tests.seams.use import adamw, copied_weights, evaluated, gradients, is_streamed, loss
from tests.support import tiny_models

SECTION = "Weights"


def _mul(param: Any) -> None:
    with torch.no_grad():
        param.mul_(0.7)


def _data_mul(param: Any) -> None:
    param.data.mul_(0.7)


def _detached(param: Any) -> None:
    param.detach().mul_(0.7)


def _copy(param: Any) -> None:
    with torch.no_grad():
        param.copy_(param * 0.7)


def _item(param: Any) -> None:
    with torch.no_grad():
        param[: len(param) // 2] = 0.01


def _foreach(param: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_([param], 0.7)


def _init(param: Any) -> None:
    nn.init.constant_(param, 0.02)


EDITS: dict[str, Callable[[Any], None]] = {
    "mul": _mul, "data": _data_mul, "detach": _detached, "copy": _copy, "item": _item, "foreach": _foreach, "init": _init,
}  # fmt: skip
PLACES = ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.1.input_layernorm.weight",
          "model.norm.weight", "lm_head.weight")  # fmt: skip
_RESIDENT = {"plain": {}, "resident": {"resident_blocks": 3, "activation_checkpoints": "device"}}


def _edit(model: Any, how: str, place: str | None = None) -> None:
    for name, param in model.named_parameters():
        if place is None or name == place:
            EDITS[how](param)


_EVERYWHERE = {
    f"{how}-{residency}": Case(options=options, arguments={"how": how})
    for how in EDITS
    for residency, options in _RESIDENT.items()
}
_PLACES = {place: Case(options={"resident_blocks": 3}, arguments={"place": place}) for place in PLACES}


@row(
    "W5.inplace-edit",
    SECTION,
    "Edit weights in place between steps: `p.mul_()`, `p.data.mul_()`, `p.copy_()`, `p[:n] = x`, `torch._foreach_mul_`, `nn.init`",
    cases=_EVERYWHERE,
)
def inplace_edit(model: Any, how: str) -> Any:
    first = gradients(model)
    _edit(model, how)
    return [first, gradients(model), evaluated(model), copied_weights(model)]


_VIEWS: dict[str, Callable[[Any], Any]] = {
    "numpy": lambda param: param.detach().numpy(),
    "data": lambda param: param.data,
    "detach": lambda param: param.detach(),
    "view": lambda param: param.detach().view(-1),
    "storage": lambda param: torch.tensor([], dtype=param.dtype).set_(
        param.detach().untyped_storage(), param.storage_offset(), param.shape
    ),
}


@row(
    "W5.kept-view",
    SECTION,
    "Edit weights through existing views: `p.data`, `p.view(-1)`; through numpy arrays and storages, unnoticed by torch, with "
    "`horizon_lm.synchronize(model)` afterwards",
    cases={
        f"{how}-{residency}": Case(options=options, arguments={"how": how})
        for how in _VIEWS
        for residency, options in _RESIDENT.items()
    },
    edits=True,
)
def kept_view(model: Any, how: str) -> Any:
    views = [_VIEWS[how](param) for param in model.parameters()]
    first = gradients(model)
    for view in views:
        view *= 0.7
    if how in ("numpy", "storage") and is_streamed(model):
        horizon_lm.synchronize(model)
    return [first, gradients(model), evaluated(model)]


@row(
    "W5.edit-one",
    SECTION,
    "Edit one weight in place after a forward pass: in a block, a norm, the embedding, the head",
    cases=_PLACES,
)
def edit_one(model: Any, place: str) -> Any:
    first = evaluated(model)
    _edit(model, "mul", place)
    return [first, evaluated(model), gradients(model)]


@row("W5.edit-after-step", SECTION, "Edit in place between steps of Horizon-LM's optimizer, or of any other")
def edit_between_steps(model: Any) -> Any:
    optimizer, losses = adamw(model), []
    for step in range(3):
        value = model(**tiny_models.batch(seed=step)).loss
        value.backward()
        losses.append(float(value))
        optimizer.step()
        optimizer.zero_grad()
        _edit(model, "mul", PLACES[step])
        _edit(model, "foreach", PLACES[-1])
    return [losses, gradients(model), copied_weights(model)]


@row("W5.load-state-dict", SECTION, "`load_state_dict` of the model between steps, or of one of its modules",
     cases={residency: Case(options=options) for residency, options in _RESIDENT.items()})  # fmt: skip
def load_state_dict(model: Any) -> Any:
    first = gradients(model)
    model.load_state_dict(tiny_models.build("llama", seed=5).state_dict())
    second = gradients(model)
    other = tiny_models.build("llama", seed=6)
    model.model.layers[1].load_state_dict(other.model.layers[1].state_dict())
    model.model.norm.load_state_dict(other.model.norm.state_dict())
    return [first, second, gradients(model)]


@contextmanager
def _data_replaced(model: Any, place: str) -> Iterator[None]:
    param = model.get_parameter(place)
    before = param.data
    param.data = before * 0.7
    try:
        yield
    finally:
        param.data = before


@row(
    "W6.replace-data",
    SECTION,
    "Replace the storage of a weight: `p.data = other`",
    REJECTED,
    cases={place: Case(arguments={"place": place}) for place in PLACES},
)
def replace_data(model: Any, place: str) -> Any:
    with _data_replaced(model, place):
        return gradients(model)


@row("W6.same-data", SECTION, "Assign a weight its own storage: `p.data = p.data`")
def same_data(model: Any) -> Any:
    for param in model.parameters():
        param.data = param.data
    return gradients(model)


_BETWEEN = {
    f"{how}-{place}": Case(arguments={"how": how, "place": place}) for how in ("mul", "data") for place in PLACES
}


@row(
    "W6.edit-before-backward",
    SECTION,
    "Edit weights in place between a forward pass and its backward pass",
    REJECTED,
    cases=_BETWEEN,
    edits=True,
)
def edit_before_backward(model: Any, how: str, place: str) -> Any:
    value = loss(model)
    _edit(model, how, place)
    value.backward()
    return float(value)


@row(
    "W6.step-before-backward",
    SECTION,
    "Step an optimizer between a forward pass and its backward pass",
    REJECTED,
    cases={"ours": Case(arguments={"ours": True}), "torch": Case(arguments={"ours": False})},
    edits=True,
)
def step_before_backward(model: Any, ours: bool) -> Any:
    optimizer = adamw(model) if ours else torch.optim.SGD(model.parameters(), lr=0.1)
    loss(model).backward()
    value = loss(model)
    optimizer.step()
    value.backward()
    return float(value)


def _late(model: Any) -> Any:
    """Stream onto a simulated device that runs every operation as late as possible."""
    return horizon_lm.stream(model, device=SimulatedDevice(eagerness=0.0), precision="float32")


READS: dict[str, Callable[[Any], Any]] = {
    "sum": lambda param: param.sum(),
    "data": lambda param: param.data.clone(),
    "detach": lambda param: param.detach().clone(),
    "item": lambda param: param.flatten()[0].item(),
    "numpy": lambda param: torch.from_numpy(param.detach().numpy().copy()),
    "norm": lambda param: torch.linalg.vector_norm(param),
    "foreach": lambda param: torch._foreach_norm([param])[0],
    "allclose": lambda param: bool(torch.isfinite(param).all()),
    "vector": lambda param: nn.utils.parameters_to_vector([param]),
}
_PENDING = {"late": Case(stream=_late), "threads": Case()}


@row(
    "W6.read-after-step",
    SECTION,
    "Read weights right after `optimizer.step()`, while updates may be running: `p.sum()`, `p.data.clone()`, `p.detach().numpy()`",
    cases={f"{how}-{name}": Case(stream=case.stream, arguments={"how": how}) for how in READS for name, case in _PENDING.items()},
)  # fmt: skip
def read_after_step(model: Any, how: str) -> Any:
    optimizer = adamw(model)
    loss(model).backward()
    optimizer.step()
    return {name: READS[how](param) for name, param in model.named_parameters()}


@row(
    "W6.edit-pending",
    SECTION,
    "Edit weights in place right after `optimizer.step()`, while updates may be running",
    cases={f"{how}-{name}": Case(stream=case.stream, arguments={"how": how}) for how in EDITS for name, case in _PENDING.items()},
)  # fmt: skip
def edit_pending(model: Any, how: str) -> Any:
    optimizer = adamw(model)
    loss(model).backward()
    optimizer.step()
    _edit(model, how)
    return [gradients(model), copied_weights(model)]


@row("W6.edit-no-forward", SECTION, "Edit weights in place before the first forward pass")
def edit_before_all(model: Any) -> Any:
    _edit(model, "mul")
    return gradients(model)


@row("weights.swap", SECTION, "Swap weights for an average and back (EMA) with `p.data.copy_()`, evaluating in between")
def swap(model: Any) -> Any:
    optimizer = adamw(model)
    average = [p.detach().clone() for p in model.parameters()]
    values = []
    for step in range(3):
        model(**tiny_models.batch(seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_lerp_(average, list(model.parameters()), 0.5) if step else None
        kept = [p.detach().clone() for p in model.parameters()]
        for param, mean in zip(model.parameters(), average, strict=True):
            param.data.copy_(mean)
        values.append(evaluated(model))
        for param, own in zip(model.parameters(), kept, strict=True):
            param.data.copy_(own)
    return [values, gradients(model)]


@row(
    "weights.vector",
    SECTION,
    "Write all weights in one call: `nn.utils.vector_to_parameters`, which replaces their storages",
    EITHER,
)
def vector(model: Any) -> Any:
    params = list(model.parameters())
    before = [p.data for p in params]
    try:
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(params).detach() * 0.9, params)
        return gradients(model)
    finally:
        for param, data in zip(params, before, strict=True):
            param.data = data
