"""Derive a `ModelOutline` for the planner from a model without weights."""

import copy
from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from horizon_lm.common.units import HEAD, block
from horizon_lm.errors import ConfigError, HorizonError, ImagesNotSupportedError, ModelNotSupportedError, first_line
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.memory.codecs.bnb4bit import Bnb4Bit
from horizon_lm.memory.codecs.stack import Stack
from horizon_lm.memory.layout.model import ModelLayout
from horizon_lm.memory.layout.units import StorageLayout
from horizon_lm.model import attention
from horizon_lm.model.adapter_kinds import adapted_model
from horizon_lm.model.adapters import Adapters
from horizon_lm.model.compiling import chunk_mlps
from horizon_lm.model.components import Component, component_of_modules, component_of_params
from horizon_lm.model.examination import Examined, examine
from horizon_lm.model.float8.layers import use_float8
from horizon_lm.model.freezing import freeze
from horizon_lm.model.head_path import ChunkedPath, find_chunked_path
from horizon_lm.model.laid_out import model_layout
from horizon_lm.model.outer_trial import require_causal_images
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.proven import IMAGES, IMAGES_IN_MICRO_BATCHES
from horizon_lm.model.routed_experts import (
    RoutedExperts,
    experts_per_token,
    find_divisible_experts,
    find_experts,
    num_experts,
)
from horizon_lm.model.source import ModelSource
from horizon_lm.model.units import find_parts
from horizon_lm.planning.arithmetic.outline import (
    BlockKind,
    CoreCosts,
    HeadCosts,
    Linear,
    ModelOutline,
    Work,
)
from horizon_lm.planning.measure.block_calls import BlockCalls, call_of_each_block, find_calls, shared_bytes
from horizon_lm.planning.measure.head_probe import head_costs
from horizon_lm.planning.measure.image_costs import RowsWithImages, image_costs
from horizon_lm.planning.measure.packable import require_packable

_FEW = 5  # tokens of a trial


class QuantizedWeights(Protocol):
    """The quantized weights of a model."""

    def codecs(self, parts: ModelParts) -> dict[str, Codec]:
        """Return their codecs, by full name."""
        ...


def outline_model(
    source: ModelSource, *, length: int, dtype: torch.dtype, masked: bool = True, on_accelerator: bool = False,
    mlp_chunk_tokens: int | None = None, products: str = "plain", trainable: str | None = None,
    frozen: Collection[Component] = (), adapters: Adapters | None = None, quantized: QuantizedWeights | None = None, packed: bool = False,
    allow_unproven_model: bool = False, head_values: Sequence[str] = (), images: RowsWithImages | None = None, in_bfloat16: bool = False,
) -> ModelOutline:  # fmt: skip
    """Return the outline of a model.

    Args:
        source: the model.
        length: tokens of a sequence, T.
        dtype: dtype of weights and hidden states on the device.
        masked: rows are padded, so attention needs a mask.
        on_accelerator: choose attention as for a GPU.
        mlp_chunk_tokens, products: as in `horizon_lm.stream`.
        trainable, frozen: patterns of the names of trainable weights and components that are not, as in `model.freezing.freeze`.
        adapters: adapters that are trained on the frozen model; None for none.
        quantized: the model's quantized weights; None for none.
        packed: rows are packed, so the model must keep them apart.
        allow_unproven_model: as in `horizon_lm.stream`.
        head_values: per-token values that the loss uses, as in `cost.head_probe.head_peak`.
        images: the images of rows; None for rows of text.
        in_bfloat16: the weights come in bfloat16.

    Raises:
        ConfigError: a setting does not suit the model.
        ModelNotSupportedError: the model cannot be streamed exactly.
    """
    parts = _trained_parts(source, trainable, frozen, adapters, quantized)
    examined = examine(
        parts, attn_implementation=source.attn_implementation, on_accelerator=on_accelerator,
        allow_unproven_model=allow_unproven_model,
    )  # fmt: skip
    if packed:
        require_packable(parts, examined.attention)
    path_or_reason, layout = find_chunked_path(parts), model_layout(parts)
    path = path_or_reason if isinstance(path_or_reason, ChunkedPath) else None
    if images is not None:
        require_images(parts, examined)
    try:
        costs = _costs(parts, path, length, dtype, masked, on_accelerator, mlp_chunk_tokens, products, head_values)
    except HorizonError:
        raise
    except Exception as error:  # the model's own code may raise any exception on the meta device
        costs = _zero_costs(parts, error)
    else:
        if images is not None:
            costs |= _with_images(parts, images, dtype, on_accelerator, costs["kinds"])
    return ModelOutline(
        name=source.place,
        layout=layout,
        active=_parameters_per_token(parts, layout),
        experts=num_experts(parts.model.config.get_text_config()),
        routed_tokens=min((each.most_tokens for each in find_experts(parts).values() if not each.adapters), default=0),
        length=length,
        compute_bytes=dtype.itemsize,
        attention=examined.attention,
        has_adapters=bool(parts.adapters),
        base_is_frozen=bool(parts.frozen_base()),
        in_bfloat16=in_bfloat16,
        trains_decoded=any(not _is_of_bitsandbytes(codec) for codec in parts.codecs.values()),
        whole_head_only="" if path is not None else str(path_or_reason),
        whole_batch_only=examined.whole_batch_only
        or (images is not None and IMAGES_IN_MICRO_BATCHES not in examined.images),
        unproven=examined.unproven,
        **costs,
    )


def _trained_parts(
    source: ModelSource, trainable: str | None, frozen: Collection[Component], adapters: Adapters | None,
    quantized: QuantizedWeights | None,
) -> ModelParts:  # fmt: skip
    """Return the parts of a model as it is trained: with frozen weights, adapters, and the codecs of quantized weights."""
    model = copy.deepcopy(source.skeleton()).train()
    freeze(model, trainable, frozen)
    codecs: dict[int, Codec] = {}
    if quantized is not None:
        # Codecs have the names of the model without adapters, which rename the weights around them.
        base = find_parts(model)
        by_name = quantized.codecs(base)
        codecs = {id(ref.param): by_name[ref.name] for ref in base.refs() if ref.name in by_name}
    if adapters is not None:
        model = adapted_model(adapters.add_to(model, draw=False))
    parts = find_parts(model)
    parts.quantize({ref.name: codecs[id(ref.param)] for ref in parts.refs() if id(ref.param) in codecs})
    return parts


def published_layout(source: ModelSource, quantized: QuantizedWeights | None) -> ModelLayout[StorageLayout]:
    """Return the layout of a model's weights before they are trained or decoded."""
    return model_layout(_trained_parts(source, None, (), None, quantized))


def components_beside_text(source: ModelSource) -> frozenset[Component]:
    """Return the components with parameters that a row of text does not reach; none if the model's code cannot be tried without weights.

    A component is reached if one of its modules is called: models exist that pass the embeddings of text through their projector.
    """
    present = set(component_of_params(source.skeleton()).values())
    if present == {Component.LANGUAGE_MODEL}:
        return frozenset()
    model, called = copy.deepcopy(source.skeleton()), set[nn.Module]()
    parts, of_modules = find_parts(model), component_of_modules(model)
    around = {model, *parts.trunks()}  # their calls say nothing of the parameters that they have beside all modules
    for module in model.modules():
        if module not in around and any(True for _ in module.parameters()):
            module.register_forward_pre_hook(lambda module, _: called.add(module))
    try:
        call_of_each_block(parts, torch.float32, {"input_ids": torch.zeros((1, _FEW), dtype=torch.long)})
    except Exception:  # the model's own code may raise any exception
        return frozenset()
    reached = {component for path, component in of_modules.items() if model.get_submodule(path) in called}
    return frozenset(present - reached - {Component.LANGUAGE_MODEL})


def _costs(
    parts: ModelParts, path: ChunkedPath | None, length: int, dtype: torch.dtype, masked: bool, accelerated: bool,
    mlp_chunk_tokens: int | None, products: str, head_values: Sequence[str],
) -> dict[str, Any]:  # fmt: skip
    """Return the costs of blocks and head, as fields of an outline."""
    calls = find_calls(parts, dtype, length, masked, accelerated)
    if mlp_chunk_tokens is not None:
        for each in calls:
            if not chunk_mlps(each.block, mlp_chunk_tokens):
                raise ConfigError(f"mlp_chunk_tokens: {type(each.block).__name__} has no feed-forward layer to chunk")
    if products == "float8":
        use_float8(parts, {each.indices[0]: each.block for each in calls}.items())
    trunk = parts.trunks()[-1] if path is None else path.trunk
    in_chunks = path is not None  # otherwise all three heads compute all logits at once
    experts = find_divisible_experts(parts)
    return {
        "first_differentiated": parts.first_differentiated(),
        "kinds": [*_idle_towers(parts), *(_measure_kind(each, experts.get(each.indices[0])) for each in calls)],
        "shared": Linear(shared_bytes(calls, 1), shared_bytes(calls, 2)),
        "heads": {
            "chunked": head_costs(parts, trunk, dtype, in_chunks, compiled=False, values=head_values),
            "compiled": head_costs(parts, trunk, dtype, in_chunks, compiled=in_chunks, values=head_values),
            "whole": head_costs(parts, trunk, dtype, chunked=False, compiled=False, values=head_values),
        },
    }  # fmt: skip


def _zero_costs(parts: ModelParts, error: Exception) -> dict[str, Any]:
    """Return costs of 0 as fields of an outline, and the reason why they are unknown."""
    nothing, no_work = Linear(0, 0), Linear(Work(), Work())
    return {
        "first_differentiated": parts.first_differentiated(),
        "kinds": [BlockKind.idle(range(parts.num_blocks))],
        "shared": nothing,
        "heads": dict.fromkeys(("chunked", "compiled", "whole"), HeadCosts(nothing, no_work, no_work)),
        "unknown": f"{type(parts.model).__name__} cannot be tried without weights ({first_line(error)})",
    }


def _with_images(
    parts: ModelParts, images: RowsWithImages, dtype: torch.dtype, accelerated: bool, kinds: Sequence[BlockKind]
) -> dict[str, Any]:
    """Return the fields of an outline that images change, given the blocks for rows of text.

    Raises:
        ModelNotSupportedError: the model's code for images cannot be tried.
    """
    try:
        costs, of_towers, first_differentiated = image_costs(parts, images, dtype, accelerated)
    except HorizonError:
        raise
    except Exception as error:  # the model's own code may raise any exception on stand-ins
        raise ModelNotSupportedError(
            f"{type(parts.model).__name__}: its code for images cannot be tried without weights ({first_line(error)}), so a plan cannot count "
            "them; plan rows of text"
        ) from error
    of_decoder = [kind for kind in kinds if kind.indices[0] in parts.decoder_blocks]
    return {"images": costs, "kinds": [*of_towers, *of_decoder], "first_differentiated": first_differentiated}


def require_images(parts: ModelParts, examined: Examined) -> None:
    """Raise ImagesNotSupportedError if a model is streamed on text only, or if its attention cannot compute images."""
    if IMAGES not in examined.images:
        raise ImagesNotSupportedError(
            f"{type(parts.model).__name__} is streamed on text only so far (docs/generated/models.md); leave images out, or set allow_unproven_model"
        )
    if examined.attention == attention.NAME:
        require_causal_images(parts)


def _idle_towers(parts: ModelParts) -> list[BlockKind]:
    """Return the blocks of towers, which rows of text do not compute."""
    first = parts.decoder_blocks.start
    return [BlockKind.idle(range(first))] if first else []


def _measure_kind(calls: BlockCalls, experts: RoutedExperts | None) -> BlockKind:
    """Measure blocks of one structure, and return their memory and work as functions of the rows."""
    # Memory and work are linear in the rows, so two runs suffice.
    one, two = calls.run(1), calls.run(2)
    core = None if experts is None else _measure_core(calls, experts)
    return BlockKind(
        calls.indices, core=core, casts=one.casts, **_linear(one, two, "footprint", "forward_peak", "forward", "recompute", "backward")
    )  # fmt: skip


def _measure_core(calls: BlockCalls, experts: RoutedExperts) -> CoreCosts:
    """Measure blocks of one structure without their experts, and the experts alone, as `_measure_kind` does."""
    one, two = calls.run_core(experts, 1), calls.run_core(experts, 2)
    # The gradients are of weights, so they are the same for all numbers of rows.
    return CoreCosts(
        experts.count, one.grad, **_linear(one, two, "footprint", "before", "forward", "recompute", "backward")
    )


def _linear(one: object, two: object, *names: str) -> dict[str, Any]:
    """Return these attributes of a run with one row and of one with two, as functions of the rows."""
    return {name: Linear(getattr(one, name), getattr(two, name)) for name in names}


def _is_of_bitsandbytes(codec: Codec) -> bool:
    """Return whether a codec, or the codec inside a stack, is a bitsandbytes format."""
    return isinstance(codec.of if isinstance(codec, Stack) else codec, Bnb4Bit)


def _parameters_per_token(parts: ModelParts, layout: ModelLayout[StorageLayout]) -> int:
    """Return the number of parameters in decoder blocks and head that compute a token; of the experts, only those that it is routed to count."""
    config = parts.model.config.get_text_config()
    experts = num_experts(config)
    chosen = experts_per_token(config) or experts
    active = layout.numel(HEAD)
    for index in parts.decoder_blocks:
        for ref in parts.units[block(index)]:
            of_experts = ref.param.ndim == 3 and ref.param.shape[0] == experts
            active += ref.param.numel() * chosen // experts if of_experts else ref.param.numel()
    return active
