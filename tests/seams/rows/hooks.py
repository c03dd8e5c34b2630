"""Hooks of modules."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.seams.seam import EITHER, REJECTED, Case, row
from tests.seams.use import copied_gradients, evaluated, gradients, is_streamed, loss
from tests.support import tiny_models

SECTION = "Hooks"

Records = list[Any]


def _recomputing(model: Any) -> Any:
    """Make a plain model recompute its blocks, like a streamed model."""
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
    "in the forward pass and again in the recompute, with the module of their own block",
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
    model = tiny_models.build("llama")
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
    "Change activations or gradients of a module inside a block with a hook",
    cases={f"{how}-{name}": Case(options=options, arguments={"how": how}) for how in CHANGERS
           for name, options in (("chunked", {}), ("micro-batches", {"device_micro_batch_size": 1}))},
)  # fmt: skip
def change(model: Any, how: str) -> Any:
    handle = CHANGERS[how](model.model.layers[1].mlp)
    changed = [gradients(model), evaluated(model)]
    handle.remove()
    return [changed, gradients(model)]


@row(
    "W11.between",
    SECTION,
    "Remove a hook that changes activations between the forward and the backward pass, or register one there",
    cases={f"{when}-{how}": Case(arguments={"when": when, "how": how}) for when in ("removed", "registered") for how in CHANGERS},
)  # fmt: skip
def change_between(model: Any, when: str, how: str) -> Any:
    handle = CHANGERS[how](model.model.layers[1].mlp) if when == "removed" else None
    value = loss(model)
    if handle is None:
        handle = CHANGERS[how](model.model.layers[1].mlp)
        value.backward()
        handle.remove()
    else:
        handle.remove()
        value.backward()
    changed = [float(value), copied_gradients(model)]
    return [changed, gradients(model)]


@row(
    "W11.block",
    SECTION,
    "Change the output of a block, or its gradient, with a hook",
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
    "A loss on an activation that a hook inside a block captured",
    REJECTED,
    cases={f"{how}-{size}": Case(options=options, arguments={"how": how}) for how in CAPTURED
           for size, options in (("whole", {"head": "whole"}), ("resident", {"resident_blocks": 3, "resident_graphs": 3}))},
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
