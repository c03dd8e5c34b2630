"""Pass transformers' captured outputs (router logits, attentions) through a streamed block.

transformers records outputs of submodules through hooks that append to a collector in a context variable. A streamed
block computes outside of autograd, so the outputs of its submodules are collected there, passed through the block's
autograd Function, and appended to the model's collector afterwards.
"""

import contextvars
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.output_capturing import _active_collector, maybe_install_capturing_hooks

Captured = dict[str, list[torch.Tensor | None]]
_INSTALLED = "_output_capturing_hooks_installed"  # transformers' mark of a model that has its hooks
_OF_WHOLE_BLOCKS = "hidden_states"  # recorded by a hook on the block itself, which a streamed block keeps


def install_hooks(model: nn.Module) -> None:
    """Install transformers' hooks, so that they are not mistaken for foreign hooks later.

    Those that a call before has installed are removed first: transformers would install the hooks of a model inside this one once more,
    and would then capture each of its outputs twice.
    """
    for module in model.modules():
        for number, hook in list(module._forward_hooks.items()):
            if _is_capturing(hook):
                del module._forward_hooks[number]
        module.__dict__.pop(_INSTALLED, None)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            maybe_install_capturing_hooks(module)


def is_only_capturing(hooks: Mapping[int, Any]) -> bool:
    """Return whether all these hooks are transformers' capturing hooks."""
    return all(map(_is_capturing, hooks.values()))


def _is_capturing(hook: Any) -> bool:
    """Return whether a hook is one of transformers' capturing hooks."""
    return getattr(hook, "__module__", None) == maybe_install_capturing_hooks.__module__


def requested_keys() -> tuple[str, ...]:
    """Return the names of the submodule outputs that the model's call under way captures; none outside of a call."""
    collector = _active_collector.get()
    return tuple(k for k in collector or () if k != _OF_WHOLE_BLOCKS and not k.startswith("_"))


@contextmanager
def capture(keys: tuple[str, ...]) -> Iterator[Captured]:
    """Context manager: capture these outputs, instead of those of the model's call, in the dict that is yielded."""
    collected: Captured = {key: [] for key in keys}
    token = _active_collector.set(collected)
    try:
        yield collected
    finally:
        _active_collector.reset(token)


def copy_context() -> contextvars.Context:
    """Return a copy of the current context variables without the collector, which would form a reference cycle with the graph."""
    context = contextvars.copy_context()
    context.run(_active_collector.set, None)
    return context


def publish(captured: Captured) -> None:
    """Append captured outputs to the collector of the model's call, which requested them (`requested_keys`)."""
    collector = _active_collector.get()
    for key, tensors in captured.items():
        collector[key].extend(tensors)
