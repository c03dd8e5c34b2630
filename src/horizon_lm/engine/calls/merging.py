"""Let PEFT's layers write the weights of a streamed base: merge adapters, take them out again, and begin with other weights.

PEFT's layers read adapters and write base weights through ``param.data``, which in a streamed model are bf16 halves in host
memory. While a layer merges, it has plain parameters with all bits; the results are written to the store. A layer that PEFT has
just made does so, too: it lets the model notice its adapters first. While PEFT gives a layer new adapters, some of which begin with a
part of the base's weights (PiSSA, OLoRA), what replaces the base's ``.data`` is copied.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from horizon_lm.engine.host.parameters import StreamedParameter, copying_data
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.host_access import HostAccess
from horizon_lm.errors import StreamingError
from horizon_lm.model.adapter_kinds import is_adapter_layer
from horizon_lm.model.functional import in_place

_MERGE_METHODS = ("merge", "unmerge")
_ADD_METHOD = "update_layer"  # gives a layer new adapters


# Once per process: the hook is global in torch.
@lru_cache(maxsize=1)
def _watch_new_layers() -> None:
    """Replace the methods of layers that PEFT makes around weights of a streamed model from now on."""
    # PEFT builds a layer and may merge it before the model is used again, so no later look at the model would be in
    # time. Every adapter layer registers its base as a child when it is made.
    register_module_module_registration_hook(_replace_methods_of_new)


def _replace_methods_of_new(layer: nn.Module, name: str, base: nn.Module | None) -> None:
    """Replace the methods of a layer of PEFT that gets a streamed base. torch calls this hook whenever any module gets a child."""
    if base is None or not is_adapter_layer(layer):
        return
    # The new layer does not know the model; the streamed weights inside it do.
    owners = (param.owner() for param in base.parameters() if isinstance(param, StreamedParameter))
    if isinstance(owner := next(owners, None), HostAccess) and isinstance(owner.engine, Engine):
        _replace_methods(layer, owner.engine)


def _replace_methods(layer: Any, engine: Engine) -> bool:
    """Let a layer merge with plain parameters. Return whether it can merge at all."""
    # The methods of the class, because an instance that was streamed before has the replacements.
    names = [name for name in _MERGE_METHODS if callable(getattr(type(layer), name, None))]
    for name in names:
        # Weakly, both layer and engine: the layer owns this function, and PEFT may keep the layer longer than the
        # model lives.
        setattr(layer, name, _merge_method(layer, name, weakref.ref(engine)))
    if callable(getattr(type(layer), _ADD_METHOD, None)):
        setattr(layer, _ADD_METHOD, _add_method(weakref.ref(layer)))
    return bool(names)


class MergingLayers:
    """PEFT's layers of a streamed model that can be merged, whose methods that write base weights are replaced.

    Args:
        engine: the model's engine.
    """

    def __init__(self, engine: Engine) -> None:
        _watch_new_layers()
        layers = [layer for layer in engine.parts.model.modules() if is_adapter_layer(layer)]
        self._layers = [weakref.ref(layer) for layer in layers if _replace_methods(layer, engine)]

    def unmerge_disabled(self) -> None:
        """Unmerge the layers that are merged, but whose adapters are switched off.

        PEFT does so when such a layer runs. In a streamed model, a layer that runs has copies of its weights on the device, so
        those in host memory would remain merged.
        """
        # Weak references, because PEFT removes layers when it unloads adapters.
        for ref in self._layers:
            layer = ref()
            if layer is not None and layer.merged and _runs_unmerged(layer):
                layer.unmerge()


def _runs_unmerged(layer: Any) -> bool:
    """Return whether a layer computes without its adapters, although they may be merged into its base."""
    # PEFT's forward methods do so if adapters are disabled; the one of trainable tokens also if no adapter is active.
    replaces_tokens = hasattr(layer, "trainable_tokens_delta")
    return bool(layer.disable_adapters or (replaces_tokens and not layer.active_adapters))


def _add_method(layer_ref: "weakref.ref[Any]") -> Callable[..., Any]:
    """Return a replacement of PEFT's method that gives a layer new adapters: new values of base weights are copied (`copying_data`)."""

    def add(*args: Any, **kwargs: Any) -> Any:
        layer = layer_ref()
        with copying_data():
            return getattr(type(layer), _ADD_METHOD)(layer, *args, **kwargs)

    return add


def _merge_method(layer: nn.Module, name: str, engine_ref: "weakref.ref[Engine]") -> Callable[..., Any]:
    """Return a replacement of PEFT's method of this name, which runs that method while the layer has plain parameters."""
    layer_ref = weakref.ref(layer)

    def merge(*args: Any, **kwargs: Any) -> Any:
        live_layer, live_engine = layer_ref(), engine_ref()
        assert live_layer is not None
        method = getattr(type(live_layer), name)
        if live_engine is None:  # the streamed model is gone
            return method(live_layer, *args, **kwargs)
        # PEFT has made parameters that are not streamed yet. Reading `_horizon` has a side effect: it attaches the model with them.
        if not all(isinstance(param, StreamedParameter) for param in live_layer.parameters()):
            attached_again = live_engine.parts.model._horizon
            live_engine = attached_again.engine
        with _plain_parameters(live_layer, live_engine):
            return method(live_layer, *args, **kwargs)

    return merge


@contextmanager
def _plain_parameters(layer: nn.Module, engine: Engine) -> Iterator[None]:
    """Context manager: give a layer plain parameters with all bits, and write the changed ones to the store. Reject quantized weights."""
    engine.synchronize()  # the values must be those of the last step, and no update may write the slabs meanwhile
    store = engine.store
    places = [
        (module, attribute, name)
        for module in layer.modules()
        for attribute, param in module._parameters.items()
        if isinstance(param, StreamedParameter) and (name := engine.name_of(param)) is not None
    ]
    plain = {}
    if packed := next((name for _, _, name in places if name in store.codecs), None):
        raise StreamingError(
            f"{packed} is quantized, and adapters are not merged into its codes; save them and run horizon-lm merge, which writes a decoded "
            "model"
        )
    for module, attribute, name in places:
        param = module._parameters[attribute]
        assert param is not None
        # With low halves, the parameter is a rounded view; PEFT merges the fp32 master, as in a plain model of float32.
        value = param.detach() if store.slab_of(name).low is None else store.master(name)
        plain[name] = nn.Parameter(value.clone(), param.requires_grad)
    # A comparison, not a flag: PEFT writes .data or replaces it, which leaves no version counter to look at.
    before = {name: param.detach().clone() for name, param in plain.items()}
    try:
        with in_place((module, attribute, plain[name]) for module, attribute, name in places):
            yield
    finally:  # also after an error: of two adapters, PEFT may have merged the first and rejected the second
        with torch.no_grad():
            for name, merged in plain.items():
                # A merge leaves a layer's adapters and biases as they are. Written needlessly, they would make
                # resident blocks stream in again.
                if not torch.equal(merged.data, before[name]):
                    store.write(name, merged.data)
                    store.weights_changed()
