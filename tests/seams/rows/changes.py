"""Changes to a model after it was streamed."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.seams.seam import EITHER, REJECTED, Case, row
from tests.seams.use import adamw, copied_gradients, evaluated, gradients, loss, train
from tests.support import tiny_models

SECTION = "Changes after stream()"
MOVING = "Moving and casting"


def _gpt2(rate: float = 0.0) -> Any:
    return tiny_models.build("gpt2", resid_pdrop=rate, embd_pdrop=rate, attn_pdrop=rate)


@row(
    "W10.dropout",
    SECTION,
    "Change dropout rates: `module.p`, `attention_dropout`",
    cases={
        "modules-on": Case(_gpt2, {"head": "whole"}, {"rate": 0.4}),
        "modules-off": Case(partial(_gpt2, 0.4), {"head": "whole"}, {"rate": 0.0}),
        "attribute-on": Case(options={"head": "whole"}, arguments={"rate": 0.4}),
    },
)
def dropout(model: Any, rate: float) -> Any:
    first = gradients(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
        elif hasattr(module, "attention_dropout"):
            module.attention_dropout = rate
    return [first, gradients(model)]


@row(
    "W10.attention",
    SECTION,
    "`set_attn_implementation`, from `sdpa` to `eager` or back, with and without padding",
    cases={
        f"{family}-{of}": Case(partial(tiny_models.build, family, attn_implementation=of), {}, {"to": to})
        for family in ("llama", "mistral", "qwen3", "opt")
        for of, to in (("sdpa", "eager"), ("eager", "sdpa"))
    },
)
def attention(model: Any, to: str) -> Any:
    first = gradients(model)
    model.set_attn_implementation(to)
    unpadded = tiny_models.batch(padding="none")
    return [first, evaluated(model), evaluated(model, **unpadded), gradients(model, **unpadded)]


@row(
    "W10.attribute",
    SECTION,
    "Set a plain attribute of a module: `scaling`, `variance_epsilon`; in all blocks, in one, outside of blocks",
    cases={each: Case(arguments={"where": each}) for each in ("all", "one", "outside")},
)
def attribute(model: Any, where: str) -> Any:
    first = gradients(model)
    layers = model.model.layers[1:2] if where == "one" else model.model.layers if where == "all" else []
    for layer in layers:
        layer.self_attn.scaling = 0.1
        layer.input_layernorm.variance_epsilon = 0.5
    if where == "outside":
        model.model.norm.variance_epsilon = 0.5
    return [first, gradients(model), evaluated(model)]


@row("W10.config", SECTION, "Change the config: `output_router_logits`, `router_aux_loss_coef` of a mixture of experts",
     cases={"mixtral": Case(partial(tiny_models.build, "mixtral"))})  # fmt: skip
def config(model: Any) -> Any:
    model.router_aux_loss_coef = 0.5
    first = gradients(model)
    model.config.output_router_logits = False
    return [first, gradients(model)]


@row("W10.training-mode", SECTION, "`eval()` and `train()` of single modules",
     cases={"gpt2": Case(partial(_gpt2, 0.4), {"head": "whole"})})  # fmt: skip
def training_mode(model: Any) -> Any:
    first = gradients(model)
    model.transformer.h[1].eval()
    second = gradients(model)
    model.transformer.h[0].mlp.eval()
    model.transformer.drop.eval()
    return [first, second, gradients(model)]


def _replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Replace a module or parameter. Return a function that restores the old one."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def _hooked_norm(model: Any) -> Callable[[], None]:
    return _replace(model.model.layers[1], "input_layernorm", nn.LayerNorm(32))


def _added(model: Any) -> Callable[[], None]:
    mlp = model.model.layers[1].mlp
    mlp.register_parameter("spare", nn.Parameter(torch.ones(4)))
    return lambda: delattr(mlp, "spare")


def _added_module(model: Any) -> Callable[[], None]:
    model.model.layers[0].mlp.add_module("spare", nn.Linear(4, 4))
    return lambda: delattr(model.model.layers[0].mlp, "spare")


def _added_outside(model: Any) -> Callable[[], None]:
    model.add_module("value_head", nn.Linear(32, 1))
    return lambda: delattr(model, "value_head")


def _removed(model: Any) -> Callable[[], None]:
    layers = model.model.layers
    model.model.layers = layers[:2]

    def put_back() -> None:
        model.model.layers = layers

    return put_back


REPLACED: dict[str, Callable[[Any], Callable[[], None]]] = {
    "norm-in-block": _hooked_norm,
    "activation-in-block": lambda model: _replace(model.model.layers[1].mlp, "act_fn", nn.GELU()),
    "linear-in-block": lambda model: _replace(model.model.layers[1].mlp, "up_proj", nn.Linear(32, 48, bias=False)),
    "parameter-in-block": lambda model: _replace(model.model.layers[1].mlp.up_proj, "weight", nn.Parameter(torch.zeros(48, 32))),
    "parameter-of-norm": lambda model: _replace(model.model.norm, "weight", nn.Parameter(torch.ones(32) * 3)),
    "parameter-of-head": lambda model: _replace(model.lm_head, "weight", nn.Parameter(torch.zeros(97, 32))),
    "bias-in-block": lambda model: _replace(model.model.layers[1].mlp.up_proj, "bias", nn.Parameter(torch.ones(48))),
    "norm": lambda model: _replace(model.model, "norm", nn.LayerNorm(32)),
    "head": lambda model: _replace(model, "lm_head", nn.Linear(32, 97)),
    "embedding": lambda model: _replace(model.model, "embed_tokens", nn.Embedding(97, 32)),
    "block": lambda model: _list_item(model.model.layers, 1, tiny_models.build("llama", seed=4).model.layers[1]),
    "blocks-removed": _removed,
    "parameter-added": _added,
}  # fmt: skip


def _list_item(modules: Any, index: int, value: Any) -> Callable[[], None]:
    before = modules[index]
    modules[index] = value

    def put_back() -> None:
        modules[index] = before

    return put_back


@row(
    "W10.replaced",
    SECTION,
    "Replace, add or remove modules and parameters, in blocks or outside of them",
    REJECTED,
    cases={each: Case(arguments={"what": each}) for each in REPLACED},
)
def replaced(model: Any, what: str) -> Any:
    put_back = REPLACED[what](model)
    try:
        return gradients(model)
    finally:
        put_back()


@row("W10.replaced-in-evaluation", SECTION, "Replace modules and parameters before an evaluation", REJECTED,
     cases={each: Case(arguments={"what": each}) for each in ("linear-in-block", "parameter-of-norm", "block")})  # fmt: skip
def replaced_in_evaluation(model: Any, what: str) -> Any:
    put_back = REPLACED[what](model)
    try:
        return evaluated(model)
    finally:
        put_back()


@row("W10.added-beside", SECTION, "Add a module that the model does not use (a value head)", EITHER,
     cases={"outside": Case(arguments={"in_block": False}), "in-block": Case(arguments={"in_block": True})})  # fmt: skip
def added_beside(model: Any, in_block: bool) -> Any:
    put_back = (_added_module if in_block else _added_outside)(model)
    try:
        gradients(model)
        return {name: grad for name, grad in copied_gradients(model).items() if "spare" not in name}
    finally:
        put_back()


@row("W10.freeze", SECTION, "`requires_grad_(False)` before or during training",
     cases={"before": Case(arguments={"steps": 0}), "during": Case(arguments={"steps": 2})})  # fmt: skip
def freeze(model: Any, steps: int) -> Any:
    optimizer = adamw(model)
    losses = train(model, optimizer, steps)
    model.model.layers[0].requires_grad_(False)
    model.model.norm.weight.requires_grad_(False)
    return [losses, train(model, optimizer), gradients(model)]


@row("W10.freeze-between", SECTION, "Freeze a weight between a forward pass and its backward pass", EITHER)
def freeze_between(model: Any) -> Any:
    value = loss(model)
    model.model.norm.weight.requires_grad_(False)
    value.backward()
    return copied_gradients(model)


@row("W10.freeze-all-but-one", SECTION, "Freeze all weights except one: of a block, a norm, the embedding, the head",
     cases={name: Case(arguments={"name": name}) for name in
            ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight")})  # fmt: skip
def freeze_all_but_one(model: Any, name: str) -> Any:
    model.requires_grad_(False)
    model.get_parameter(name).requires_grad_(True)
    optimizer = adamw(model, params=[model.get_parameter(name)])
    return [train(model, optimizer), gradients(model)]


@row("W10.unfreeze", SECTION, "Unfreeze a weight after training has begun", EITHER)
def unfreeze(model: Any) -> Any:
    weight = model.model.layers[1].mlp.up_proj.weight
    weight.requires_grad_(False)
    first = gradients(model)
    weight.requires_grad_(True)
    try:
        return [first, gradients(model)]
    finally:
        weight.requires_grad_(False)


# Moving and casting

CASTS: dict[str, Callable[[Any], Any]] = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "type": lambda module: module.type(torch.float64),
    "to-dtype": lambda module: module.to(torch.float64),
    "to-dtype-keyword": lambda module: module.to(dtype=torch.bfloat16),
    "to-meta": lambda module: module.to("meta"),
    "to_empty": lambda module: module.to_empty(device="cpu"),
}
_WHERE: dict[str, Callable[[Any], Any]] = {
    "model": lambda model: model,
    "decoder": lambda model: model.model,
    "block": lambda model: model.model.layers[1],
    "linear": lambda model: model.model.layers[1].mlp.up_proj,
    "norm": lambda model: model.model.norm,
    "head": lambda model: model.lm_head,
    "embedding": lambda model: model.model.embed_tokens,
}


def _places(how: str) -> tuple[str, ...]:
    """Return the modules to try a change on: all of them if they may differ, otherwise the model and one module."""
    if how == "to-meta":  # on a module it replaces parameters, which the next forward pass rejects
        return ("model",)
    return tuple(_WHERE) if how in ("half", "to-dtype", "to_empty", "to-cpu") else ("model", "linear")


@row(
    "W10.cast",
    MOVING,
    "Cast or empty the model or one of its modules: `.half()`, `.bfloat16()`, `.double()`, `.type()`, `.to(dtype)`, `.to('meta')`, "
    "`.to_empty()`",
    REJECTED,
    cases={f"{how}-{where}": Case(arguments={"how": how, "where": where}) for how in CASTS for where in _places(how)},
)
def cast(model: Any, how: str, where: str) -> Any:
    CASTS[how](_WHERE[where](model))
    return {name: str(param.dtype) for name, param in model.named_parameters()}


STAYS: dict[str, Callable[[Any], Any]] = {
    "cpu": lambda module: module.cpu(),
    "to-cpu": lambda module: module.to("cpu"),
    "to-device": lambda module: module.to(torch.device("cpu")),
    "to-tensor": lambda module: module.to(torch.zeros((), dtype=torch.float32)),
    "float": lambda module: module.float(),
    "to-float": lambda module: module.to(torch.float32),
    "type": lambda module: module.type(torch.float32),
}


@row(
    "W10.stays",
    MOVING,
    "Move the model or one of its modules to its own device or dtype: `.cpu()`, `.to('cpu')`, `.to(dtype)`",
    EITHER,
    cases={f"{how}-{where}": Case(arguments={"how": how, "where": where}) for how in STAYS for where in _places(how)},
)
def stays(model: Any, how: str, where: str) -> Any:
    gradients(model)
    STAYS[how](_WHERE[where](model))
    return gradients(model)


@row("W10.compile", MOVING, "`torch.compile(model)` and `model.compile()`", REJECTED, says="compile=True",
     cases={"function": Case(arguments={"method": False}), "method": Case(arguments={"method": True})}, survives=False)  # fmt: skip
def compiled(model: Any, method: bool) -> Any:
    torch._dynamo.reset()
    if method:
        model.compile(backend="eager")
        return evaluated(model)
    return evaluated(torch.compile(model, backend="eager"))


@row("W10.no-op", MOVING, "`.cpu()`, `.to('cpu')` and `.to(device)` of the whole model change nothing and return the model",
     cases={name: Case(arguments={"target": target}) for name, target in (("cpu", None), ("to-cpu", "cpu"), ("device", torch.device("cpu")))})  # fmt: skip
def no_op(model: Any, target: Any) -> Any:
    same = (model.cpu() if target is None else model.to(target)) is model
    return [same, gradients(model)]


@row("W10.share-memory", MOVING, "`share_memory()`", EITHER)
def share_memory(model: Any) -> Any:
    first = gradients(model)
    model.share_memory()
    with torch.no_grad():
        model.model.norm.weight.mul_(0.7)
    return [first, gradients(model)]
