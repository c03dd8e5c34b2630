"""Parameters in autograd, and other uses of autograd."""

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from tests.seams.seam import EITHER, REJECTED, Case, row
from tests.seams.use import adamw, copied_gradients, copied_weights, evaluated, gradients, loss
from tests.support import tiny_models

SECTION = "Autograd"

_PARAMS = ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight")


@row(
    "W11.parameter-hook",
    SECTION,
    "`p.register_hook`",
    REJECTED,
    cases={name: Case(arguments={"name": name}) for name in _PARAMS},
)
def parameter_hook(model: Any, name: str) -> Any:
    records: list[Any] = []
    handle = model.get_parameter(name).register_hook(lambda grad: records.append(grad.clone()))
    values = gradients(model)
    handle.remove()
    return [records, values]


@row(
    "W11.post-accumulate",
    SECTION,
    "`p.register_post_accumulate_grad_hook`: called once per backward pass for each parameter with a gradient, when `p.grad` is complete",
    cases={
        "whole": Case(options={"head": "whole"}), "chunked": Case(), "resident": Case(options={"resident_blocks": 3, "resident_graphs": 3}),
        "micro-batches": Case(options={"device_micro_batch_size": 1}), "tied": Case(partial(tiny_models.build, "gpt2")),
        "bf16": Case(options={"precision": "bf16", "grad_dtype": torch.float32}, arguments={"weights": False}),
    },
)  # fmt: skip
def post_accumulate(model: Any, weights: bool = True) -> Any:
    seen: dict[str, list[torch.Tensor]] = {name: [] for name, _ in model.named_parameters()}
    names = {param: name for name, param in model.named_parameters()}
    model.model.norm.weight.requires_grad_(False) if hasattr(model, "model") else None
    handles = [
        param.register_post_accumulate_grad_hook(lambda param: seen[names[param]].append(param.grad.clone()))
        for param in model.parameters()
        if param.requires_grad
    ]
    for step in range(2):  # the second gradient is added to the first
        model(**tiny_models.batch(seed=step)).loss.backward()
    for handle in handles:
        handle.remove()
    model(**tiny_models.batch()).loss.backward()
    return seen if weights else {name: len(grads) for name, grads in seen.items()}


@row(
    "W11.layerwise",
    SECTION,
    "Layerwise optimizers: a post-accumulate hook updates each weight and drops its gradient",
    cases={"sgd": Case(arguments={"kind": "sgd"}), "adamw": Case(arguments={"kind": "adamw"}),
           "resident": Case(options={"resident_blocks": 3, "resident_graphs": 3}, arguments={"kind": "adamw"})},
)  # fmt: skip
def layerwise(model: Any, kind: str) -> Any:
    make = {"sgd": partial(torch.optim.SGD, lr=0.1), "adamw": partial(torch.optim.AdamW, lr=1e-2)}[kind]
    optimizers = {param: make([param]) for param in model.parameters()}

    def update(param: Any) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    handles = [param.register_post_accumulate_grad_hook(update) for param in model.parameters()]
    losses = []
    for step in range(3):
        value = model(**tiny_models.batch(seed=step)).loss
        value.backward()
        losses.append(float(value))
    for handle in handles:
        handle.remove()
    return [losses, evaluated(model), copied_weights(model), all(p.grad is None for p in model.parameters())]


@row("W11.backward-inputs", SECTION, "`backward(inputs=[...])`", REJECTED,
     cases={name: Case(arguments={"name": name}) for name in _PARAMS})  # fmt: skip
def backward_inputs(model: Any, name: str) -> Any:
    loss(model).backward(inputs=[model.get_parameter(name)])
    return copied_gradients(model)


@row("W11.autograd-grad", SECTION, "`torch.autograd.grad(loss, parameters)`", REJECTED,
     cases={name: Case(arguments={"names": [name]}) for name in _PARAMS} | {"all": Case(arguments={"names": None})})  # fmt: skip
def autograd_grad(model: Any, names: list[str] | None) -> Any:
    params = [param for name, param in model.named_parameters() if names is None or name in names]
    return [list(torch.autograd.grad(loss(model), params)), copied_gradients(model)]


@row("W11.autograd-grad-inputs", SECTION, "`torch.autograd.grad(loss, inputs_embeds)`", EITHER)
def autograd_grad_of_inputs(model: Any) -> Any:
    hidden = torch.randn(3, 11, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    value = loss(model, input_ids=None, inputs_embeds=hidden)
    return [torch.autograd.grad(value, hidden)[0], copied_gradients(model)]


@row("autograd.inputs", SECTION, "Gradients of `inputs_embeds` with `loss.backward()`")
def gradients_of_inputs(model: Any) -> Any:
    hidden = torch.randn(3, 11, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss(model, input_ids=None, inputs_embeds=hidden).backward()
    return [hidden.grad, copied_gradients(model)]


@row("W11.create-graph", SECTION, "`backward(create_graph=True)`", REJECTED)
def create_graph(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss(model).backward(create_graph=True)
    values = {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return values


@row("W11.twice", SECTION, "A second backward pass through the same forward pass, with `retain_graph=True`", EITHER)
def twice(model: Any) -> Any:
    value = loss(model)
    value.backward(retain_graph=True)
    value.backward()
    return copied_gradients(model)


@row("autograd.two-forwards", SECTION, "Two forward passes and then their backward passes, in either order",
     cases={f"{name}-{first}": Case(options=options, arguments={"first": first}) for first in (0, 1)
            for name, options in (("whole", {"head": "whole"}), ("chunked", {}), ("resident", {"resident_blocks": 3, "resident_graphs": 3}))})  # fmt: skip
def two_forwards(model: Any, first: int) -> Any:
    values = [loss(model), model(**tiny_models.batch(seed=2)).loss]
    values[first].backward()
    values[1 - first].backward()
    return copied_gradients(model)


@row("autograd.two-losses", SECTION, "Two forward passes and one backward pass of the sum of their losses")
def two_losses(model: Any) -> Any:
    value = loss(model) + 2 * model(**tiny_models.batch(seed=2)).loss
    value.backward()
    return [float(value), copied_gradients(model)]


@row(
    "autograd.scaled",
    SECTION,
    "A scaled loss, or `backward` with a gradient: `(loss / 4).backward()`, `loss.backward(g)`",
)
def scaled(model: Any) -> Any:
    (loss(model) / 4).backward()
    value = loss(model)
    value.backward(torch.full_like(value, 0.3))
    return copied_gradients(model)


@row("autograd.checkpointed", SECTION, "A forward pass inside `torch.utils.checkpoint`", EITHER)
def checkpointed(model: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    value = checkpoint(lambda: loss(model), use_reentrant=False)
    value.backward()
    return [float(value), copied_gradients(model)]


@row("autograd.anomaly", SECTION, "Training under `torch.autograd.detect_anomaly`")
def anomaly(model: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            return gradients(model)


@row("autograd.autocast", SECTION, "Training under `torch.autocast` in bfloat16", tolerance=2e-2)
def autocast(model: Any) -> Any:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(model)
    value.backward()
    return [float(value), copied_gradients(model)]


# Wrappers


@contextlib.contextmanager
def _process_group() -> Iterator[None]:
    with tempfile.NamedTemporaryFile() as file:
        torch.distributed.init_process_group("gloo", init_method=f"file://{file.name}.group", rank=0, world_size=1)
        try:
            yield
        finally:
            torch.distributed.destroy_process_group()


@row("W11.ddp", SECTION, "`DistributedDataParallel`", REJECTED)
def ddp(model: Any) -> Any:
    with _process_group():
        return gradients(nn.parallel.DistributedDataParallel(model))


@row("autograd.data-parallel", SECTION, "`nn.DataParallel` on a machine without a GPU")
def data_parallel(model: Any) -> Any:
    return gradients(nn.DataParallel(model))


@row("autograd.functional-call", SECTION, "`torch.func.functional_call` with other weights", EITHER)
def functional_call(model: Any) -> Any:
    weights = {name: (param * 0.5).detach() for name, param in model.named_parameters()}
    batch = tiny_models.batch()
    with torch.no_grad():
        return float(torch.func.functional_call(model, weights, (), batch).loss)


@row("autograd.parametrize", SECTION, "`nn.utils.parametrize` or `prune` on a module", EITHER)
def pruned(model: Any) -> Any:
    from torch.nn.utils import prune

    linear = model.model.layers[1].mlp.up_proj
    before = dict(linear._parameters)
    prune.l1_unstructured(linear, "weight", 0.3)
    try:
        return loss(model).item()
    finally:
        linear._forward_pre_hooks.clear()
        linear._buffers.pop("weight_mask")
        linear.__dict__.pop("weight", None)
        linear._parameters.clear()
        linear._parameters.update(before)


@row("autograd.clip-later", SECTION, "Accumulate over several backward passes, then step", cases={"ours": Case(), "bf16": Case(options={"precision": "bf16", "grad_dtype": torch.float32}, arguments={"precise": False})})  # fmt: skip
def accumulate(model: Any, precise: bool = True) -> Any:
    optimizer, losses = adamw(model), []
    for step in range(4):
        value = model(**tiny_models.batch(seed=step)).loss / 2
        value.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(value))
    return losses if precise else [round(each, 1) for each in losses]
