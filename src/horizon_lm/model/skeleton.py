"""Modules without memory: parameters on the meta device, buffers real."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode


class _EmptyOnMeta(TorchFunctionMode):
    """Parameters begin as ``torch.empty``. The experts of one block may be more than the host has memory for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """While active, every parameter that a module registers becomes a meta tensor. Buffers are computed for real.

    ``torch.device("meta")`` would take the buffers (rotary frequencies, scales) with it.
    """
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
        original(module, name, param)
        if param is not None and param.device.type != "meta":
            module._parameters[name] = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)

    nn.Module.register_parameter = register  # type: ignore[method-assign, assignment]
    try:
        with _EmptyOnMeta():
            yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def build_skeleton(config: Any, **options: Any) -> nn.Module:
    """The causal language model that a Hugging Face config describes, without weights, in evaluation mode."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    # Drawing weights on the meta device gives nothing, and takes a transformers model most of its time.
    with no_init_weights(), parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, **options)
    lost = [name for name, buffer in model.named_buffers() if buffer.device.type == "meta"]
    assert not lost, f"{type(model).__name__}: the buffer {lost[0]} was made by torch.empty"
    model.tie_weights()
    return model.eval()


def meta_copy(module: nn.Module) -> nn.Module:
    """Return a deep copy whose parameters are meta tensors; weights are never duplicated, not even for a moment."""
    import copy

    memo: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in module.parameters()
    }
    for part in module.modules():  # hooks may hold anything: the copy has the same ones
        memo |= {id(hooks): hooks for name, hooks in part.__dict__.items() if name.endswith("_hooks")}
    return copy.deepcopy(module, memo)
