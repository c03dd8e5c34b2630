"""Hooks of modules and of parameters, and other ways into autograd."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from tests import families
from tests.seams.seam import EITHER, REJECTED, Case, row
from tests.seams.use import adamw, copied_gradients, copied_weights, evaluated, gradients, is_streamed, loss

SECTION = "Hooks"
AUTOGRAD = "Autograd"

Records = list[Any]


def _recomputing(model: Any) -> Any:
    """Make a plain model recompute its blocks, as a streamed one does."""
    if not is_streamed(model):
        model.gradient_checkpointing_enable({"use_reentrant": False, "early_stop": False})
    return model


def _forward_hook(module: Any, records: Records, names: dict[Any, str]) -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        records.append(("forward", names.get(module, "another module"), output.detach().clone()))

    return module.register_forward_hook(hook)


def _pre_hook(module: Any, records: Records, names: dict[Any, str]) -> Any:
    def hook(module: Any, inputs: Any) -> None:
        records.append(("pre", names.get(module, "another module"), inputs[0].detach().clone()))

    return module.register_forward_pre_hook(hook)


def _keyword_hook(module: Any, records: Records, names: dict[Any, str]) -> Any:
    def hook(module: Any, inputs: Any, keywords: Any, output: Any) -> None:
        records.append(("forward", names.get(module, "another module"), sorted(keywords)))

    return module.register_forward_hook(hook, with_kwargs=True)


def _weight_hook(module: Any, records: Records, names: dict[Any, str]) -> Any:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        records.append([float(p.detach().float().norm()) for p in module.parameters()])

    return module.register_forward_hook(hook)


def _backward_hook(module: Any, records: Records, names: dict[Any, str]) -> Any:
    def hook(module: Any, grad_input: Any, grad_output: Any) -> None:
        records.append(("backward", names.get(module, "another module"), grad_output[0].detach().clone()))

    return module.register_full_backward_hook(hook)


def _backward_pre_hook(module: Any, records: Records, names: dict[Any, str]) -> Any:
    def hook(module: Any, grad_output: Any) -> None:
        records.append(("backward pre", names.get(module, "another module"), grad_output[0].detach().clone()))

    return module.register_full_backward_pre_hook(hook)


LISTENERS: dict[str, Callable[[Any, Records, dict[Any, str]], Any]] = {
    "forward": _forward_hook, "pre": _pre_hook, "keywords": _keyword_hook, "weights": _weight_hook,
    "backward": _backward_hook, "backward-pre": _backward_pre_hook,
}  # fmt: skip


def _listening(how: str) -> dict[str, Case]:
    return {
        f"{how}-{name}": Case(options=options, arguments={"how": how})
        for name, options in (("whole", {"head": "whole"}), ("chunked", {}))
    }


@row(
    "W11.listen",
    SECTION,
    "Listen to modules inside blocks: forward hooks, pre-hooks, full backward hooks. They are called as with gradient checkpointing, "
    "in the forward and again in the recompute, each for its own block and with its own module",
    cases={name: case for how in LISTENERS for name, case in _listening(how).items()},
)
def listen(model: Any, how: str) -> Any:
    records: Records = []
    names = {module: name for name, module in model.named_modules()}
    _recomputing(model)
    handles = [LISTENERS[how](layer.mlp, records, names) for layer in model.model.layers]
    first = gradients(model)
    heard = len(records)
    evaluated(model)
    for handle in handles:
        handle.remove()
    again = gradients(model)
    return {"heard": heard, "records": records, "first": first, "again": again}


@row("W11.listen-before", SECTION, "Listen with hooks that were registered before `stream()`",
     cases={how: Case(lambda how=how: _with_hooks(how)) for how in LISTENERS})  # fmt: skip
def listen_before(model: Any) -> Any:
    _recomputing(model)
    model.records.clear()
    model.names.update({module: name for name, module in model.named_modules()})
    values = gradients(model)
    return {"records": list(model.records), "values": values}


def _with_hooks(how: str) -> Any:
    model = families.build("llama")
    model.records, model.names = [], {}
    for layer in model.model.layers:
        LISTENERS[how](layer.mlp, model.records, model.names)
    return model


def _scale_output(module: Any) -> Any:
    return module.register_forward_hook(lambda module, inputs, output: output * 1.5)


def _scale_input(module: Any) -> Any:
    return module.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.5,))


def _scale_grad(module: Any) -> Any:
    return module.register_full_backward_hook(
        lambda module, grads, outputs: tuple(g if g is None else g * 1.5 for g in grads)
    )


CHANGERS = {"output": _scale_output, "input": _scale_input, "gradient": _scale_grad}


@row(
    "W11.change",
    SECTION,
    "Change activations or gradients of one module inside a block by a hook",
    cases={f"{how}-{name}": Case(options=options, arguments={"how": how}) for how in CHANGERS
           for name, options in (("chunked", {}), ("micro-batches", {"device_micro_batch_size": 1}))},
)  # fmt: skip
def change(model: Any, how: str) -> Any:
    handle = CHANGERS[how](model.model.layers[1].mlp)
    changed = [gradients(model), evaluated(model)]
    handle.remove()
    return [changed, gradients(model)]


@row(
    "W11.block",
    SECTION,
    "Change what a whole block returns, or its gradient, by a hook",
    cases={how: Case(arguments={"how": how}) for how in ("output", "gradient")},
)
def change_block(model: Any, how: str) -> Any:
    handle = CHANGERS[how](model.model.layers[1])
    changed = [gradients(model), evaluated(model)]
    handle.remove()
    return [changed, gradients(model)]


_OUTER = {"embedding": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}


@row(
    "W11.outer",
    SECTION,
    "Hooks on the embedding, the final norm or the head",
    EITHER,
    cases={
        f"{how}-{name}-{head}": Case(options={"head": head}, arguments={"module": path, "how": how})
        for how in ("output", "gradient")
        for name, path in _OUTER.items()
        for head in ("whole", "chunked")
        if (how, name) != ("gradient", "embedding")
    },
)
def change_outer(model: Any, module: str, how: str) -> Any:
    handle = CHANGERS[how](model.get_submodule(module))
    try:
        return [gradients(model), evaluated(model)]
    finally:
        handle.remove()


@row("W11.model", SECTION, "Forward hooks on the model itself")
def model_hook(model: Any) -> Any:
    records: Records = []
    handle = model.register_forward_hook(lambda module, inputs, output: records.append(float(output.loss)))
    values = gradients(model)
    handle.remove()
    return [records, values]


@contextlib.contextmanager
def _global_hook(records: Records, names: dict[Any, str]) -> Iterator[None]:
    def hook(module: Any, inputs: Any, output: Any) -> None:
        if names.get(module, "").endswith("mlp") or module not in names:
            records.append(names.get(module, f"another {type(module).__name__}"))

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@row("W11.global", SECTION, "Hooks on all modules: `register_module_forward_hook`")
def global_hook(model: Any) -> Any:
    records: Records = []
    _recomputing(model)
    with _global_hook(records, {module: name for name, module in model.named_modules()}):
        gradients(model)
    return records


CAPTURED: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "added": lambda own, captured: own + captured.pow(2).mean(),
    "alone": lambda own, captured: captured.pow(2).mean(),
}


@row(
    "W11.captured-loss",
    SECTION,
    "Make a loss of an activation that a hook inside a block captured",
    REJECTED,
    cases={f"{how}-{size}": Case(options=options, arguments={"how": how}) for how in CAPTURED
           for size, options in (("whole", {"head": "whole"}), ("held", {"held_blocks": 3, "held_graphs": 3}))},
)  # fmt: skip
def captured_loss(model: Any, how: str) -> Any:
    captured: list[torch.Tensor] = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda module, inputs, output: captured.append(output))
    try:
        value = CAPTURED[how](loss(model), captured[0])
        value.backward()
    finally:
        handle.remove()
    return copied_gradients(model)


# Parameters

_PARAMS = ("model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.norm.weight", "lm_head.weight")


@row(
    "W11.parameter-hook",
    AUTOGRAD,
    "`p.register_hook`",
    REJECTED,
    cases={name: Case(arguments={"name": name}) for name in _PARAMS},
)
def parameter_hook(model: Any, name: str) -> Any:
    records: Records = []
    handle = model.get_parameter(name).register_hook(lambda grad: records.append(grad.clone()))
    values = gradients(model)
    handle.remove()
    return [records, values]


@row(
    "W11.post-accumulate",
    AUTOGRAD,
    "`p.register_post_accumulate_grad_hook`: called once in a backward for each parameter with a gradient, when `p.grad` is complete",
    cases={
        "whole": Case(options={"head": "whole"}), "chunked": Case(), "held": Case(options={"held_blocks": 3, "held_graphs": 3}),
        "micro-batches": Case(options={"device_micro_batch_size": 1}), "tied": Case(partial(families.build, "gpt2")),
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
    for step in range(2):  # the second one adds to the first
        model(**families.batch(seed=step)).loss.backward()
    for handle in handles:
        handle.remove()
    model(**families.batch()).loss.backward()
    return seen if weights else {name: len(grads) for name, grads in seen.items()}


@row(
    "W11.layerwise",
    AUTOGRAD,
    "Layerwise optimizers: each weight is updated and its gradient dropped in a post-accumulate hook",
    cases={"sgd": Case(arguments={"kind": "sgd"}), "adamw": Case(arguments={"kind": "adamw"}),
           "held": Case(options={"held_blocks": 3, "held_graphs": 3}, arguments={"kind": "adamw"})},
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
        value = model(**families.batch(seed=step)).loss
        value.backward()
        losses.append(float(value))
    for handle in handles:
        handle.remove()
    return [losses, evaluated(model), copied_weights(model), all(p.grad is None for p in model.parameters())]


@row("W11.backward-inputs", AUTOGRAD, "`backward(inputs=[...])`", REJECTED,
     cases={name: Case(arguments={"name": name}) for name in _PARAMS})  # fmt: skip
def backward_inputs(model: Any, name: str) -> Any:
    loss(model).backward(inputs=[model.get_parameter(name)])
    return copied_gradients(model)


@row("W11.autograd-grad", AUTOGRAD, "`torch.autograd.grad(loss, parameters)`", REJECTED,
     cases={name: Case(arguments={"names": [name]}) for name in _PARAMS} | {"all": Case(arguments={"names": None})})  # fmt: skip
def autograd_grad(model: Any, names: list[str] | None) -> Any:
    params = [param for name, param in model.named_parameters() if names is None or name in names]
    return [list(torch.autograd.grad(loss(model), params)), copied_gradients(model)]


@row("W11.autograd-grad-inputs", AUTOGRAD, "`torch.autograd.grad(loss, inputs_embeds)`", EITHER)
def autograd_grad_of_inputs(model: Any) -> Any:
    hidden = torch.randn(3, 11, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    value = loss(model, input_ids=None, inputs_embeds=hidden)
    return [torch.autograd.grad(value, hidden)[0], copied_gradients(model)]


@row("autograd.inputs", AUTOGRAD, "Gradients of `inputs_embeds` by `loss.backward()`")
def gradients_of_inputs(model: Any) -> Any:
    hidden = torch.randn(3, 11, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
    loss(model, input_ids=None, inputs_embeds=hidden).backward()
    return [hidden.grad, copied_gradients(model)]


@row("W11.create-graph", AUTOGRAD, "`backward(create_graph=True)`", REJECTED)
def create_graph(model: Any) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss(model).backward(create_graph=True)
    values = {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return values


@row("W11.twice", AUTOGRAD, "A second backward through one forward, with `retain_graph=True`", EITHER)
def twice(model: Any) -> Any:
    value = loss(model)
    value.backward(retain_graph=True)
    value.backward()
    return copied_gradients(model)


@row("autograd.two-forwards", AUTOGRAD, "Two forwards and then their backwards, in either order",
     cases={f"{name}-{first}": Case(options=options, arguments={"first": first}) for first in (0, 1)
            for name, options in (("whole", {"head": "whole"}), ("chunked", {}), ("held", {"held_blocks": 3, "held_graphs": 3}))})  # fmt: skip
def two_forwards(model: Any, first: int) -> Any:
    values = [loss(model), model(**families.batch(seed=2)).loss]
    values[first].backward()
    values[1 - first].backward()
    return copied_gradients(model)


@row("autograd.two-losses", AUTOGRAD, "Two forwards and one backward of the sum of their losses")
def two_losses(model: Any) -> Any:
    value = loss(model) + 2 * model(**families.batch(seed=2)).loss
    value.backward()
    return [float(value), copied_gradients(model)]


@row(
    "autograd.scaled",
    AUTOGRAD,
    "A scaled loss, or a backward with a gradient: `(loss / 4).backward()`, `loss.backward(g)`",
)
def scaled(model: Any) -> Any:
    (loss(model) / 4).backward()
    value = loss(model)
    value.backward(torch.full_like(value, 0.3))
    return copied_gradients(model)


@row("autograd.checkpointed", AUTOGRAD, "A forward inside `torch.utils.checkpoint`", EITHER)
def checkpointed(model: Any) -> Any:
    from torch.utils.checkpoint import checkpoint

    value = checkpoint(lambda: loss(model), use_reentrant=False)
    value.backward()
    return [float(value), copied_gradients(model)]


@row("autograd.anomaly", AUTOGRAD, "Training under `torch.autograd.detect_anomaly`")
def anomaly(model: Any) -> Any:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly():
            return gradients(model)


@row("autograd.autocast", AUTOGRAD, "Training under `torch.autocast` in bfloat16", tolerance=2e-2)
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


@row("W11.ddp", AUTOGRAD, "`DistributedDataParallel`", REJECTED)
def ddp(model: Any) -> Any:
    with _process_group():
        return gradients(nn.parallel.DistributedDataParallel(model))


@row("autograd.data-parallel", AUTOGRAD, "`nn.DataParallel` on a machine without a GPU")
def data_parallel(model: Any) -> Any:
    return gradients(nn.DataParallel(model))


@row("autograd.functional-call", AUTOGRAD, "`torch.func.functional_call` with other weights", EITHER)
def functional_call(model: Any) -> Any:
    weights = {name: (param * 0.5).detach() for name, param in model.named_parameters()}
    batch = families.batch()
    with torch.no_grad():
        return float(torch.func.functional_call(model, weights, (), batch).loss)


@row("autograd.parametrize", AUTOGRAD, "`nn.utils.parametrize` or `prune` on a module", EITHER)
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


@row("autograd.clip-later", AUTOGRAD, "Accumulate over several backwards, then step", cases={"ours": Case(), "bf16": Case(options={"precision": "bf16", "grad_dtype": torch.float32}, arguments={"precise": False})})  # fmt: skip
def accumulate(model: Any, precise: bool = True) -> Any:
    optimizer, losses = adamw(model), []
    for step in range(4):
        value = model(**families.batch(seed=step)).loss / 2
        value.backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(value))
    return losses if precise else [round(each, 1) for each in losses]
