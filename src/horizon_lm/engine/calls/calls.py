"""One call of a streamed model: its arguments by name, on the device, and what is rejected in them.

Shapes: B batch rows, T tokens of a row.
"""

import inspect
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from horizon_lm.common.constants import IGNORE_INDEX
from horizon_lm.common.streaming_options import WHOLE_BATCHES
from horizon_lm.device.base import send
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.forward_pass import Batch, version_of
from horizon_lm.engine.passes.tree import Tree
from horizon_lm.errors import StreamingError
from horizon_lm.model import attention
from horizon_lm.model.adapter_kinds import is_differentiable_cache
from horizon_lm.model.generation import cache_of
from horizon_lm.model.proven import IMAGES, IMAGES_IN_MICRO_BATCHES

Call = dict[str, Any]  # the arguments of a call of the model, by name


def arguments_of(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Return the arguments of a call by name, the entries of ``**kwargs`` beside the named parameters.

    Args:
        signature: of the model's own forward method.
        args, kwargs: the arguments without the model.
    """
    # None stands for the model, the first parameter, which is left out afterwards.
    bound = signature.bind(None, *args, **kwargs).arguments
    bound.pop(next(iter(signature.parameters)))
    variadic = {p.name for p in signature.parameters.values() if p.kind == p.VAR_KEYWORD}
    call = {k: v for k, v in bound.items() if k not in variadic}
    for name in variadic & set(bound):
        call |= bound[name]
    return call


def shape_of(call: Call) -> tuple[int, int]:
    """Return (B, T), the rows and the tokens of a row, of ids (B, T) or embeddings (B, T, H); raise ValueError without either."""
    tokens = call.get("input_ids") if call.get("input_ids") is not None else call.get("inputs_embeds")
    if tokens is None:
        raise ValueError("give input_ids or inputs_embeds")
    rows, length = tokens.shape[:2]
    return rows, length


def prepare_batch(engine: Engine, call: Call) -> Batch:
    """Return the batch of a call, with its tensors on the device and its documents, if attention needs them."""
    rows, length = shape_of(call)
    config = engine.parts.model.config.get_text_config()
    # Before anything is sent, because padding is read from the mask on the host.
    attention.reject_large_mask(config, call, rows, length, engine.options.compute_dtype.itemsize)
    device = engine.device.torch_device
    # Segments are found on the host, from the caller's own tensors, which may be on the host already: reading back the copies
    # that `send` makes below would make the host wait.
    segments = attention.segments_of_call(call, device) if config._attn_implementation == attention.NAME else None
    arguments = Tree(call)  # masks may be in a dict, by kind of layer
    sent = arguments.rebuild([send(tensor, device) for tensor in arguments.tensors])
    ids = call.get("input_ids")
    # The embedding looks up ids on the host, too.
    host_ids = ids if ids is not None and ids.device.type == "cpu" else None
    version = 0 if ids is None else version_of(sent["input_ids"])
    return Batch(sent, host_ids, version, rows, length, segments)


def require_supported(batch: Batch, most_rows: int, name: str, images: Collection[str]) -> None:
    """Raise StreamingError for inputs that a streamed model would not compute exactly.

    Args:
        batch: the call.
        most_rows: rows of a micro-batch.
        name: class of the model.
        images: as in `Examined`.
    """
    if batch.modal and IMAGES not in images:
        raise StreamingError(
            f"{batch.modal[0]}: {name} is streamed on text only so far (docs/generated/models.md); leave it out, or stream "
            "with allow_unproven_model=True"
        )
    if batch.modal and most_rows < batch.rows and IMAGES_IN_MICRO_BATCHES not in images:
        raise StreamingError(
            f"{batch.modal[0]}: {name} was not proven with images in micro-batches (docs/generated/models.md); {WHOLE_BATCHES} for images, "
            "video and audio, or stream with allow_unproven_model=True"
        )


def choose_cache(call: Call, recording: bool) -> None:
    """Set ``use_cache`` to False in a call that asks for no cache of keys and values. Raise StreamingError for a cache in training."""
    cache = cache_of(call)
    # Configs have use_cache=True by default; a cache is kept only for callers that ask for one.
    if call.get("use_cache") is None and (recording or cache is None):
        call["use_cache"] = False
    # Rejected even if nothing is recorded: inputs and parameters decide that, and a trained prefix is neither.
    if torch.is_grad_enabled() and is_differentiable_cache(cache):
        raise StreamingError(
            "past_key_values need gradients, as in PEFT's prefix tuning, which is not streamed; use LoRA, or prompt tuning"
        )
    if recording and call.get("use_cache"):
        raise StreamingError(
            "use_cache=True is for generation; in training it would keep every block's keys; set it to False"
        )
    if recording and cache is not None:
        raise StreamingError(
            "a cache (past_key_values) is for generation; in training, a block that is computed again in the backward pass would add its "
            "keys to it once more. Call the model with all tokens, or under torch.no_grad()"
        )


def put_ignored_before(call: Call, num_tokens: int) -> None:
    """Put ignored labels before the labels of each row (B, T), for the virtual tokens that the model puts before its tokens."""
    if not num_tokens:
        return
    for name in ("labels", "shift_labels"):
        if call.get(name) is not None:
            call[name] = nn.functional.pad(call[name], (num_tokens, 0), value=IGNORE_INDEX)
