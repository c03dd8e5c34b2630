"""Decoder blocks that compute with weights from a device buffer.

The block's own module computes: while it runs, device tensors replace its parameters and buffers. Hooks, attributes,
config and mode are therefore always current, and no copy has to be kept in sync.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import is_
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as _global
from torch.utils._pytree import tree_leaves

from horizon_lm.errors import ModelNotSupportedError, StreamingError
from horizon_lm.model import capture
from horizon_lm.model.compiling import compile_block, compiling_chunks, mark_lengths
from horizon_lm.model.float8.layers import casting, float8_layers
from horizon_lm.model.lazy_products import LazyTail

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_INTERNAL = frozenset(nn.Module().__dict__)  # attributes of every module: parameters, hooks, mode
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_NO_HOOKS: tuple[OrderedDict[int, Any], ...] = tuple(OrderedDict() for _ in _HOOKS)


class Mode(NamedTuple):
    """The train or evaluation mode of each module of a block, and the hooks of each module inside it."""

    training: tuple[bool, ...]
    hooks: tuple[tuple[OrderedDict[int, Any], ...], ...]


class StreamedBlock:
    """A block that computes on the device.

    Args:
        name: full name of the block in its model.
        module: the block.
        buffers: copies of buffers on the device.
        compiled: compile its forward method; blocks of one structure share their graphs.
        written: names of weights that the forward pass may write.
        float8: multiply in FP8 in the layers that `use_float8` has changed.
    """

    def __init__(
        self, name: str, module: nn.Module, buffers: "BuffersOfModules", compiled: bool = False,
        written: frozenset[str] = frozenset(), float8: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.module, self._device_buffers, self.compiled = name, module, buffers, compiled
        self._written = written
        self._instance_forward = module.__dict__.get("forward")
        self._modules = list(module.modules())
        self._places: dict[str, tuple[nn.Module, str]] = {}  # module and attribute of each parameter, by its name
        for param_name, _ in module.named_parameters(remove_duplicate=False):
            path, _, attribute = param_name.rpartition(".")
            self._places[param_name] = module.get_submodule(path), attribute
        owners = dict.fromkeys(owner for owner, _ in self._places.values())
        self._orders = [(owner, list(owner._parameters)) for owner in owners]  # for `restore_parameters`
        self._parametrized = _parametrized(self._modules)
        self._host_params = {name: owner._parameters[attribute] for name, (owner, attribute) in self._places.items()}
        self._structure = Structure(self._modules)
        self._attributes = [_Attributes(module) for module in self._modules]
        self._buffer_copies: dict[tuple[nn.Module, str], _BufferCopy] = {}
        self._tails: dict[tuple[bool, ...], LazyTail] = {}  # by the train or evaluation mode of each module
        self._float8 = float8_layers(module) if float8 else []

    def is_structure_changed(self) -> bool:
        """Return whether a module or parameter of the block was added, removed or replaced."""
        return self._structure.is_changed()

    def param_names(self) -> list[str]:
        """Return the names of the block's parameters."""
        return list(self._places)

    def forward(self, *args: Any, uncompiled: bool, unread: bool = False, **kwargs: Any) -> Any:
        """Run the block's own forward method with the parameters that are `bound`.

        Args:
            args, kwargs: the block's arguments.
            uncompiled: never run compiled code.
            unread: nobody reads the output, only its graph is needed: the output may have no values.
        """
        function = type(self.module).forward
        if self.compiled and not uncompiled and self._instance_forward is None:
            mark_lengths(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor))
            with _without_hooks(self._modules), compiling_chunks():
                return compile_block(function)(unread, self.module, *args, **kwargs)
        with self._tail().lazy(self.module) if unread else nullcontext():
            if self._instance_forward is not None:
                return self._instance_forward(*args, **kwargs)
            return function(self.module, *args, **kwargs)

    def _tail(self) -> LazyTail:
        """Return the part of the block that may be computed lazily, in the present mode of its modules."""
        return self._tails.setdefault(tuple(module.training for module in self._modules), LazyTail())

    @contextmanager
    def bound(self, params: Mapping[str, torch.Tensor], differentiates: bool = True) -> Iterator[None]:
        """Context manager: replace the block's parameters, by name, by device tensors, and its buffers by device
        copies. Weights that are multiplied in FP8 are cast once, also for a backward pass if ``differentiates``.

        Raises:
            StreamingError: the block's parameters or modules have changed since it was streamed.
            ModelNotSupportedError: the block wrote one of its buffers or weights.
        """
        self._structure.require_unchanged(self.name)
        # Before anything is replaced, because there may be no memory for a copy.
        buffers = self._copy_buffers()
        weights_before = {name: params[name].detach().clone() for name in self._written & params.keys()}
        self._put(params, buffers)
        try:
            with casting(self._float8, differentiates):
                yield
            self._require_unwritten(params, weights_before, buffers)
        finally:
            self._put_back(params, buffers)

    def _copy_buffers(self) -> "_Buffers":
        """Return copies of all buffers on the device. A buffer is copied again only if it has changed since the last call."""
        copies: _Buffers = {}
        for module in self._modules:
            for name, host in module._buffers.items():
                if host is None:
                    continue
                copy = self._buffer_copies.get((module, name))
                if copy is None or copy.host is not host or copy.host_version != host._version:
                    copy = self._buffer_copies[module, name] = self._device_buffers.copy(host)
                copies[module, name] = copy
        return copies

    def _put(self, params: Mapping[str, torch.Tensor], buffers: "_Buffers") -> None:
        """Put device tensors into the places of the parameters and buffers."""
        # Plain tensors bypass register_parameter. New ones are created every time, because autocast and autograd
        # identify tensors by object.
        for name, tensor in params.items():
            owner, attribute = self._places[name]
            if (owner, attribute) in self._parametrized and not tensor.requires_grad:
                tensor = tensor.data  # torch's parametrize counts up the version, which all tensors in a slot share
            owner._parameters[attribute] = tensor  # type: ignore[assignment]
        for (module, name), copy in buffers.items():
            module._buffers[name] = copy.device

    def _require_unwritten(
        self, params: Mapping[str, torch.Tensor], weights_before: Mapping[str, torch.Tensor], buffers: "_Buffers"
    ) -> None:
        """Raise ModelNotSupportedError if the block has written a buffer, or a weight that differs from its earlier value now."""
        for name, before in weights_before.items():
            if not torch.equal(before, params[name]):
                raise ModelNotSupportedError(
                    f"{self.name}: its forward writes the weight {name!r} (it limits it, usually). A streamed block computes "
                    "with a copy of its weights, where that would be lost; switch it off in the model's config."
                )
        for (module, name), copy in buffers.items():
            if module._buffers[name] is not copy.device or copy.device._version != copy.version:
                raise ModelNotSupportedError(
                    f"{self.name}: its forward writes the buffer {name!r}. A block is computed twice per step, so "
                    "state that it writes would be wrong; such models cannot be streamed exactly."
                )

    def _put_back(self, params: Iterable[str], buffers: "_Buffers") -> None:
        """Put the host's parameters and buffers back into their places, and in their order, which parametrize may have changed."""
        for (module, name), copy in buffers.items():
            module._buffers[name] = copy.host
        for name in params:
            owner, attribute = self._places[name]
            owner._parameters[attribute] = self._host_params[name]
        for owner, order in self._orders:
            if list(owner._parameters) != order or not owner._buffers.keys().isdisjoint(order):
                restore_parameters(owner, order)

    # State that must be the same in forward and recomputation. Hooks of the block itself, the first module, run outside of both.

    def is_hooked(self) -> bool:
        """Return whether modules inside the block have hooks of other code."""
        return any(map(has_foreign_hooks, self._modules[1:]))

    def mode(self) -> "Mode":
        """Return the train or evaluation mode of every module, and the hooks inside the block."""
        hooks = tuple(
            tuple(module.__dict__[name].copy() for name in _HOOKS) if _has_hooks(module) else _NO_HOOKS
            for module in self._modules[1:]
        )
        return Mode(tuple(module.training for module in self._modules), hooks)

    @contextmanager
    def in_mode(self, mode: "Mode") -> Iterator[None]:
        """Context manager: set the mode and the hooks of every module."""
        before = self.mode()
        if before == mode:
            yield
            return
        dicts = [[module.__dict__[name] for name in _HOOKS] for module in self._modules[1:]]  # handles refer to these
        try:
            self._set_mode(mode.training, [[hooks.copy() for hooks in of_module] for of_module in mode.hooks])
            yield
        finally:
            self._set_mode(before.training, dicts)

    def _set_mode(self, training: Sequence[bool], hooks: Iterable[Iterable[Any]]) -> None:
        """Set the mode of every module, and the hooks of those inside the block."""
        for module, is_training in zip(self._modules, training, strict=True):
            module.training = is_training
        for module, of_module in zip(self._modules[1:], hooks, strict=True):
            module.__dict__.update(zip(_HOOKS, of_module, strict=True))

    def attributes(self) -> list[dict[str, Any]]:
        """Return the attributes of each module, as in `comparable`."""
        return [attributes.read() for attributes in self._attributes]


def _parametrized(modules: Iterable[nn.Module]) -> set[tuple[nn.Module, str]]:
    """Return the modules and names of the parameters to which PEFT applies adapters by torch's parametrize."""
    return {(m.get_base_layer(), m.parameter_name) for m in modules if hasattr(m, "parameter_name")}  # type: ignore[operator, misc]


def restore_parameters(module: nn.Module, names: list[str]) -> None:
    """Restore the order of a module's parameters, and remove the buffers that have taken their names.

    PEFT applies adapters of a parameter by torch's parametrize, in each forward pass. This takes the parameter out and puts it
    back at the end, but as a buffer, because bound weights are plain tensors.
    """
    for name in names:
        module._parameters[name] = module._parameters.pop(name)
        module._buffers.pop(name, None)


def has_foreign_hooks(module: nn.Module) -> bool:
    """Return whether hooks of code other than transformers run for a module: its own, or torch's global ones."""
    if _global._global_forward_hooks or _global._global_forward_pre_hooks:
        return True
    if not _has_hooks(module):
        return False
    return any(
        hooks and not capture.is_only_capturing(hooks)
        for hooks in (
            module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks,
        )
    )  # fmt: skip


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


class _Attributes:
    """The attributes of a module as comparable values, cached until one of them is replaced.

    Converting them is expensive compared with the rest of a block's bookkeeping, and they hardly ever change.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._names: list[str] = []
        self._values: list[Any] = []
        self._cached: dict[str, Any] | None = None  # None if a container among them may change in place

    def read(self) -> dict[str, Any]:
        """Return the current attributes by name, without those that every module has."""
        attributes = self._module.__dict__
        names, values = list(attributes), list(attributes.values())
        if self._cached is not None and names == self._names and all(map(is_, values, self._values)):
            return self._cached
        specific = {name: value for name, value in attributes.items() if name not in _INTERNAL and name != "forward"}
        found = {name: comparable(value) for name, value in specific.items()}
        self._names, self._values = names, values
        self._cached = found if all(map(_is_fixed, specific.values())) else None
        return found


def _is_fixed(value: Any) -> bool:
    """Return whether a value cannot change without being replaced."""
    if isinstance(value, tuple):
        return all(isinstance(item, _PLAIN) for item in value)
    return not isinstance(value, (list, set, frozenset, Mapping))


class Structure:
    """The identities of the children and parameters of some modules."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._ids = self._find_ids()

    def is_changed(self) -> bool:
        """Return whether a module or parameter was added, removed or replaced."""
        return self._find_ids() != self._ids

    def require_unchanged(self, where: str) -> None:
        """Raise StreamingError if a module or parameter was added, removed or replaced."""
        if self.is_changed():
            raise StreamingError(
                f"{where}: a module or parameter was added, removed or replaced after horizon_lm.stream(). Change the model "
                "first (adapters, new layers), then stream it."
            )

    def _find_ids(self) -> list[int]:
        """Return the identities of the parameters and children of all modules."""
        found: list[int] = []
        for module in self._modules:
            found += map(id, module._parameters.values())
            found += map(id, module._modules.values())
        return found


class _BufferCopy:
    """A buffer on the host and its copy on the device, with their versions when copied."""

    __slots__ = ("device", "host", "host_version", "version")

    def __init__(self, host: torch.Tensor, device: torch.Tensor) -> None:
        self.host, self.device = host, device
        self.host_version, self.version = host._version, device._version


_Buffers = dict[tuple[nn.Module, str], _BufferCopy]


class BuffersOfModules:
    """The blocks' buffers on the device; equal buffers are stored once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._known: list[tuple[torch.Tensor, int, torch.Tensor]] = []  # buffer, its version when copied, copy

    def copy(self, buffer: torch.Tensor) -> _BufferCopy:
        """Return a device copy of a host buffer's current value."""
        for host, version, copy in self._known:
            same = host.shape == buffer.shape and host.dtype == buffer.dtype and host._version == version
            if same and torch.equal(host, buffer):
                return _BufferCopy(buffer, copy)
        copy = buffer.detach().to(self._device, copy=True)
        self._known.append((buffer, buffer._version, copy))
        return _BufferCopy(buffer, copy)


@contextmanager
def _without_hooks(modules: list[nn.Module]) -> Iterator[None]:
    """Context manager: take out the forward hooks of modules, because torch.compile cannot trace those of transformers."""
    hooked = [(module, module._forward_hooks) for module in modules if module._forward_hooks]
    for module, _ in hooked:
        module._forward_hooks = OrderedDict()
    try:
        yield
    finally:
        for module, hooks in hooked:
            module._forward_hooks = hooks


def comparable(value: Any) -> Any:
    """Return an object that compares equal for equal plain values and containers; other objects compare by identity."""
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, (list, tuple)):
        return tuple(map(comparable, value))
    if isinstance(value, (set, frozenset)):
        return frozenset(map(comparable, value))
    if isinstance(value, Mapping):
        return tuple((comparable(key), comparable(item)) for key, item in value.items())
    return id(value)


# Attributes in which blocks of one structure differ: the number of a block; the arguments of PEFT's layer, with its full name.
_OF_PLACE = ("layer_idx", "kwargs")


def structure_key(block: nn.Module) -> tuple[Any, ...]:
    """Return a key that is equal for blocks with the same memory and time, so that only one of them is measured."""
    key: list[Any] = []
    for path, module in block.named_modules():
        plain = {
            name: comparable(value)
            for name, value in module.__dict__.items()
            if name not in _INTERNAL and name not in _OF_PLACE and _is_plain(value)
        }
        # A graph keeps more for a trained weight than for a frozen one.
        params = tuple(
            (n, tuple(p.shape), p.dtype, p.requires_grad) for n, p in module._parameters.items() if p is not None
        )
        buffers = tuple((n, tuple(b.shape), b.dtype) for n, b in module._buffers.items() if b is not None)
        key.append((path, type(module), tuple((name, plain[name]) for name in sorted(plain)), params, buffers))
    return tuple(key)


def _is_plain(value: Any) -> bool:
    """Return whether `comparable` compares a value, with all that it holds, by value."""
    if isinstance(value, (tuple, list, set, frozenset)):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(_is_plain(v) for pair in value.items() for v in pair)
    return isinstance(value, _PLAIN)
