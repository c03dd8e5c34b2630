"""Create a streamed model from a model in memory, from a folder or hub id, or from a config."""

import copy
import difflib
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from horizon_lm.device.base import Device
from horizon_lm.distributed.alike import copy_from_first, drawing_alike
from horizon_lm.distributed.mesh import current_shard, fail_together
from horizon_lm.distributed.whole_units import sharing_moved
from horizon_lm.engine.options import StreamArguments, open_device
from horizon_lm.engine.packed_parameters import PackedParameter, decoding
from horizon_lm.engine.parameters import require_plain
from horizon_lm.engine.quantized_opening import FindCodecs, open_weights, read_quantization
from horizon_lm.engine.recompute import outside_inference_mode
from horizon_lm.engine.same_weights import SameWeights, require_alike
from horizon_lm.engine.streamed_model import StreamedModel
from horizon_lm.errors import ConfigError, StreamingError
from horizon_lm.model import attention, hub
from horizon_lm.model.adapter_kinds import require_adapters_that_stream
from horizon_lm.model.adapters import Adapters, base_of_adapters
from horizon_lm.model.hub import build_skeleton
from horizon_lm.model.opening import opened_dtype
from horizon_lm.model.quantization import take_quantization
from horizon_lm.model.units import ModelParts, ParamRef, adapted_model
from horizon_lm.store.checkpoint_loader import load_weights
from horizon_lm.store.decoded_checkpoint import DecodedCheckpoint
from horizon_lm.store.store import Store
from horizon_lm.units import Unit

_DOWNLOAD = ("revision", "cache_dir", "token", "force_download", "local_files_only")
_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {  # arguments of transformers, with the values that have no effect here
    "low_cpu_mem_usage": (None, True, False),
    "use_safetensors": (None, True),
    "weights_only": (True,),
    "ignore_mismatched_sizes": (False,),
    "output_loading_info": (False,),
    "device_map": (None,),
    "load_in_8bit": (None, False),
    "tp_plan": (None,),
    "max_memory": (None,),
    "offload_folder": (None,),
    "variant": (None,),
    "state_dict": (None,),
    "key_mapping": (None,),
    "experts_implementation": (None,),
}
_EIGHT_BITS = "weights are quantized to 4 bits; use load_in_4bit=True, or leave it out"
_REMEDIES = {
    "device_map": "the weights stay in host memory; leave it out, and choose the device with device='cuda'",
    "load_in_8bit": _EIGHT_BITS,
    "tp_plan": "tensor parallelism is not supported; leave it out",
    "max_memory": "use device_memory to limit the bytes on the device",
    "offload_folder": "all weights are in host memory already; leave it out",
    "use_safetensors": "only safetensors are read; convert the weights first",
    "ignore_mismatched_sizes": "weights must fit the model; fix its config, or load it with transformers and stream() it",
    "output_loading_info": "missing weights are an error; leave it out",
    "variant": "only files with the usual names are read; load it with transformers and stream() it",
    "state_dict": "load the folder's weights first, then use model.load_state_dict()",
    "key_mapping": "load it with transformers and stream() it",
    "experts_implementation": "experts are computed with the default of transformers; leave it out",
    "weights_only": "only safetensors are read, which contain nothing but weights; leave it out",
}


def download_arguments(options: dict[str, Any]) -> dict[str, Any]:
    """Remove the options for downloading a model, and return them."""
    return {name: options.pop(name) for name in _DOWNLOAD if name in options}


def read_precision(precision: str | None, options: dict[str, Any]) -> str:
    """Remove ``dtype`` (or ``torch_dtype``) from the options, and return the matching precision.

    Raises:
        ConfigError: no precision has this dtype, or it contradicts the given precision.
    """
    dtype = options.pop("torch_dtype", None)
    dtype = options.pop("dtype", dtype)
    if isinstance(dtype, str) and dtype != "auto":
        dtype = getattr(torch, dtype, dtype)
    if dtype in (None, "auto"):
        return precision or "fp32_master"
    fits = {torch.float32: ("float32", "fp32_master"), torch.bfloat16: ("fp32_master", "bf16")}.get(dtype)
    if fits is None:
        raise ConfigError(f"dtype={dtype} is not supported: use bfloat16 or float32, or choose a precision")
    if precision is not None and precision not in fits:
        raise ConfigError(f"dtype={dtype} does not go with precision={precision!r}; leave one of them out")
    return precision or fits[0]


def config_arguments(options: dict[str, Any], config: Any) -> dict[str, Any]:
    """Remove the options that set attributes of the model's config, as in transformers, and return them.

    Raises:
        ConfigError: an option is unknown, or not supported.
    """
    for name, allowed in _WITHOUT_EFFECT.items():
        value = options.pop(name, allowed[0])
        if not any(value is each for each in allowed):
            raise ConfigError(
                f"from_pretrained: {name}={value!r} is not supported by a streamed model: {_REMEDIES[name]}"
            )
    ours = {field.name for field in fields(StreamArguments)}
    changes = {name: options.pop(name) for name in list(options) if name not in ours and hasattr(config, name)}
    for name in options.keys() - ours:
        close = difflib.get_close_matches(name, [*ours, *_DOWNLOAD], n=1)
        raise ConfigError(
            f"from_pretrained does not know {name}{f'; did you mean {close[0]}?' if close else ', nor does the config'}"
        )
    return changes


def stream(
    model: Any,
    device: str | Device = "auto",
    precision: str = "fp32_master",
    device_micro_batch_size: int | None = None,
    head: str = "chunked",
    *,
    activation_checkpoints: str | int = "auto",
    resident_blocks: int | None = None,
    resident_graphs: int | None = None,
    head_chunk_tokens: int | None = None,
    compute_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | str | None = None,
    device_memory: int | None = None,
    mlp_chunk_tokens: int | None = None,
    compile: bool | str = "auto",
    check_recompute: bool = False,
    attn_implementation: str | None = None,
    check_gradients: int = 0,
    allow_unproven_model: bool = False,
    device_mesh: Any = None,
) -> Any:
    """Stream a Hugging Face decoder that is already in memory.

    Its parameters are moved into the store one by one, and the memory of each is freed immediately. The module and its
    parameters remain the same objects.

    Args:
        model: a transformers causal language model, or a decoder for sequence classification (a reward model), with its
            weights.
        device: ``auto`` (CUDA if available), ``cpu``, ``cuda`` (or ``cuda:1``), ``simulated``, or a `Device`.
        precision: the format of weights in host memory: ``fp32_master`` (bf16 and 16 low bits, together an exact fp32
            master), ``bf16`` (updates are rounded stochastically) or ``float32``.
        device_micro_batch_size: rows per micro-batch; None for the whole batch.
        head: ``chunked`` (loss only; logits exist for one chunk of tokens at a time) or ``whole`` (Hugging Face's own
            head and loss, with logits).
        activation_checkpoints: the place where the inputs of blocks are kept for the backward pass: ``device``,
            ``host``, a number (on the device for that many of the last blocks), or ``auto`` (on the device as far as
            memory allows). With ``auto``, the remaining memory is used for resident blocks, as planned for the first
            batch.
        resident_blocks: the number of last blocks whose weights stay on the device from the forward to the backward
            pass, so that they are not streamed in again; None for no blocks, or with ``auto`` as many as fit.
        resident_graphs: the number of resident blocks whose autograd graph also stays, so that they are not recomputed.
        head_chunk_tokens: tokens per chunk of logits with ``chunked``; None for about 64 MiB of logits in host memory,
            and a sixteenth of the free memory on other devices.
        compute_dtype: the dtype of computations; None for float32 on the CPU and the stored dtype on other devices.
        grad_dtype: the dtype of gradients in host memory, 2 or 4 bytes per parameter; None for float32 in precision
            ``float32`` and bfloat16 otherwise. With several backward calls per step, float32 rounds less often.
        device_memory: the limit of bytes on the device; None for no limit.
        mlp_chunk_tokens: tokens per chunk of a feed-forward layer, for very long rows; the backward pass recomputes the
            chunks. None for all tokens.
        compile: compile blocks with torch.compile, once per block structure; ``auto`` for CUDA only.
        check_recompute: compare each recomputed output with that of the forward pass; keeps all outputs, for tests.
        attn_implementation: as in transformers, or ``varlen``: packed and padded rows without a mask, with flash-attn or
            torch's own kernel on CUDA. None for the model's own; on CUDA, ``varlen`` replaces ``sdpa`` if the model allows it.
        check_gradients: the number of blocks to compare with plain autograd in the first backward pass; the first
            difference raises GradientMismatchError.
        allow_unproven_model: allow models and features that are not in the table of ``docs/models.md``.
        device_mesh: with several processes (torchrun), a DeviceMesh with the dimensions ``replicate`` and ``shard``, or ``shard``
            alone; None to shard within each machine and to replicate over the machines.

    Raises:
        ConfigError: a setting is invalid.
        ModelNotSupportedError: the model cannot be streamed exactly.
    """
    settings = StreamArguments(
        device=device, precision=precision, device_micro_batch_size=device_micro_batch_size, head=head,
        activation_checkpoints=activation_checkpoints, resident_blocks=resident_blocks, resident_graphs=resident_graphs,
        head_chunk_tokens=head_chunk_tokens, compute_dtype=compute_dtype, grad_dtype=grad_dtype,
        device_memory=device_memory, mlp_chunk_tokens=mlp_chunk_tokens, compile=compile, check_recompute=check_recompute,
        attn_implementation=attn_implementation, check_gradients=check_gradients,
        allow_unproven_model=allow_unproven_model, device_mesh=device_mesh,
    )  # fmt: skip
    with outside_inference_mode():
        return _stream(model, settings)


def from_pretrained(
    model_name_or_path: str | Path,
    device: str | Device = "auto",
    precision: str | None = None,
    *,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    subfolder: str = "",
    config: Any = None,
    model_class: Any = None,
    **options: Any,
) -> Any:
    """Load a folder of safetensors or a hub id as a streamed model. Weights are read straight into the store, one by one.

    A folder of PEFT's adapters is opened as a PEFT model, with its frozen base.

    Args:
        model_name_or_path: a Hugging Face folder or hub id.
        device: as in `stream`.
        precision: as in `stream`; None for ``fp32_master``, or ``float32`` with ``dtype=torch.float32``.
        gguf_file: a GGUF file in the folder to read instead; dequantizing needs additional memory for the whole model.
        trust_remote_code: allow code that comes with the model.
        subfolder: the folder of the model inside of ``model_name_or_path``.
        config: the config to use instead of the folder's.
        model_class: ``transformers.AutoModelForSequenceClassification`` for a reward model or another classifier of rows,
            whose ``score`` is newly initialised if the folder has none; None for a causal language model.
        options: other arguments of `stream` and of transformers' ``from_pretrained``: ``dtype``, ``revision``,
            ``cache_dir``, ``token``, ``force_download``, ``local_files_only``, and attributes of the model's config.
            Arguments that streaming does not support are rejected; the message names an alternative.

    Raises:
        ConfigError: an argument or the folder is invalid.
        ModelNotSupportedError: the model cannot be streamed exactly.
    """
    with outside_inference_mode():
        return _open(
            model_name_or_path, device, precision, gguf_file, trust_remote_code, subfolder, config, model_class, options
        )


def open_for_run(
    model_name_or_path: str | Path,
    device: str | Device = "auto",
    precision: str | None = None,
    *,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    adapters: Adapters | None = None,
    reads_weights: bool = True,
    **options: Any,
) -> Any:
    """Return the streamed model of a run, like `from_pretrained`.

    Args:
        model_name_or_path, device, precision, gguf_file, trust_remote_code, options: as in `from_pretrained`.
        adapters: adapters to add to the model, which is frozen and has no fp32 master; a PEFT model is returned.
        reads_weights: read the weights. Otherwise a checkpoint will restore them; those of a GGUF file are read all the
            same, because transformers opens such a file only as a whole.
    """
    return _open(
        model_name_or_path,
        device,
        precision,
        gguf_file,
        trust_remote_code,
        "",
        None,
        None,
        options,
        adapters,
        reads_weights,
    )


def _open(
    model_name_or_path: str | Path,
    device: str | Device,
    precision: str | None,
    gguf_file: str | None,
    trust_remote_code: bool,
    subfolder: str,
    config: Any,
    model_class: Any,
    options: dict[str, Any],
    adapters: Adapters | None = None,
    reads_weights: bool = True,
) -> Any:
    folder = hub.local_folder(model_name_or_path, **download_arguments(options)) / subfolder
    base = None if adapters is not None or (folder / "config.json").is_file() else base_of_adapters(folder)
    if base is not None:
        adapters, model_name_or_path, folder = Adapters(folder=str(folder)), base, hub.local_folder(base)
    precision = read_precision(precision, options)
    if config is None and gguf_file is None:
        config = hub.load_config(folder, trust_remote_code, model_class=model_class)
    config = copy.deepcopy(config)  # as in transformers: the caller's own is not changed
    asked = read_quantization(options)
    changes = config_arguments(options, config)
    settings = StreamArguments(device=device, precision=precision, **options)
    if gguf_file is not None:
        if asked is not None:
            raise ConfigError(
                f"gguf_file={gguf_file!r} is decoded and not quantized again; leave load_in_4bit or quantization_config out, or "
                "convert it first"
            )
        if hub.auto_class(model_class) is not hub.auto_class(None):
            raise ConfigError(
                f"gguf_file={gguf_file!r} is read as a causal language model; load it with transformers and stream() it"
            )
        model = hub.load_gguf(folder, gguf_file, opened_dtype(precision))
        return _stream(model if adapters is None else adapters.add_to(model, draw=True), settings)
    for name, value in changes.items():
        setattr(config, name, value)
    attention.register()
    model = hub.open_skeleton(
        folder, config, model_class=model_class, trust_remote_code=trust_remote_code,
        attn_implementation=settings.attn_implementation, dtype=opened_dtype(precision),
    )  # fmt: skip
    checkpoint, find_codecs = open_weights(folder, take_quantization(config), asked, opened_dtype(precision))
    frozen = adapters is not None or (find_codecs is not None and not isinstance(checkpoint, DecodedCheckpoint))
    if frozen:
        model.requires_grad_(False)
    if adapters is not None:
        config.name_or_path = model.name_or_path = str(
            model_name_or_path
        )  # which PEFT writes into the adapter's config
    same = SameWeights(settings.device_mesh, checkpoint, config)
    parts, store = _with_store(model, settings, frozen, find_codecs)
    if reads_weights:
        with fail_together(settings.device_mesh, "the loading of weights"):
            new = load_weights(parts, store, checkpoint)
        same.require()
        drawn_in = torch.float32 if precision == "float32" else next(iter(store.source_dtypes.values()))
        with drawing_alike(settings.device_mesh, torch.device("cpu")):
            _draw(parts.model, new, store, torch.device("cpu"), drawn_in)
    if adapters is not None:
        return _add_adapters(adapters, parts, store, settings)
    return settings.attach(parts, store)


def _add_adapters(adapters: Adapters, base: ModelParts, store: Store, settings: StreamArguments) -> Any:
    """Add adapters to a model whose weights are in a store, attach it to its device, and return the PEFT model."""
    mesh, old = settings.device_mesh, store
    if mesh is not None and adapters.copies_weights:
        raise ConfigError(
            f"{adapters.copies_weights} is not supported with several processes: the new values are computed from weights, of which "
            "each process has a part; add the adapters with one process, save them, and open their folder"
        )
    names = {id(ref.param): ref.name for refs in base.units.values() for ref in refs}
    with decoding():  # DoRA begins with the norms of weights
        model = adapters.add_to(base.model, draw=True)
    if mesh is not None:
        configs = {name: each.to_dict() | {"base_model_name_or_path": ""} for name, each in model.peft_config.items()}
        require_alike(mesh, Path(adapters.folder or "adapters"), {"config of the adapters": configs})
    parts = settings.take_apart(adapted_model(model))
    refs = [ref for of_unit in parts.units.values() for ref in of_unit]
    old_names = {ref.name: names[id(ref.param)] for ref in refs if id(ref.param) in names}
    copy_from_first(mesh, {ref.name: ref.param.data for ref in refs if ref.name not in old_names})
    store = store.extended(_shapes(parts), old_names, settings.get_precision(parts), parts.frozen_base())
    parts.codecs = store.codecs
    with sharing_moved(mesh, store, old, old_names):
        for ref in refs:
            _move_in(ref, store)
    settings.attach(parts, store)
    return model


def from_config(
    config: Any,
    device: str | Device = "auto",
    precision: str = "fp32_master",
    *,
    model_class: Any = None,
    **options: Any,
) -> Any:
    """Create a streamed model with random weights.

    They are drawn on the device by the initialisation of transformers, unit by unit, so the largest unit must fit
    there.

    Args:
        config: the config of a transformers decoder.
        device: as in `stream`.
        precision: as in `stream`.
        model_class: as in `from_pretrained`.
        options: other arguments of `stream`.
    """
    settings = StreamArguments(device=device, precision=precision, **options)
    opened = open_device(settings.device, settings.device_memory)
    with outside_inference_mode():
        model = build_skeleton(config, model_class, dtype=opened_dtype(precision))
        parts, store = _with_store(model, settings)
        with drawing_alike(settings.device_mesh, opened.torch_device):
            for refs in parts.units.values():
                _draw(parts.model, refs, store, opened.torch_device)
        return replace(settings, device=opened).attach(parts, store)


def _draw(
    model: Any, refs: Sequence[ParamRef], store: Store, device: torch.device, dtype: torch.dtype | None = None
) -> None:
    """Initialise the parameters of one unit on a device, and write them to the store.

    They are drawn in ``dtype``; None for that of the store.
    """
    drawn = {
        ref.name: torch.zeros(ref.param.shape, dtype=dtype or store.weight(ref.name).dtype, device=device)
        for ref in refs
    }
    for ref in refs:
        for module, attribute in ref.places:
            module._parameters[attribute] = nn.Parameter(drawn[ref.name], requires_grad=False)
    # A module's whole initialisation runs, so that its parameters are drawn together, as in transformers.
    for module in {id(m): m for ref in refs for m, _ in ref.places}.values():
        model._init_weights(module)
    for ref in refs:
        store.source_dtypes[ref.name] = drawn[ref.name].dtype
        store.write(ref.name, drawn[ref.name])
        for module, attribute in ref.places:
            module._parameters[attribute] = ref.param


def _stream(model: Any, settings: StreamArguments) -> Any:
    """Move a model's parameters into a new store, and attach the model to a device. Return the model.

    Of a PEFT model, the model inside it is attached: PEFT, and whoever generates, calls that one.
    """
    require_adapters_that_stream(model)
    inside = adapted_model(model)
    if isinstance(inside, StreamedModel):
        raise StreamingError("the model is streamed already")
    parts = settings.take_apart(inside)
    for refs in parts.units.values():
        for ref in refs:
            require_plain(ref.param)
    copy_from_first(
        settings.device_mesh, {ref.name: ref.param.data for ref in parts.refs()} | dict(inside.named_buffers())
    )
    shard = current_shard(settings.device_mesh)
    store = Store(_shapes(parts), settings.get_precision(parts), parts.frozen_base(), shard=shard)
    for refs in parts.units.values():
        for ref in refs:
            _move_in(ref, store)
    settings.attach(parts, store)
    return model


def _move_in(ref: ParamRef, store: Store) -> None:
    """Move the values of a parameter into a store, unless they are there already."""
    if ref.name in store.codecs:  # a placeholder, whose codes were read into the store
        return
    place = store.weight(ref.name)
    if place.data_ptr() != ref.param.data_ptr():
        store.source_dtypes.setdefault(ref.name, ref.param.dtype)
        store.write(ref.name, ref.param.data)
        ref.param.data = place  # frees the original memory of the parameter


def _shapes(parts: ModelParts) -> dict[Unit, dict[str, torch.Size]]:
    """Return the shapes of all parameters, by unit and full name."""
    return {unit: {ref.name: ref.param.shape for ref in refs} for unit, refs in parts.units.items()}


def _with_store(
    model: Any, settings: StreamArguments, frozen: bool = False, find_codecs: FindCodecs | None = None
) -> tuple[ModelParts, Store]:
    """Create a store for a skeleton on the meta device, and replace its parameters by views into the store.

    Args:
        model: the skeleton.
        settings: arguments of the caller.
        frozen: no weight will be trained, so there are no low halves.
        find_codecs: function that returns the codecs of quantized weights; None if there are none.
    """
    parts = settings.take_apart(model)
    if opened_dtype(settings.precision) != torch.float32:
        parts.in_float32 = frozenset(ref.name for ref in parts.refs() if ref.param.dtype == torch.float32)
    if find_codecs is not None:
        parts.codecs = find_codecs(parts)
    never_trained = set(parts.units) if frozen else parts.frozen_base()
    shard = current_shard(settings.device_mesh)
    store = Store(_shapes(parts), settings.get_precision(parts), never_trained, codecs=parts.codecs, shard=shard)
    for refs in parts.units.values():
        for ref in refs:
            ref.param = (
                PackedParameter.of(store, ref.name)
                if ref.name in store.codecs
                else nn.Parameter(store.weight(ref.name), ref.param.requires_grad)
            )
            for module, attribute in ref.places:
                module._parameters[attribute] = ref.param
    return parts, store
