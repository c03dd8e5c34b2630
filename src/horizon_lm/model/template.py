"""Templates: block modules without weights of their own, re-pointed at a device buffer for each block they serve."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model.chunking import chunk_mlps
from horizon_lm.model.skeleton import meta_copy

_PLAIN = (bool, int, float, str, type(None))
# Differs between blocks of one structure; set at every binding instead of splitting the structure.
_PER_BLOCK_ATTRIBUTE = "layer_idx"
_RECOMPILE_LIMIT = 64


class Template:
    """One module that computes every block of its structure.

    Args:
        block: one of them.
        compiled: compile it, once for all blocks of the structure. What depends on hooks runs uncompiled.
        mlp_chunk_tokens: compute feed-forward layers so many tokens at a time; None for all at once.
    """

    def __init__(self, block: nn.Module, compiled: bool = False, mlp_chunk_tokens: int | None = None) -> None:
        self.module = meta_copy(block)
        if mlp_chunk_tokens is not None and not chunk_mlps(self.module, mlp_chunk_tokens):
            raise ModelNotSupportedError(
                f"{type(block).__name__} has no feed-forward layer that can be cut into chunks of tokens; leave "
                "mlp_chunk_tokens unset"
            )
        self.compiled = compiled
        if compiled:
            self._compiled_forward = _compile(self.module)
        self._modules = list(self.module.modules())
        self._params = {
            name: (self.module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
            for name, _ in self.module.named_parameters()
        }
        self._indexed = [m for m in self._modules if _PER_BLOCK_ATTRIBUTE in m.__dict__]

    def forward(self, *args: Any, hooked: bool, **kwargs: Any) -> Any:
        """Compute as the block that is bound. ``hooked``: somebody listens to hooks of its modules."""
        if self.compiled and not hooked:
            return self._compiled_forward(*args, **kwargs)
        return self.module.forward(*args, **kwargs)

    def bind(self, block: "BoundBlock", params: Mapping[str, torch.Tensor]) -> None:
        """Compute as ``block``, with these tensors (by name inside the block) as its parameters."""
        # Plain tensors go into the dict directly: fresh ones every time, because autocast and autograd know
        # tensors by identity.
        for name, tensor in params.items():
            owner, attribute = self._params[name]
            owner._parameters[attribute] = tensor  # type: ignore[assignment]
        for module, buffers in zip(self._modules, block.buffers, strict=True):
            module._buffers.update(buffers)
        for module, index in zip(self._indexed, block.indices, strict=True):
            module.layer_idx = index  # type: ignore[assignment]

    def set_training(self, flags: tuple[bool, ...]) -> None:
        """Train or evaluation mode of every submodule, in the order of ``modules()``."""
        for module, flag in zip(self._modules, flags, strict=True):
            module.training = flag

    def refuse_written_buffers(self, block: "BoundBlock") -> None:
        """ModelNotSupportedError if the last computation changed one of the block's buffers."""
        for module, buffers, versions in zip(self._modules, block.buffers, block.buffer_versions, strict=True):
            for name, buffer in buffers.items():
                if module._buffers[name] is not buffer or buffer._version != versions[name]:
                    raise ModelNotSupportedError(
                        f"{block.name}: its forward writes the buffer {name!r}. A block is computed twice per step, so "
                        "state that it writes would be wrong; such models cannot be streamed exactly."
                    )


def _compile(module: nn.Module) -> Any:
    """The module's forward, compiled without the hooks of its parts, which nothing can trace."""
    hooks = [(part, part._forward_hooks) for part in module.modules() if part._forward_hooks]
    # Every structure has code of its own to compile, and every length until one is found to vary.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _RECOMPILE_LIMIT)
    compiled = torch.compile(module.forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        for part, _ in hooks:
            part._forward_hooks = OrderedDict()
        try:
            return compiled(*args, **kwargs)
        finally:
            for part, own in hooks:
                part._forward_hooks = own

    return forward


class BoundBlock:
    """What a template needs to stand in for one block: its template, buffers on the device and layer indices."""

    def __init__(self, name: str, block: nn.Module, template: Template, to_device: "SharedBuffers") -> None:
        self.name, self.template = name, template
        self._modules = list(block.modules())
        self.buffers = [
            {n: to_device(b) for n, b in m._buffers.items() if b is not None} for m in self._modules
        ]  # fmt: skip
        self.buffer_versions = [{n: b._version for n, b in buffers.items()} for buffers in self.buffers]
        self.indices = [m.__dict__[_PER_BLOCK_ATTRIBUTE] for m in self._modules if _PER_BLOCK_ATTRIBUTE in m.__dict__]

    def training_flags(self) -> tuple[bool, ...]:
        return tuple(module.training for module in self._modules)


class SharedBuffers:
    """Buffers of blocks on the device, equal ones once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __call__(self, buffer: torch.Tensor) -> torch.Tensor:
        for host, copy in self._known:
            if host.shape == buffer.shape and host.dtype == buffer.dtype and torch.equal(host, buffer):
                return copy
        self._known.append((buffer, buffer.detach().to(self._device, copy=True)))
        return self._known[-1][1]


def structure_key(block: nn.Module) -> tuple[Any, ...]:
    """Equal for two blocks exactly when one template may serve both."""
    key: list[Any] = []
    for path, module in block.named_modules():
        plain = {
            name: value
            for name, value in module.__dict__.items()
            if not name.startswith("_") and name not in ("training", _PER_BLOCK_ATTRIBUTE) and _is_plain(value)
        }
        params = tuple((n, tuple(p.shape), p.dtype) for n, p in module._parameters.items() if p is not None)
        buffers = tuple((n, tuple(b.shape), b.dtype) for n, b in module._buffers.items() if b is not None)
        key.append((path, type(module), tuple(sorted(plain.items(), key=lambda kv: kv[0])), params, buffers))
    return tuple(key)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return False if isinstance(value, list) else all(_is_plain(v) for v in value)
    return isinstance(value, _PLAIN)
