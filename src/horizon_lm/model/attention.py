"""Attention over packed and padded rows without a mask: ``attn_implementation="varlen"``.

Rows are divided into segments that do not attend to each other: packed documents, or the tokens of a padded row and its
padding. The engine sets the segments of the rows that it computes; Hugging Face makes no mask for this implementation,
so no tensor of size (T, T) exists. Rows with a single segment use torch's scaled dot-product attention.

Shapes: B batch, T tokens, D head dimension; queries are (B, heads, T, D).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch

from horizon_lm.common.quantities import counted, format_bytes
from horizon_lm.errors import DoesNotFitError, ModelNotSupportedError
from horizon_lm.model import attention_with_sinks
from horizon_lm.model.compiling import mark_varying
from horizon_lm.model.generation import cache_of
from horizon_lm.model.of_thread import OfThread
from horizon_lm.model.segment_attention import Offsets, causal, segment_attention, visible
from horizon_lm.model.sink_attention import sink_attention

NAME = "varlen"
_AXES = 3  # of the positions of images: time, height and width
LARGEST_MASK = 2**30  # bytes of a mask (B, 1, T, T): a boolean mask for a single row of 32k tokens
_offsets_of_thread = OfThread(None)  # offsets of the segments of those rows that this thread computes
_without_kernels = OfThread(False)  # this thread computes segments one by one, without kernels for them


class Segments:
    """The segments of each row of a batch, with their offsets for kernels, which are computed once per pass.

    Args:
        lengths: lengths of each row's segments, in order; their sum is T.
        device: device of the kernels.
    """

    def __init__(self, lengths: Sequence[Sequence[int]], device: torch.device) -> None:
        self._lengths, self._device = [list(row) for row in lengths], device
        self._offsets: dict[tuple[int, int], Offsets] = {}

    def of(self, start: int, stop: int) -> list[int]:
        """Return the segment lengths of rows [start, stop), concatenated."""
        return [length for row in self._lengths[start:stop] for length in row]

    def offsets(self, start: int, stop: int) -> Offsets:
        """Return the start of each segment of rows [start, stop) and the end of the last, on the device and on the host."""
        if (start, stop) not in self._offsets:
            on_host = torch.tensor([0, *self.of(start, stop)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            if self._device.type == "cuda":
                with torch.cuda.device(self._device):  # torch page-locks memory through the current device
                    on_host = on_host.pin_memory()
            on_device = on_host.to(self._device, non_blocking=True, copy=True)  # a separate tensor even on a CPU
            for tensor in (on_device, on_host):
                mark_varying(tensor, [0])
            self._offsets[start, stop] = on_device, on_host
        return self._offsets[start, stop]


def find_segments(
    attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None, device: torch.device
) -> Segments | None:
    """Return the segments of a batch, or None if every row is a single segment.

    A segment ends where the mask (B, T) changes between tokens and padding. In a batch without a mask it ends where
    positions (B, T) or (1, T) do not increase by one, which is Hugging Face's convention for packed rows. For models that
    give images positions of their own, these are the first of four or more, (4, B, T).
    """
    if position_ids is not None and position_ids.ndim == 3 and len(position_ids) > _AXES:
        position_ids = position_ids[0]
    # (B, T - 1): whether a segment ends between a token and the next one.
    if attention_mask is not None:
        changes = attention_mask[:, 1:].cpu() != attention_mask[:, :-1].cpu()
    elif position_ids is not None and position_ids.ndim == 2:
        changes = position_ids[:, 1:].cpu() != position_ids[:, :-1].cpu() + 1
    else:
        return None
    if not changes.any():
        return None
    lengths = []
    for row in changes:
        borders = [0, *(row.nonzero().squeeze(1) + 1).tolist(), row.numel() + 1]
        lengths.append([stop - start for start, stop in pairwise(borders)])
    return Segments(lengths, device)


def segments_of_call(call: Mapping[str, Any], device: torch.device) -> Segments | None:
    """Return the segments of a call's rows (`find_segments`).

    Raises:
        ModelNotSupportedError: the mask is not one of tokens and padding, or a row has several segments although the call has a cache.
    """
    mask = call.get("attention_mask")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
        raise ModelNotSupportedError(
            "attn_implementation='varlen' takes an attention_mask of tokens and padding, (B, T); choose 'sdpa' or 'eager' for another"
        )
    segments = find_segments(mask, call.get("position_ids"), device)
    if segments is not None and (cache_of(call) is not None or call.get("use_cache")):
        raise ModelNotSupportedError("attn_implementation='varlen' cannot generate from padded rows; choose 'sdpa'")
    return segments


def reject_large_mask(config: Any, call: Mapping[str, Any], rows: int, length: int, itemsize: int) -> None:
    """Raise DoesNotFitError if a forward pass would make a mask larger than `LARGEST_MASK`.

    Args:
        config: config of the text model.
        call: arguments of its forward method.
        rows, length: shape of its input, B and T.
        itemsize: bytes of an element of the hidden states.
    """
    mask = call.get("attention_mask")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2):
        return  # a complete mask (or masks by kind of layer), which exists already

    def segmented() -> bool:
        return find_segments(mask, call.get("position_ids"), torch.device("cpu")) is not None

    problem = large_mask(config, config._attn_implementation, rows, length, itemsize, segmented)
    if problem is not None:
        raise DoesNotFitError(problem)


def large_mask(
    config: Any, implementation: str, rows: int, length: int, itemsize: int, segmented: Callable[[], bool]
) -> str | None:
    """Return the reason why a batch would need a mask larger than `LARGEST_MASK`, or None if it would not.

    Args:
        config, rows, length, itemsize: as in `reject_large_mask`.
        implementation: attention implementation.
        segmented: function that returns whether rows have padding or several documents.
    """
    # Additive masks have the dtype of hidden states, others are boolean.
    is_additive = implementation in ("eager", attention_with_sinks.NAME)
    num_bytes = rows * length**2 * (itemsize if is_additive else 1)
    if not (is_additive or implementation == "sdpa") or num_bytes <= LARGEST_MASK:
        return None
    if implementation == "sdpa" and not _has_window(config, length) and not segmented():
        return None  # plain causal attention needs no mask
    return (
        f"attn_implementation={implementation!r} makes a mask of {format_bytes(num_bytes)} for {counted(rows, 'row')} of {length} "
        f"tokens; the limit is {format_bytes(LARGEST_MASK)}. Choose 'varlen' or 'flash_attention_2', which need no mask, if "
        "the model supports them; otherwise use shorter rows, or fewer of them per step."
    )


def _has_window(config: Any, length: int) -> bool:
    """Return whether a layer limits attention to fewer tokens than rows of this length have."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)  # all layers, if no types are named
    return window is not None and window < length and "sliding_attention" in kinds


def attending(segments: Segments | None, start: int, stop: int) -> AbstractContextManager[None]:
    """Context manager: let attention use the segments of rows [start, stop) of a batch."""
    return _offsets_of_thread.replaced(None if segments is None else segments.offsets(start, stop))


def plain_kernels() -> AbstractContextManager[None]:
    """Context manager: compute segments one by one with torch's scaled dot-product attention, on any device."""
    return _without_kernels.replaced(True)


def varlen_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Compute causal attention inside segments, with the signature of transformers' AttentionInterface.

    Args:
        module: attention layer.
        query: queries (B, heads, T, D).
        key, value: keys and values, possibly with fewer heads (grouped-query attention).
        attention_mask: must be None.
        scaling: factor of the scores; None for 1 / sqrt(D).
        dropout: probability of dropping an attention weight.
        sliding_window: number of tokens that a token attends to, including itself; None for all earlier tokens.

    Returns:
        Output (B, T, heads, D), and None for attention weights.
    """
    _reject_not_causal(module, attention_mask, kwargs)
    sinks = kwargs.get("s_aux")
    attention_with_sinks.reject_unknown(NAME, module, dropout, mask=None, sinks=sinks, others=kwargs)
    rows, window = _offsets_of_thread.value, sliding_window
    split = not torch.compiler.is_compiling() and _without_kernels.value
    if sinks is not None:
        return sink_attention(query, key, value, sinks, rows=rows, scaling=scaling, window=window, split=split), None
    length, num_keys = query.shape[2], key.shape[2]
    mask = None
    if num_keys != length:  # with a cache, the queries are the last tokens of longer rows
        mask = visible(length, num_keys, window, query.device)
    elif rows is not None or (window is not None and window < length):
        if _supports_flash_attn(query):
            return _by_flash_attn(rows, query, key, value, dropout, scaling, window), None
        return segment_attention(query, key, value, rows, scaling, dropout, window, split), None
    return causal(query, key, value, scaling, dropout, mask).transpose(1, 2).contiguous(), None


def _reject_not_causal(module: torch.nn.Module, mask: torch.Tensor | None, arguments: Mapping[str, Any]) -> None:
    """Raise ModelNotSupportedError for a call of an attention layer that is not causal attention inside segments."""
    unknown = [name for name in ("softcap", "position_bias", "cache") if arguments.get(name) is not None]
    if unknown or not (arguments.get("is_causal") or getattr(module, "is_causal", True)):
        what = ", ".join(unknown) or "attention that is not causal"
        raise ModelNotSupportedError(f"attn_implementation='varlen' cannot do {what}; choose 'sdpa' or 'eager'")
    if mask is not None:
        raise ModelNotSupportedError(
            f"attn_implementation='varlen' uses no mask, but {type(module).__name__} makes one of its own; choose 'sdpa' or "
            "'eager'"
        )


def activated_kernel() -> str | None:
    """Return the name of the kernel that the user has activated in place of torch's flash kernel, such as FA3."""
    activated = getattr(torch.nn.attention, "current_flash_attention_impl", None)  # of newer versions of torch
    name: str | None = None if activated is None else activated()
    return name


@cache
def flash_attn() -> Any:
    """Return flash-attn's function for segments; None if it is not installed."""
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def _supports_flash_attn(query: torch.Tensor) -> bool:
    """Return whether flash-attn computes this query: it is installed and supports the query's device and dtype.

    It is not used in compiled blocks, under `plain_kernels`, or if the user has activated another kernel in place of torch's, such as FA3.
    """
    if activated_kernel() is not None:
        return False
    if torch.compiler.is_compiling() or query.device.type != "cuda" or _without_kernels.value:
        return False
    return query.dtype in (torch.float16, torch.bfloat16) and flash_attn() is not None


def _by_flash_attn(
    rows: Offsets | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float,
    scaling: float | None, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Return attention inside the segments of rows (B, T, heads, D), by a kernel that takes all rows as one sequence with offsets."""
    size, length = query.shape[0], query.shape[2]
    offsets, bounds = rows or _whole_rows(size, length, query.device).offsets(0, size)
    longest = int(bounds.diff().max())
    output: torch.Tensor = flash_attn()(
        *(t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)), offsets, offsets, longest, longest,
        dropout_p=dropout, softmax_scale=scaling, causal=True, window_size=(window - 1 if window else -1, 0),
    )  # fmt: skip
    return output.unflatten(0, (size, length))


@lru_cache(maxsize=8)
def _whole_rows(size: int, length: int, device: torch.device) -> Segments:
    return Segments([[length]] * size, device)


def register() -> None:
    """Register our implementations in transformers, which makes no masks for varlen because no mask function has this name."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, varlen_attention)
    attention_with_sinks.register()


def choose(model: Any, wanted: str | None, prefers_varlen: bool) -> str:
    """Set the requested attention implementation, and return its name. Without a request, take varlen where preferred and supported.

    transformers computes models with sinks eagerly because it has no other way; here they are eager only on request.

    Raises:
        ModelNotSupportedError: varlen was requested, and the model does not support it.
    """
    present: str = model.config.get_text_config()._attn_implementation
    if wanted is None:
        only_for_sinks = present == "eager" and attention_with_sinks.replaces_eager(model)
        if (present == "sdpa" or only_for_sinks) and prefers_varlen and can_varlen(model):
            wanted = NAME
        elif only_for_sinks:
            wanted = attention_with_sinks.NAME
    if wanted == NAME:
        require_varlen(model)
        _use_in_decoder(model)
    elif wanted is not None and wanted != present:
        model.set_attn_implementation(wanted)
    return wanted or present


def _use_in_decoder(model: Any) -> None:
    """Let the decoder of a model use varlen; towers, which attend in both directions, use what transformers chooses for them."""
    from transformers import PreTrainedModel

    text = model.config.get_text_config()
    for module in (each for each in model.modules() if isinstance(each, PreTrainedModel)):
        if module.config is not text and module.config._attn_implementation == NAME:
            module.config._attn_implementation = {"": module.get_correct_attn_implementation(None)}
    text._attn_implementation = {"": NAME}  # a dictionary names configs inside the config; the empty name is its own


@contextmanager
def making_masks(model: Any) -> Iterator[None]:
    """Context manager: let the code around the blocks of a model make masks, whatever computes its attention."""
    from transformers import PreTrainedModel

    configs = {id(each.config): each.config for each in model.modules() if isinstance(each, PreTrainedModel)}.values()
    used = [config._attn_implementation for config in configs]
    for config, name in zip(configs, used, strict=True):
        config._attn_implementation = {"": name if name in ("eager", attention_with_sinks.NAME) else "sdpa"}
    try:
        yield
    finally:
        for config, name in zip(configs, used, strict=True):
            config._attn_implementation = {"": name}


def require_varlen(model: Any) -> None:
    """Raise ModelNotSupportedError if a model's attention needs more than causal segments with a sliding window."""
    reason = _obstacle(model)
    if reason is not None:
        raise ModelNotSupportedError(f"{type(model).__name__}: attn_implementation='varlen' is not possible: {reason}")


def can_varlen(model: Any) -> bool:
    """Return whether a model supports varlen attention."""
    return _obstacle(model) is None


def _obstacle(model: Any) -> str | None:
    """Return why `varlen_attention` cannot compute a model; None if it can."""
    through_interface = getattr(model, "_supports_sdpa", False) and getattr(model, "_supports_attention_backend", False)
    # A model with sinks that supports flash attention can do without a mask.
    without_mask = getattr(model, "_supports_flash_attn", False) and attention_with_sinks.has_sinks(model)
    if not (through_interface or without_mask):
        return "its attention does not go through transformers' AttentionInterface"
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None):  # transformers 5.17 claims sdpa support for these models
        return "it caps the scores of its attention"
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    return f"it has layers of kind {', '.join(sorted(others))}" if others else None
