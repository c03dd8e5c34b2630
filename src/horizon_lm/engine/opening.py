"""Making a model streamed: one that is built already, one from a folder or hub id, one from a config."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from horizon_lm.device.base import Device
from horizon_lm.engine.hub_arguments import config_arguments, download_arguments, read_precision
from horizon_lm.engine.parameters import require_plain
from horizon_lm.engine.settings import Settings, open_device
from horizon_lm.engine.streamed import StreamedModel
from horizon_lm.errors import StreamingError
from horizon_lm.model import attention, source
from horizon_lm.model.parts import ModelParts, ParamRef
from horizon_lm.model.skeleton import build_skeleton
from horizon_lm.store.load import Checkpoint, load_weights
from horizon_lm.store.store import Store


def stream(
    model: Any,
    device: str | Device = "auto",
    precision: str = "fp32_master",
    device_micro_batch_size: int | None = None,
    head: str = "chunked",
    *,
    boundaries: str | int = "auto",
    held_blocks: int | None = None,
    held_graphs: int | None = None,
    head_chunk_tokens: int | None = None,
    compute_dtype: torch.dtype | None = None,
    grad_dtype: torch.dtype | None = None,
    device_memory: int | None = None,
    mlp_chunk_tokens: int | None = None,
    compile: bool | str = "auto",
    check_recompute: bool = False,
    attn_implementation: str | None = None,
    check_gradients: int = 0,
    allow_unproven_model: bool = False,
) -> Any:
    """Stream a Hugging Face causal language model that is in memory already.

    Its parameters move into the store one by one, and each is freed where it was. The module stays the same object,
    and so do its parameters.

    Args:
        model: a transformers causal language model with its weights.
        device: ``auto`` (CUDA where there is one), ``cpu``, ``cuda`` (or ``cuda:1``), ``simulated``, or a `Device`.
        precision: how weights are kept: ``fp32_master`` (bf16 and 16 low bits, an exact fp32 master), ``bf16``
            (stochastically rounded updates) or ``float32``.
        device_micro_batch_size: rows on the device at once inside a block; None for the whole batch.
        head: ``chunked`` (loss only, logits never whole) or ``whole`` (Hugging Face's own head and loss, with logits).
        boundaries: where a block's input waits for the backward: ``device``, ``host``, a number for the device in so many of
            the last blocks, or ``auto`` for the device as far as there is room. With ``auto``, what room is left then is
            spent on held blocks, once the first batch is there.
        held_blocks: so many of the last blocks keep their weights on the device from forward to backward, so that they are
            not streamed in a second time; None for none, or with ``auto`` as many as there is room for.
        held_graphs: so many of these keep their whole computation, so that it is not repeated in the backward.
        head_chunk_tokens: tokens whose logits exist at once with ``chunked``; None for about 64 MiB of logits in host memory,
            and a sixteenth of the free memory elsewhere.
        compute_dtype: on the device; None for float32 on the CPU and the stored dtype elsewhere.
        grad_dtype: of the gradients in host memory, 2 or 4 bytes per parameter; None for float32 in precision ``float32``
            and bfloat16 otherwise. Several backward calls per step add up with fewer roundings in float32.
        device_memory: bytes that buffers on the device may take; None for no limit of ours.
        mlp_chunk_tokens: tokens whose feed-forward activations exist at once, for very long rows; they are computed once more
            in the backward. None for all.
        compile: compile blocks with torch.compile, each structure once; ``auto`` on CUDA.
        check_recompute: compare each recomputed output with the forward's (for tests; keeps all outputs).
        attn_implementation: as in transformers, or ``varlen``: packed and padded rows without a mask, through flash-attn or
            torch's own kernel on CUDA. None for what the model has, and on CUDA ``varlen`` instead of ``sdpa`` where it can.
        check_gradients: in the first training backward, compare so many blocks with plain autograd on the device, and raise
            GradientMismatchError at the first difference.
        allow_unproven_model: stream a model, or use a feature, that is not in the table of ``docs/models.md``.

    Raises:
        ConfigError: a setting that is not possible.
        ModelNotSupportedError: a model that cannot be streamed exactly.
    """
    settings = Settings(
        device, precision, device_micro_batch_size, head, boundaries, held_blocks, held_graphs, head_chunk_tokens,
        compute_dtype, grad_dtype, device_memory, mlp_chunk_tokens, compile, check_recompute, attn_implementation,
        check_gradients, allow_unproven_model,
    )  # fmt: skip
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
    **options: Any,
) -> Any:
    """Open a folder of safetensors or a hub id, streamed. Weights go straight into the store, tensor by tensor.

    Args:
        model_name_or_path: a Hugging Face folder or hub id.
        device: as in `stream`.
        precision: as in `stream`; None for ``fp32_master``, or ``float32`` with ``dtype=torch.float32``.
        gguf_file: a GGUF file in it to read instead; the whole model is in memory once while it is dequantized.
        trust_remote_code: allow the model's own code.
        subfolder: of the folder or hub id, where the model is.
        config: in the place of that in the folder.
        options: the other arguments of `stream`, which raise what they raise there, and those of transformers'
            ``from_pretrained``: ``dtype``, ``revision``, ``cache_dir``, ``token``, ``force_download``, ``local_files_only``,
            and settings of the model's config. Those that have no place in streaming are rejected with what does their work.

    Raises:
        ConfigError: an argument or a folder that cannot be used.
        ModelNotSupportedError: a model that cannot be streamed exactly.
    """
    precision = read_precision(precision, options)
    folder = source.local_folder(model_name_or_path, **download_arguments(options)) / subfolder
    config = source.load_config(folder, trust_remote_code) if config is None and gguf_file is None else config
    changes = config_arguments(options, config)
    settings = Settings(device, precision, **options)
    if gguf_file is not None:
        return _stream(source.load_gguf(folder, gguf_file), settings)
    for name, value in changes.items():
        setattr(config, name, value)
    attention.register()
    model = source.open_skeleton(
        folder, config, trust_remote_code=trust_remote_code, attn_implementation=settings.attn_implementation
    )
    parts, store = _empty(model, settings)
    load_weights(parts, store, Checkpoint(folder))
    return settings.attach(parts, store)


def from_config(config: Any, device: str | Device = "auto", precision: str = "fp32_master", **options: Any) -> Any:
    """Make a model with random weights; options as in `stream`.

    Transformers' own initialisation draws them on the device, unit by unit: no more than the largest unit is there.
    """
    settings = Settings(device, precision, **options)
    opened = open_device(settings.device, settings.device_memory)
    model = build_skeleton(config)
    parts, store = _empty(model, settings)
    for refs in parts.units.values():
        _draw(parts.model, refs, store, opened.torch_device)
    return replace(settings, device=opened).attach(parts, store)


def _draw(model: Any, refs: Sequence[ParamRef], store: Store, device: torch.device) -> None:
    """Initialise the parameters of one unit on a device, and keep them in the store."""
    drawn = {ref.name: torch.zeros(ref.param.shape, dtype=store.weight(ref.name).dtype, device=device) for ref in refs}
    for ref in refs:
        for module, attribute in ref.places:
            module._parameters[attribute] = nn.Parameter(drawn[ref.name], requires_grad=False)
    for module in {id(m): m for ref in refs for m, _ in ref.places}.values():
        model._init_weights(module)
    for ref in refs:
        store.source_dtypes[ref.name] = drawn[ref.name].dtype
        store.write(ref.name, drawn[ref.name])
        for module, attribute in ref.places:
            module._parameters[attribute] = ref.param


def _stream(model: Any, settings: Settings) -> Any:
    if isinstance(model, StreamedModel):
        raise StreamingError("the model is streamed already")
    parts = settings.take_apart(model)
    for refs in parts.units.values():
        for ref in refs:
            require_plain(ref.param)
    store = Store(_shapes(parts), settings.get_precision())
    for refs in parts.units.values():
        for ref in refs:
            store.source_dtypes[ref.name] = ref.param.dtype
            store.write(ref.name, ref.param.data)
            ref.param.data = store.weight(ref.name)  # frees what it pointed to before
    return settings.attach(parts, store)


def _shapes(parts: ModelParts) -> dict[str, dict[str, torch.Size]]:
    return {unit: {ref.name: ref.param.shape for ref in refs} for unit, refs in parts.units.items()}


def _empty(model: Any, settings: Settings) -> tuple[ModelParts, Store]:
    """A skeleton whose parameters are views into a new store."""
    parts = settings.take_apart(model)
    store = Store(_shapes(parts), settings.get_precision())
    for refs in parts.units.values():
        for ref in refs:
            ref.param = nn.Parameter(store.weight(ref.name), ref.param.requires_grad)
            for module, attribute in ref.places:
                module._parameters[attribute] = ref.param
    return parts, store
