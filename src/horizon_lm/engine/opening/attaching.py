"""Attach a model to a device: give it an engine, and a class whose forward pass runs through it."""

import functools
import inspect
from functools import cache
from typing import Any, NoReturn

import torch

from horizon_lm.device.base import Device
from horizon_lm.distributed.mesh import Mesh
from horizon_lm.engine.calls.chunked_losses import WANTED
from horizon_lm.engine.calls.model_forward import ModelForward
from horizon_lm.engine.opening.generating_model import GeneratingModel
from horizon_lm.engine.opening.streamed_model import StreamedModel
from horizon_lm.engine.passes.device_buffers import EngineOptions
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.errors import StreamingError
from horizon_lm.model.adapter_layers import is_adapter_model
from horizon_lm.model.head_path import ChunkedPath
from horizon_lm.model.parts import ModelParts
from horizon_lm.store.store import Store


@cache
@torch.compiler.disable
def _reject_compile() -> NoReturn:
    """Raise StreamingError. It is called by code that torch.compile has made, which an error would otherwise end."""
    raise StreamingError(
        "torch.compile(model) would bake weights into compiled code that are streamed; stream with compile=True instead, "
        "which compiles the blocks"
    )


def _streamed_class(cls: Any) -> Any:
    """Return the class of a streamed model.

    Its name, module and signatures are those of the original class, because trainers and transformers inspect them.
    """
    from transformers import GenerationMixin

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            _reject_compile()
        wanted = kwargs.pop(WANTED, None)
        if wanted is None:
            return self._horizon.forward(args, kwargs)
        return self._horizon.token_logprobs(args, kwargs, wanted)

    def new(_: Any, *args: Any, **kwargs: Any) -> Any:
        return cls(*args, **kwargs)  # a new model is not streamed

    functools.update_wrapper(forward, cls.forward, updated=())
    del forward.__wrapped__  # type: ignore[attr-defined]  # through which other code would bypass this function
    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    namespace = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__new__": new,
        "forward": forward,
    }
    mixed_in = GeneratingModel if issubclass(cls, GenerationMixin) else StreamedModel
    return type(cls.__name__, (mixed_in, cls), namespace)


def _copied_slabs(store: Store) -> list[torch.Tensor]:
    """Return the host memory of a store that is copied to the device."""
    return [
        slab for each in store.units.values() for slab in (each.weights[each.own], each.packed.data[each.packed.own])
    ]


def attach(
    parts: ModelParts, store: Store, device: Device, options: EngineOptions, path: ChunkedPath | None, images: bool,
    before: Store | None = None, mesh: Mesh | None = None,
) -> Any:  # fmt: skip
    """Make a model streamed. Its parameters must already be views into ``store``.

    Args:
        parts: the model's units.
        store: host memory with its weights.
        device: the device that computes.
        options: settings of the engine.
        path: the path from hidden states to the loss in chunks; None for ``head="whole"``.
        images: accept images, video and audio.
        before: the store of the same model, if it was attached to this device before.
        mesh: the ranks that train together; None for one.
    """
    model = parts.model
    if isinstance(model, StreamedModel):
        raise StreamingError("the model is streamed already")
    engine = Engine(parts, store, device, options, mesh)
    # Memory that the model had before is registered already.
    registered = {slab.data_ptr() for slab in _copied_slabs(before)} if before else ()
    device.register_host([slab for slab in _copied_slabs(store) if slab.numel() and slab.data_ptr() not in registered])
    plain = {name: ref.param for name, ref in engine.refs.items() if name not in store.codecs and ref.param.numel()}
    assert all(param.data_ptr() == store.weight(name).data_ptr() for name, param in plain.items())
    engine.access.adopt_parameters()
    cls = type(model)
    parts.refer_weakly()  # the model owns the engine, which refers to the parts
    # Before the class changes, in which `_horizon` is a property without a setter.
    model._horizon = ModelForward(engine, cls, path, is_adapter_model(model), images)
    model.__class__ = _streamed_class(cls)  # type: ignore[arg-type]
    return model
