"""Create a streamed model from a model in memory, from a folder or hub id, or from a config."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from horizon_lm.device.base import Device
from horizon_lm.distributed.alike import drawing_alike
from horizon_lm.engine.opening.attaching import attach
from horizon_lm.engine.opening.filling import draw, stream_loaded, with_store
from horizon_lm.engine.opening.model_opening import OpenRequest, open_model
from horizon_lm.engine.opening.options import StreamArguments, open_device
from horizon_lm.engine.passes.ambient import outside_inference_mode
from horizon_lm.errors import ConfigError
from horizon_lm.model.opening import opened_dtype
from horizon_lm.model.skeletons import build_skeleton


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
    expert_tile: int | None = None,
    compile: bool | str = "auto",
    products: str = "plain",
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
        device: compute device: auto (cuda if available, else cpu), cpu, cuda or cuda:N. Also simulated, or a `Device`.
        precision: precision of the weights in host memory: fp32_master (bf16 to compute with and 16 low bits, together
            an exact fp32 master), bf16 (updates are rounded stochastically) or float32. With gradient and moments they
            take 14, 12 and 16 bytes per parameter.
        device_micro_batch_size: rows per micro-batch, which a block processes on the device at once. Default: the whole
            batch.
        head: compute the loss in chunks of tokens (chunked), or from all logits at once (whole). Only whole, Hugging
            Face's own head and loss, returns logits.
        activation_checkpoints: place where activation checkpoints (the blocks' inputs) are kept until the backward
            pass: device, host, the number of last blocks whose checkpoint stays on the device, or auto: on the device
            as far as memory allows. With auto, the remaining memory is used for resident blocks, as planned for the
            first batch.
        resident_blocks: number of last blocks whose weights stay on the device for the backward pass, so that they are
            not streamed in again. Default: as many as fit with activation_checkpoints auto, else 0.
        resident_graphs: number of resident blocks that also keep their autograd graph, so that they are not recomputed.
            Default: as many as fit if resident_blocks is left open, too, else 0.
        head_chunk_tokens: tokens per chunk of logits with a chunked head. Default: about 64 MiB of logits in host
            memory, and a sixteenth of the free memory on other devices.
        compute_dtype: the dtype of computations; None for float32 on the CPU and the stored dtype on other devices.
        grad_dtype: dtype of gradients in host memory: bfloat16 or float32. Default: float32 with precision float32 and
            for adapters, else bfloat16. With several backward calls per step, float32 rounds less often.
        device_memory: limit on device memory: on a GPU of all that torch allocates there, on a CPU of the engine's
            buffers. Default: no limit. A number of bytes.
        mlp_chunk_tokens: tokens per chunk of a feed-forward layer, for very long rows; the backward pass recomputes the
            chunks. Default: all tokens at once.
        expert_tile: number of experts of a mixture that are on the device at once: routed experts are streamed in tiles
            of this many, the rest of their block as one unit. Default: whole blocks.
        compile: compile blocks with torch.compile, once per block structure, and the loss of a chunk of logits. auto:
            only on a GPU.
        products: products of blocks' linear layers. float8: inputs by weights, and gradients by weights, in FP8 with a
            scale for each row (compute capability 8.9 or later, weights in bf16; a CPU emulates it); gradients of
            weights stay in bf16. plain: all as in Hugging Face.
        check_recompute: compare each recomputed output with the one of the forward pass; keeps all outputs, for tests.
        attn_implementation: attention implementation of transformers, such as sdpa, or varlen, which computes no
            attention to padding or to other packed rows. Default: the model's, but not eager for a model with sinks; on
            CUDA, varlen replaces sdpa if the model was proven with it and has neither a tower nor a ``score``.
        check_gradients: number of blocks whose gradients are compared with plain autograd, on the device and with the
            first batch; 0 for none. The first difference raises GradientMismatchError.
        allow_unproven_model: allow a model type or feature that is not verified against plain autograd
            (docs/generated/models.md).
        device_mesh: with several processes (torchrun), a DeviceMesh with the dimensions ``replicate`` and ``shard``, or ``shard``
            alone; None to shard within each machine and to replicate over the machines.

    Raises:
        ConfigError: a setting is invalid.
        ModelNotSupportedError: the model cannot be streamed exactly.

    Examples:
        >>> from transformers import LlamaForCausalLM
        >>> model = horizon_lm.stream(LlamaForCausalLM(config), device="cpu", precision="float32")
        >>> isinstance(model, LlamaForCausalLM)
        True
        >>> model(**batch).loss.backward()
        >>> model.lm_head.weight.grad.device  # weights and gradients are in host memory
        device(type='cpu')
    """
    settings = StreamArguments(
        device=device, precision=precision, device_micro_batch_size=device_micro_batch_size, head=head,
        activation_checkpoints=activation_checkpoints, resident_blocks=resident_blocks, resident_graphs=resident_graphs,
        head_chunk_tokens=head_chunk_tokens, compute_dtype=compute_dtype, grad_dtype=grad_dtype,
        device_memory=device_memory, mlp_chunk_tokens=mlp_chunk_tokens, expert_tile=expert_tile, compile=compile, products=products,
        check_recompute=check_recompute,
        attn_implementation=attn_implementation, check_gradients=check_gradients,
        allow_unproven_model=allow_unproven_model, device_mesh=device_mesh,
    )  # fmt: skip
    with outside_inference_mode():
        return stream_loaded(model, settings)


def from_pretrained(
    model_name_or_path: str | Path | None = None,
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
        model_name_or_path: model to start from: a Hugging Face folder or a hub id. Also by its name in transformers,
            ``pretrained_model_name_or_path``.
        device: as in `stream`.
        precision: as in `stream`; None for ``fp32_master``, or ``float32`` with ``dtype=torch.float32``.
        gguf_file: GGUF file in the model's folder to read the weights from. Decoding it needs memory for the whole
            model, in addition.
        trust_remote_code: run Python code that ships with the model.
        subfolder: the folder of the model inside of ``model_name_or_path``.
        config: the config to use instead of the folder's, or another folder or hub id that has it; a GGUF file has its own.
        model_class: ``transformers.AutoModelForSequenceClassification`` for a reward model or another classifier of rows,
            whose ``score`` is newly initialised if the folder has none; ``AutoModelForCausalLM`` or
            ``AutoModelForImageTextToText``; None for that of these two which the folder was saved from.
        options: other arguments of `stream` and of transformers' ``from_pretrained``: ``dtype``, ``revision``,
            ``cache_dir``, ``token``, ``force_download``, ``local_files_only``, and attributes of the model's config.
            A ``device_map`` to one GPU is ``device``, and its ``max_memory`` is ``device_memory``. Arguments that streaming does
            not support are rejected; the message names an alternative.

    Raises:
        ConfigError: an argument or the folder is invalid.
        ModelNotSupportedError: the model cannot be streamed exactly.

    Examples:
        >>> model = horizon_lm.from_pretrained("tiny-llama", device="cpu", precision="bf16")
        >>> model.lm_head.weight.dtype
        torch.bfloat16
        >>> model.save_pretrained("out")  # an ordinary Hugging Face folder
    """
    name = options.pop("pretrained_model_name_or_path", None) if model_name_or_path is None else model_name_or_path
    if name is None:
        raise ConfigError(
            "from_pretrained needs a folder or hub id; horizon_lm.from_config makes a model with random weights"
        )
    request = OpenRequest(
        name=name,
        gguf_file=gguf_file,
        trust_remote_code=trust_remote_code,
        subfolder=subfolder,
        config=config,
        model_class=model_class,
        options={"device": device, "precision": precision, **options},
    )
    with outside_inference_mode():
        return open_model(request)


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

    Examples:
        >>> model = horizon_lm.from_config(config, device="cpu")
        >>> sorted(horizon_lm.stats(model)["host_bytes_by_kind"])  # the fp32 master in two halves
        ['low_halves', 'weights']
    """
    settings = StreamArguments(device=device, precision=precision, **options)
    # Opened here, because weights are drawn on the device; `replace` below hands it on, so that it is not opened twice.
    opened = open_device(settings.device, settings.device_memory)
    with outside_inference_mode():
        model = build_skeleton(config, model_class, dtype=opened_dtype(precision))
        examined, store = with_store(model, settings)
        with drawing_alike(settings.device_mesh, opened.torch_device):
            for refs in examined.parts.units.values():
                draw(examined.parts.model, refs, store, opened.torch_device)
        return attach(replace(settings, device=opened), examined, store)
