"""Attach a model to a device: give it an engine, and a class whose forward pass runs through it."""

import functools
import inspect
from dataclasses import replace
from functools import cache, partial
from typing import Any, NoReturn

import torch

from horizon_lm.common.streaming_options import StreamingOptions
from horizon_lm.device.base import Device
from horizon_lm.engine.calls.model_forward import ModelForward
from horizon_lm.engine.calls.token_logprobs import WANTED
from horizon_lm.engine.opening.generating_model import GeneratingModel
from horizon_lm.engine.opening.late_adapters import are_adapters_changed, take_in_adapters
from horizon_lm.engine.opening.options import StreamArguments, open_device
from horizon_lm.engine.opening.streamed_model import StreamedModel
from horizon_lm.engine.passes.ambient import outside_inference_mode
from horizon_lm.engine.passes.device_buffers import EngineOptions
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.errors import HeadWarning, StreamingError, warn
from horizon_lm.memory.store import Store
from horizon_lm.model.adapter_kinds import is_adapter_model
from horizon_lm.model.examination import Examined
from horizon_lm.model.head_path import ChunkedPath, find_chunked_path
from horizon_lm.model.parts import ModelParts
from horizon_lm.planning.arithmetic.residency import Residency, head_chunk_tokens
from horizon_lm.planning.measure.head_probe import head_peak


@cache
@torch.compiler.disable
def _reject_compile() -> NoReturn:
    """Raise StreamingError. torch.compile calls this function without tracing it: an error would only end the tracing."""
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
    """Return the host memory of a store that is copied to the device: this rank's ranges of weights and codes."""
    return [slab.weights[slab.own] for unit in store.units.values() for slab in unit.all]


def attach(arguments: StreamArguments, examined: Examined, store: Store, before: Engine | None = None) -> Any:
    """Open the device, make a model streamed, and return it. Its parameters must already be views into ``store``.

    Args:
        arguments: the arguments of `horizon_lm.stream`.
        examined: the model's units.
        store: host memory with its weights.
        before: the engine of the same model, if it was attached to this device before.
    """
    parts = examined.parts
    device, model = open_device(arguments.device, arguments.device_memory), parts.model
    _take_over_checkpointing(model)
    # First, because streams and the scratch memory of transfers and libraries take device memory, which
    # `spare_bytes` must not promise.
    device.open_streams()
    path = _find_chunked_path(parts) if arguments.head == "chunked" else None
    options = _engine_options(arguments, parts, device, store.precision.weight_dtype, path)
    _prepare_decoding(device, store, options.compute_dtype)
    engine = Engine(parts, store, device, options, arguments.device_mesh)
    # Memory that the model had before is registered already.
    registered: set[int] = set() if before is None else {slab.data_ptr() for slab in _copied_slabs(before.store)}
    device.register_host([slab for slab in _copied_slabs(store) if slab.data_ptr() not in registered])
    if before is not None:
        engine.counts.update(before.counts)  # `stats` counts since the model was streamed
    in_store = {name: ref.param for name, ref in engine.refs.items() if name not in store.codecs and ref.param.numel()}
    assert all(param.data_ptr() == store.weight(name).data_ptr() for name, param in in_store.items())
    engine.access.adopt_parameters()
    cls = type(model)
    parts.refer_weakly()  # the model owns the engine, which refers to the parts
    renew = partial(_attach_again, arguments)
    # Before the class changes, in which `_horizon` is a property without a setter.
    model._horizon = ModelForward(engine, cls, path, is_adapter_model(model), examined.images, renew)
    if arguments.check_gradients:
        model._horizon.check_gradients(arguments.check_gradients)
    model.__class__ = _streamed_class(cls)
    return model


def _prepare_decoding(device: Device, store: Store, dtype: torch.dtype) -> None:
    """Let the device prepare to decode the quantized tensors of a store to a dtype: once for each codec, shape and dtype."""
    names = store.codecs
    kinds = {(store.codecs[name], tuple(store.shape(name)), store.decoded_dtype(name)) for name in names}
    for codec, shape, rounded in kinds:
        device.prepare_decoding(codec, shape, dtype, rounded)


def _take_over_checkpointing(model: Any) -> None:
    """Switch off the activation checkpointing of a model's layers, within which blocks would be recomputed once more. The streamed
    model remembers that it was on.
    """
    for module in model.modules():
        if getattr(module, "gradient_checkpointing", False):
            module.gradient_checkpointing, model.wants_checkpointing = False, True


def _attach_again(arguments: StreamArguments, horizon: ModelForward) -> None:
    """Attach a model again if PEFT has changed its adapters. Leave other changes to the checks of the forward pass."""
    # After a failure of the device, weights can still be read and saved, but nothing is attached to it.
    if horizon.engine.device_lost or not are_adapters_changed(horizon):
        return
    engine = horizon.engine
    new_arguments = replace(
        arguments,
        # It is open already, and `open_device` returns it as it is.
        device=engine.device,
        device_micro_batch_size=engine.options.device_micro_batch_size,
        check_gradients=0,
    )
    with outside_inference_mode():
        attach(new_arguments, *take_in_adapters(horizon, new_arguments), before=engine)


def _find_chunked_path(parts: ModelParts) -> ChunkedPath | None:
    """Return the path that computes the loss from hidden states in chunks.

    Return None, with a warning unless the model is a classifier, if its loss is not computed in chunks.
    """
    path = find_chunked_path(parts)
    if isinstance(path, ChunkedPath):
        return path
    if not parts.classifies:
        warn(
            f"{type(parts.model).__name__}: head='whole' is used, with all logits at once, because {path}; "
            "set head='whole' to choose it yourself",
            HeadWarning,
        )
    return None


def _engine_options(
    arguments: StreamArguments, parts: ModelParts, device: Device, stored: torch.dtype, path: ChunkedPath | None
) -> EngineOptions:
    """Return the options of the engine: the arguments, with their open choices made for the model and the device.

    ``stored`` is the dtype of weights in host memory.
    """
    dtype = arguments.compute_dtype or (torch.float32 if device.torch_device.type == "cpu" else stored)
    trunk = parts.trunks()[-1] if path is None else path.trunk  # without a path, the innermost module around the blocks
    spare = device.spare_bytes()
    if arguments.compile == "auto":  # compiled code has no place between a block and its tiles
        compiles = arguments.on_accelerator and arguments.expert_tile is None
    else:
        compiles = bool(arguments.compile)
    chunk_tokens = head_chunk_tokens(spare, parts.vocabulary, dtype.itemsize, compiles)
    in_chunks = path is not None
    chosen: dict[str, Any] = {
        "head": "chunked" if in_chunks else "whole",
        "head_chunk_tokens": arguments.head_chunk_tokens or chunk_tokens,
        "compile": compiles,
    }
    return EngineOptions(
        # Each of these wins over those before it: the arguments as given, the residency that they fix, and the choices above.
        **StreamingOptions.of(arguments) | _residency(arguments, parts.num_blocks, device) | chosen,
        compute_dtype=dtype,
        # Without a limit no memory is planned, so nobody needs this trial run of the head on the meta device.
        head_peak=None if spare is None else head_peak(parts, trunk, dtype, in_chunks, compiled=compiles and in_chunks),
        check_recompute=arguments.check_recompute,
    )


def _residency(arguments: StreamArguments, num_blocks: int, device: Device) -> dict[str, Any]:
    """Return the residency that the arguments fix, as options; an empty dict if the engine plans it for each batch size.

    The engine plans it if nothing is chosen and the device's memory is limited; without a limit, all checkpoints can stay on the
    device. If resident blocks or graphs are chosen, ``auto`` requests all checkpoints on the device, too, of which `plan_device`
    keeps those that fit.
    """
    is_left_open = (
        arguments.activation_checkpoints == "auto"
        and arguments.resident_blocks is None
        and arguments.resident_graphs is None
    )
    if is_left_open and device.spare_bytes() is not None:
        return {}
    return Residency(*arguments.requested_residency(num_blocks, auto_on_device=True)).options()
