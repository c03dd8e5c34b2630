"""Open a model from a folder or a hub id: find its files, build it without weights, and read the weights into a store."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from horizon_lm.common.paths import lasting_name
from horizon_lm.distributed.alike import drawing_alike
from horizon_lm.distributed.mesh import fail_together
from horizon_lm.engine.opening.attaching import attach
from horizon_lm.engine.opening.filling import add_adapters, draw, stream_loaded, with_store
from horizon_lm.engine.opening.hf_arguments import config_arguments, download_arguments, read_precision
from horizon_lm.engine.opening.options import StreamArguments
from horizon_lm.engine.opening.placement import settle_placement
from horizon_lm.engine.opening.quantized_opening import open_weights, read_quantization
from horizon_lm.engine.opening.same_weights import SameWeights
from horizon_lm.errors import ConfigError
from horizon_lm.model import gguf_weights, hf_config, hub
from horizon_lm.model.adapter_kinds import adapted_model
from horizon_lm.model.adapters import Adapters, base_of_adapters, class_of_adapters, open_base
from horizon_lm.model.files.checkpoint_loader import load_weights
from horizon_lm.model.files.written_weights import main_dtype
from horizon_lm.model.opening import opened_dtype
from horizon_lm.model.quantized_object import show_quantization
from horizon_lm.model.source import ModelSource


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRequest:
    """A model to open, and the way to open it.

    Attributes:
        name: its folder or hub id.
        gguf_file, trust_remote_code, subfolder, config, model_class: as in `horizon_lm.from_pretrained`.
        options: other arguments of `horizon_lm.from_pretrained`, such as ``device`` and ``precision``.
        source: the model of ``name`` that the caller has opened already, for the same arguments; None to open it.
        adapters: adapters to add to the model, which is frozen and has no fp32 master; a PEFT model is returned.
        freeze: freezes, in the model without its weights, those that are not trained; None to train all.
        reads_weights: read the weights. Otherwise a checkpoint will restore them; those of a GGUF file are read all the
            same, because transformers opens such a file only as a whole.
    """

    name: str | Path
    gguf_file: str | None = None
    trust_remote_code: bool = False
    subfolder: str = ""
    config: Any = None
    model_class: Any = None
    options: Mapping[str, Any] = field(default_factory=dict)
    source: ModelSource | None = None
    adapters: Adapters | None = None
    freeze: Callable[[Any], None] | None = None
    reads_weights: bool = True


def open_model(request: OpenRequest) -> Any:
    """Return the streamed model of a request.

    Raises:
        ConfigError: an argument or the folder is invalid.
        ModelNotSupportedError: the model cannot be streamed exactly.
    """
    options = dict(request.options)  # each of the calls below removes the options that it reads
    generation = options.pop("generation_config", None)
    placed_anywhere = settle_placement(options)
    model = _open(request, options)
    adapted_model(model).placed_anywhere = placed_anywhere
    if generation is not None and model.can_generate():
        adapted_model(model).generation_config = copy.deepcopy(generation)
    return model


def _open(request: OpenRequest, options: dict[str, Any]) -> Any:
    """Return the streamed model of a request, with the generation config of its folder."""
    request, folder = find_folder(request, **download_arguments(options))
    precision = read_precision(options)
    config = request.config if request.source is None else request.source.config
    if config is None and request.gguf_file is None:
        config = hf_config.load_config(folder, request.trust_remote_code, model_class=request.model_class)
    elif isinstance(config, str | Path):
        config = hf_config.load_config(
            hub.local_folder(config), request.trust_remote_code, model_class=request.model_class
        )
    quantization = read_quantization(options)
    # After the other readers of options: this one takes each that the config has an attribute for, and rejects unknown ones.
    changes = config_arguments(options, config)
    arguments = StreamArguments(precision=precision, **options)
    if request.gguf_file is not None:
        return _open_gguf(request, folder, arguments, quantization)
    # A source that is given was opened with these changes (`OpenRequest.source`).
    source = request.source or ModelSource(
        _copy_with(config, changes), str(folder), folder,
        model_class=request.model_class or class_of_adapters(request.adapters, config),
        trust_remote_code=request.trust_remote_code, attn_implementation=arguments.attn_implementation,
        dtype=opened_dtype(precision),
    )  # fmt: skip
    return _open_checkpoint(request, source, folder, arguments, quantization)


def find_folder(request: OpenRequest, **download: Any) -> tuple[OpenRequest, Path]:
    """Return the request, and the folder of its model. A folder of adapters becomes a request for their base.

    Args:
        request: the request.
        download: the arguments of a download, such as ``revision``.
    """
    if request.source is not None and request.source.folder is not None:
        return request, request.source.folder
    folder = hub.local_folder(request.name, **download) / request.subfolder
    # PEFT's folders have an adapter_config.json and no config.json.
    base = None if request.adapters is not None or (folder / "config.json").is_file() else base_of_adapters(folder)
    if base is None:
        return request, folder
    return replace(request, name=base, adapters=Adapters(folder=str(folder))), open_base(folder, base)


def _copy_with(config: Any, changes: Mapping[str, Any]) -> Any:
    """Return a copy of a config with other values. The caller's config is not changed, as in transformers."""
    config = copy.deepcopy(config)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


def _open_gguf(
    request: OpenRequest, folder: Path, arguments: StreamArguments, quantization: Mapping[str, Any] | None
) -> Any:
    """Open a GGUF file, which is decoded as a whole."""
    assert request.gguf_file is not None
    if quantization is not None:
        raise ConfigError(
            f"gguf_file={request.gguf_file!r} is decoded and not quantized again; leave load_in_4bit or quantization_config out, or "
            "convert it first"
        )
    if request.config is not None:
        raise ConfigError(f"gguf_file={request.gguf_file!r} has a config of its own; leave config out")
    if hf_config.auto_class(request.model_class) is not hf_config.auto_class(None):
        raise ConfigError(
            f"gguf_file={request.gguf_file!r} is read as a causal language model; load it with transformers and stream() it"
        )
    model = gguf_weights.load_gguf(folder.absolute(), request.gguf_file, opened_dtype(arguments.precision))
    if request.freeze is not None:
        request.freeze(model)
    return stream_loaded(model if request.adapters is None else request.adapters.add_to(model, draw=True), arguments)


def _open_checkpoint(
    request: OpenRequest,
    source: ModelSource,
    folder: Path,
    arguments: StreamArguments,
    quantization: Mapping[str, Any] | None,
) -> Any:
    """Read the weights of a folder straight into the store, one by one, and attach the model."""
    model, adapters, mesh = source.take_skeleton(), request.adapters, arguments.device_mesh
    checkpoint, find_codecs = open_weights(folder, source.quantization, quantization, opened_dtype(arguments.precision))
    # Codes cannot be updated, so a model with quantized weights is trained by adapters alone.
    frozen = adapters is not None or find_codecs is not None
    if frozen:
        # Set on the skeleton: its parameters in the store take `requires_grad` over.
        model.requires_grad_(False)
    elif request.freeze is not None:
        request.freeze(model)
    if adapters is not None:  # PEFT writes the name into the adapter's config
        model.config.name_or_path = model.name_or_path = lasting_name(str(request.name))
    # Before anything is read, because the comparison hashes the bytes as they are read.
    same_weights = SameWeights(mesh, checkpoint, model.config)
    # What the caller freezes when it opens the model is never trained; whoever freezes weights later may train them again.
    in_bfloat16 = request.freeze is not None and source.quantization is None and checkpoint.stored.in_bfloat16
    examined, store = with_store(model, arguments, frozen, find_codecs, in_bfloat16)
    if store.codecs:
        show_quantization(examined.parts, source.quantization or quantization or {})
    if request.reads_weights:
        with fail_together(mesh, "the loading of weights"):
            missing = load_weights(examined.parts, store, checkpoint)
        # Before anything is computed from the weights, and outside of `fail_together`: this error is raised on all
        # ranks anyway.
        same_weights.require()
        # Weights that the folder lacks are drawn in the dtype of the embedding.
        with drawing_alike(mesh, torch.device("cpu")):
            draw(examined.parts.model, missing, store, torch.device("cpu"), main_dtype(store))
    if adapters is not None:
        return add_adapters(adapters, examined.parts, store, arguments)
    return attach(arguments, examined, store)
