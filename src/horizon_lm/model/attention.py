"""Attention over packed and padded rows without a mask: ``attn_implementation="varlen"``.

Rows are cut into segments that do not see each other: packed documents, or the tokens of a padded row and its padding.
The engine knows the segments of the rows that it computes; Hugging Face makes no mask for this implementation, so
nothing of size (T, T) exists. Rows of one segment run through torch's scaled dot-product attention.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from itertools import pairwise
from typing import Any

import torch

from horizon_lm.errors import DoesNotFitError, ModelNotSupportedError
from horizon_lm.model.compiling import mark_varying
from horizon_lm.model.segment_attention import Offsets, causal, segment_attention, visible
from horizon_lm.quantities import format_bytes

NAME = "varlen"
LARGEST_MASK = 2**30  # bytes of a mask (B, 1, T, T); at 32k tokens a row's takes as much as a boolean
_current = threading.local()  # of the thread that computes: its rows' segments


class Segments:
    """Lengths of the segments of each row of a batch, and what kernels want of them, made once per pass.

    Args:
        lengths: of each row's segments, in order; each row's add up to its number of tokens.
        device: where kernels run.
    """

    def __init__(self, lengths: Sequence[Sequence[int]], device: torch.device) -> None:
        self._lengths, self._device = [list(row) for row in lengths], device
        self._offsets: dict[tuple[int, int], Offsets] = {}

    def of(self, start: int, stop: int) -> list[int]:
        """Segment lengths of rows [start, stop), one after the other."""
        return [length for row in self._lengths[start:stop] for length in row]

    def offsets(self, start: int, stop: int) -> Offsets:
        """Where each segment of these rows begins and the last one ends, on the device and on the host."""
        if (start, stop) not in self._offsets:
            ends = torch.tensor([0, *self.of(start, stop)], dtype=torch.int32).cumsum(0, dtype=torch.int32)
            if self._device.type == "cuda":
                ends = ends.pin_memory()
            on_device = ends.to(self._device, non_blocking=True, copy=True)  # two tensors, on a CPU, too
            for tensor in (on_device, ends):
                mark_varying(tensor, [0])
            self._offsets[start, stop] = on_device, ends
        return self._offsets[start, stop]


def find_segments(
    attention_mask: torch.Tensor | None, position_ids: torch.Tensor | None, device: torch.device
) -> Segments | None:
    """The segments of a batch; None if every row is one.

    A segment ends where the mask (B, T) changes between trained and padded tokens, and, in a batch without a mask as
    Hugging Face has it, where positions (B, T) or (1, T) do not go on by one.
    """
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
    """The segments of a call of the model's forward. ModelNotSupportedError for padded rows with a cache."""
    segments = find_segments(call.get("attention_mask"), call.get("position_ids"), device)
    if segments is not None and (call.get("past_key_values") is not None or call.get("use_cache")):
        raise ModelNotSupportedError("attn_implementation='varlen' cannot generate from padded rows; choose 'sdpa'")
    return segments


def reject_large_mask(config: Any, call: Mapping[str, Any], rows: int, length: int, itemsize: int) -> None:
    """DoesNotFitError when a forward would make a mask larger than `LARGEST_MASK`, before it is made.

    Args:
        config: of the text model.
        call: arguments of its forward.
        rows, length: of its input, B and T.
        itemsize: bytes of a number of the hidden states.
    """
    mask = call.get("attention_mask")
    given = mask is not None and not (isinstance(mask, torch.Tensor) and mask.ndim == 2)  # as a whole
    if given:
        return

    def segmented() -> bool:
        return find_segments(mask, call.get("position_ids"), torch.device("cpu")) is not None

    problem = large_mask(config, config._attn_implementation, rows, length, itemsize, segmented)
    if problem is not None:
        raise DoesNotFitError(problem)


def large_mask(
    config: Any, implementation: str, rows: int, length: int, itemsize: int, segmented: Callable[[], bool]
) -> str | None:
    """Why a batch would need a mask larger than `LARGEST_MASK`; None if it does not.

    Args:
        config, rows, length, itemsize: as in `reject_large_mask`.
        segmented: whether rows have padding, or several documents.
    """
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ("sliding_attention",)
    num_bytes = rows * length**2 * (itemsize if implementation == "eager" else 1)
    if implementation not in ("eager", "sdpa") or num_bytes <= LARGEST_MASK:
        return None
    windowed = window is not None and window < length and "sliding_attention" in kinds
    if implementation == "sdpa" and not windowed and not segmented():
        return None  # plain causal attention needs none
    return (
        f"attn_implementation={implementation!r} makes a mask of {format_bytes(num_bytes)} for {rows} rows of {length} "
        f"tokens; the limit is {format_bytes(LARGEST_MASK)}. Choose 'varlen' or 'flash_attention_2', which make none, where "
        "the model can; else shorter rows, or fewer of them a step."
    )


@contextmanager
def attending(segments: Segments | None, start: int, stop: int) -> Iterator[None]:
    """Inside, attention is computed for rows [start, stop) of a batch with these segments."""
    before = getattr(_current, "rows", None)
    _current.rows = None if segments is None else segments.offsets(start, stop)
    try:
        yield
    finally:
        _current.rows = before


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Inside, segments are computed one by one with torch's scaled dot-product attention, whatever the device."""
    before = getattr(_current, "plain", False)
    _current.plain = True
    try:
        yield
    finally:
        _current.plain = before


def varlen_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: torch.Tensor | None, scaling: float | None = None, dropout: float = 0.0,
    sliding_window: int | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Causal attention inside segments, as transformers' AttentionInterface calls it.

    Args:
        query: (B, heads, T, D); ``key`` and ``value`` may have fewer heads.
        sliding_window: how many tokens, its own included, a token sees; None for all before it.

    Returns:
        (B, T, heads, D), and no attention weights.
    """
    unknown = [name for name in ("softcap", "s_aux", "position_bias", "cache") if kwargs.get(name) is not None]
    if unknown or not (kwargs.get("is_causal") or getattr(module, "is_causal", True)):
        what = ", ".join(unknown) or "attention that is not causal"
        raise ModelNotSupportedError(f"attn_implementation='varlen' cannot do {what}; choose 'sdpa' or 'eager'")
    if attention_mask is not None:
        raise ModelNotSupportedError(
            f"attn_implementation='varlen' uses no mask, but {type(module).__name__} makes one of its own; choose 'sdpa' or "
            "'eager'"
        )
    rows = getattr(_current, "rows", None)
    length = query.shape[2]
    if key.shape[2] != length:  # with a cache: the last tokens of longer rows
        mask = visible(length, key.shape[2], sliding_window, query.device)
        output = causal(query, key, value, scaling, dropout, mask)
    elif rows is None and (sliding_window is None or sliding_window >= length):
        output = causal(query, key, value, scaling, dropout)
    elif _wants_flash_attn(query):
        return _by_flash_attn(rows, query, key, value, dropout, scaling, sliding_window), None
    else:
        plain = not torch.compiler.is_compiling() and getattr(_current, "plain", False)
        return segment_attention(query, key, value, rows, scaling, dropout, sliding_window, plain), None
    return output.transpose(1, 2).contiguous(), None


@cache
def _flash_attn() -> Any:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def _wants_flash_attn(query: torch.Tensor) -> bool:
    """Whether the kernel of flash-attn is installed and takes this. Compiled blocks compute with torch's."""
    if torch.compiler.is_compiling() or query.device.type != "cuda" or getattr(_current, "plain", False):
        return False
    return query.dtype in (torch.float16, torch.bfloat16) and _flash_attn() is not None


def _by_flash_attn(
    rows: Offsets | None, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float,
    scaling: float | None, window: int | None,
) -> torch.Tensor:  # fmt: skip
    size, length = query.shape[0], query.shape[2]
    offsets, ends = rows or _whole_rows(size, length, query.device).offsets(0, size)
    longest = int(ends.diff().max())
    output: torch.Tensor = _flash_attn()(
        *(t.transpose(1, 2).flatten(0, 1) for t in (query, key, value)), offsets, offsets, longest, longest,
        dropout_p=dropout, softmax_scale=scaling, causal=True, window_size=(window - 1 if window else -1, 0),
    )  # fmt: skip
    return output.unflatten(0, (size, length))


@lru_cache(maxsize=8)
def _whole_rows(size: int, length: int, device: torch.device) -> Segments:
    return Segments([[length]] * size, device)


def register() -> None:
    """Make the implementation known to transformers. Without a mask function of its name, it makes no masks."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, varlen_attention)


def choose(model: Any, wanted: str | None, on_accelerator: bool) -> str:
    """Set the attention implementation that was asked for, or the one that the device is best at, and return its name.

    Raises:
        ModelNotSupportedError: varlen was asked for, and the model cannot.
    """
    present: str = model.config.get_text_config()._attn_implementation
    if wanted is None and present == "sdpa" and on_accelerator and can_varlen(model):
        wanted = NAME
    if wanted == NAME:
        require_varlen(model)
    if wanted is not None and wanted != present:
        model.set_attn_implementation(wanted)
    return wanted or present


def require_varlen(model: Any) -> None:
    """ModelNotSupportedError if a model's attention needs more than causal segments with a sliding window."""
    reason = _obstacle(model)
    if reason is not None:
        raise ModelNotSupportedError(f"{type(model).__name__}: attn_implementation='varlen' is not possible: {reason}")


def can_varlen(model: Any) -> bool:
    return _obstacle(model) is None


def _obstacle(model: Any) -> str | None:
    if not (getattr(model, "_supports_sdpa", False) and getattr(model, "_supports_attention_backend", False)):
        return "its attention does not go through transformers' AttentionInterface"
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None):  # transformers 5.17 believes that sdpa does this
        return "it caps the scores of its attention"
    others = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    return f"it has layers of kind {', '.join(sorted(others))}" if others else None
