"""Causal attention inside segments of rows, as one operation that is opaque to torch.compile.

Segments differ between batches. Only the operation reads their tensors, so they cause no recompilation, and one graph serves
all batches of a structure. The kernel is chosen when the operation runs: torch's flash kernel on CUDA, which supports
grouped-query attention, and segment by segment on other devices.

Shapes: B batch, T tokens, D head dimension; queries, keys and values are (B, heads, T, D).
"""

from functools import cache, lru_cache
from itertools import pairwise

import torch
from torch.nn import functional as F  # noqa: N812

Offsets = tuple[torch.Tensor, torch.Tensor]
"""Start of each segment of some rows and end of the last segment, int32: on the device (``offsets``), and on the host (``bounds``)."""

KERNEL_CAPABILITY = (8, 0)  # compute capability that torch's flash kernel needs
_LARGEST_WIDTH = 256  # of a head


def segment_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: Offsets | None, scaling: float | None = None,
    dropout: float = 0.0, window: int | None = None, split: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute causal attention inside segments.

    Args:
        query: queries (B, heads, T, D).
        key, value: keys and values, possibly with fewer heads.
        rows: segments of the rows; None if every row is a single segment.
        scaling: factor of the scores; None for 1 / sqrt(D).
        dropout: probability of dropping an attention weight.
        window: number of tokens that a token attends to, including itself; None for all earlier tokens.
        split: compute segment by segment on any device; ignored in compiled code.

    Returns:
        Output (B, T, heads, D), contiguous.
    """
    offsets, bounds = (None, None) if rows is None else rows
    if torch.compiler.is_compiling() or (not split and has_kernel(query, value, dropout)):
        output: torch.Tensor = _attend(query, key, value, offsets, bounds, scaling, dropout, window)[0]
        return output
    return by_segment(query, key, value, _borders(query, bounds), scaling, dropout, window)


def by_segment(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, borders: list[int], scaling: float | None,
    dropout: float, window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Call torch's scaled dot-product attention for each segment alone, on any device; output (B, T, heads, D).

    ``borders``: as from `_borders`.
    """
    outputs = [
        causal(q, k, v, scaling, dropout, _mask(q, window))[0].transpose(0, 1)
        for q, k, v in cut((query, key, value), borders)
    ]
    return torch.cat(outputs).unflatten(0, (query.shape[0], query.shape[2]))


def causal(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float | None, dropout: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Call torch's scaled dot-product attention, causal unless there is a mask; output (B, heads, T, D)."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling, is_causal=mask is None,
        enable_gqa=query.shape[1] != key.shape[1],
    )  # fmt: skip


def visible(length: int, keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Return a boolean mask (length, keys) of the keys, at most ``window``, that each of the last ``length`` tokens attends to."""
    distance = torch.arange(keys - length, keys, device=device)[:, None] - torch.arange(keys, device=device)
    return (distance >= 0) & (distance < (window or keys))


def has_kernel(query: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Return whether torch's flash kernel for segments supports these inputs."""
    fits = not kernel_obstacle((query.shape[-1], value.shape[-1]), query.dtype, dropout)
    return query.device.type == "cuda" and fits and _has_flash(query.device)


def kernel_obstacle(widths: tuple[int, int], dtype: torch.dtype, dropout: float) -> str:
    """Return why torch's flash kernel for segments does not support such inputs, on any GPU; empty if it does.

    Args:
        widths: head dimensions of queries and of values.
        dtype: their dtype.
        dropout: probability of dropping an attention weight.
    """
    width, of_values = widths
    if dtype not in (torch.float16, torch.bfloat16):
        return f"values in {str(dtype).removeprefix('torch.')}"
    if dropout:
        return "dropout"
    fits = width == of_values and width % 8 == 0 and width <= _LARGEST_WIDTH
    return "" if fits else f"head dimensions {width} and {of_values}"


@cache
def _has_flash(device: torch.device) -> bool:
    """Return whether torch was built with its flash kernel, and this GPU can run it."""
    return (
        torch.backends.cuda.is_flash_attention_available()
        and torch.cuda.get_device_capability(device) >= KERNEL_CAPABILITY
    )


def flash_forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor | None, bounds: torch.Tensor | None,
    scaling: float | None, window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Call torch's flash kernel for segments; output (B, T, heads, D) and log-sum-exps (heads, B·T)."""
    offsets, longest = _kernel_arguments(query, offsets, bounds)
    is_causal, returns_debug_mask = window is None, False  # with a window, its right side of 0 tokens makes it causal
    output, logsumexp, *_ = torch.ops.aten._flash_attention_forward(
        *map(_flat, (query, key, value)), offsets, offsets, longest, longest, 0.0, is_causal, returns_debug_mask,
        scale=scaling, window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )  # fmt: skip
    return output.unflatten(0, (query.shape[0], query.shape[2])), logsumexp


def flash_backward(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
    logsumexp: torch.Tensor, offsets: torch.Tensor | None, bounds: torch.Tensor | None, scaling: float | None, window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of query, key and value, (B, T, heads, D), given the gradient of the output of `flash_forward`."""
    offsets, longest = _kernel_arguments(query, offsets, bounds)
    is_causal = window is None
    seed, unused = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0)  # of dropout, which is 0
    grads = torch.ops.aten._flash_attention_backward(
        grad.flatten(0, 1).contiguous(), *map(_flat, (query, key, value)), output.flatten(0, 1), logsumexp, offsets, offsets,
        longest, longest, 0.0, is_causal, seed, unused,
        scale=scaling, window_size_left=-1 if window is None else window - 1, window_size_right=0,
    )  # fmt: skip
    return tuple(g.unflatten(0, (query.shape[0], query.shape[2])) for g in grads)  # type: ignore[return-value]


# The operation and its backward operation, because compiled graphs cannot depend on segments


@torch.library.custom_op("horizon_lm::segment_attention", mutates_args=())
def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, offsets: torch.Tensor | None, bounds: torch.Tensor | None,
    scaling: float | None, dropout: float, window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the output (B, T, heads, D), log-sum-exps (heads, B·T), and the seed of dropout, for the backward pass.

    Without the kernel there are no log-sum-exps, and without dropout the seed is 0.
    """
    no_seed, no_logsumexp = torch.zeros((), dtype=torch.int64), query.new_empty(0, dtype=torch.float32)
    if has_kernel(query, value, dropout):
        return *flash_forward(query, key, value, offsets, bounds, scaling, window), no_seed
    borders = _borders(query, bounds)
    if not dropout:
        return by_segment(query, key, value, borders, scaling, 0.0, window), no_logsumexp, no_seed
    seed = torch.randint(2**62, ())  # from the generator whose state the recomputation restores
    generator = _generator(query, seed)
    outputs = []
    for q, k, v in cut((query, key, value), borders):
        weights = _probabilities(q, k, scaling, window) * _dropout_factors(q, dropout, generator)
        outputs.append((weights.to(v.dtype) @ _repeated(v, q))[0].transpose(0, 1))
    return torch.cat(outputs).unflatten(0, (query.shape[0], query.shape[2])), no_logsumexp, seed


@_attend.register_fake
def _(query, key, value, offsets, bounds, scaling, dropout, window):  # type: ignore[no-untyped-def]
    """Return tensors of the shapes that `_attend` returns, for torch.compile."""
    rows, heads, length, _ = query.shape
    output = query.new_empty(rows, length, heads, value.shape[-1])
    sums = (heads, rows * length) if has_kernel(query, value, dropout) else (0,)
    return output, query.new_empty(sums, dtype=torch.float32), torch.empty((), dtype=torch.int64)


@torch.library.custom_op("horizon_lm::segment_attention_backward", mutates_args=())
def _differentiate(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
    logsumexp: torch.Tensor, seed: torch.Tensor, offsets: torch.Tensor | None, bounds: torch.Tensor | None,
    scaling: float | None, dropout: float, window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of query, key and value, contiguous as (B, T, heads, D), given what `_attend` returned."""
    rows_and_tokens = (query.shape[0], query.shape[2])
    if has_kernel(query, value, dropout):
        return flash_backward(grad, query, key, value, output, logsumexp, offsets, bounds, scaling, window)
    borders = _borders(query, bounds)
    generator = _generator(query, seed) if dropout else None
    pieces = []
    for (q, k, v), (g,) in zip(cut((query, key, value), borders), cut((grad.transpose(1, 2),), borders), strict=True):
        pieces.append(_differentiate_segment(q, k, v, g, scaling, dropout, window, generator))
    return tuple(torch.cat(parts).unflatten(0, rows_and_tokens) for parts in zip(*pieces, strict=True))  # type: ignore[return-value]


@_differentiate.register_fake
def _(grad, query, key, value, *_):  # type: ignore[no-untyped-def]
    """Return tensors of the shapes that `_differentiate` returns, for torch.compile."""
    return tuple(
        torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format) for t in (query, key, value)
    )


def _save_for_backward(ctx, inputs, output):  # type: ignore[no-untyped-def]
    query, key, value, offsets, bounds, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, offsets, bounds)


def _backward(ctx, grad, *_):  # type: ignore[no-untyped-def]
    """Return the gradients of all arguments of `_attend`, given the gradient of its output; None for offsets, bounds and options."""
    query, key, value, output, logsumexp, seed, offsets, bounds = ctx.saved_tensors
    grads = _differentiate(grad.contiguous(), query, key, value, output, logsumexp, seed, offsets, bounds, *ctx.options)
    return *(g.transpose(1, 2) for g in grads), *[None] * (2 + len(ctx.options))


_attend.register_autograd(_backward, setup_context=_save_for_backward)


# Segments


def cut(tensors: tuple[torch.Tensor, ...], borders: list[int]) -> list[tuple[torch.Tensor, ...]]:
    """Split tensors (B, heads, T, D) into segments (1, heads, length, D), between borders in the B * T tokens of all rows."""
    flat = [_flat(t) for t in tensors]
    return [tuple(t[start:stop].transpose(0, 1)[None] for t in flat) for start, stop in pairwise(borders)]


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Reshape (B, heads, T, D) to (B·T, heads, D)."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _borders(query: torch.Tensor, bounds: torch.Tensor | None) -> list[int]:
    """Return the start of each segment in the B * T tokens of all rows, and the end of the last. ``bounds``: see `Offsets`."""
    rows, length = query.shape[0], query.shape[2]
    borders: list[int] = [length * i for i in range(rows + 1)] if bounds is None else bounds.tolist()
    return borders


def _kernel_arguments(
    query: torch.Tensor, offsets: torch.Tensor | None, bounds: torch.Tensor | None
) -> tuple[torch.Tensor, int]:
    """Return the offsets on the device, made for whole rows if there are none, and the length of the longest segment."""
    rows, length = query.shape[0], query.shape[2]
    if offsets is None or bounds is None:
        return _whole_rows(rows, length, query.device), length
    return offsets, max(stop - start for start, stop in pairwise(bounds.tolist()))


@lru_cache(maxsize=8)
def _whole_rows(rows: int, length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)


def _mask(query: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """Return the mask of one segment (length, length) if the window is shorter; None for plain causal attention."""
    length = query.shape[2]
    return visible(length, length, window, query.device) if window is not None and window < length else None


# One segment, written out for dropout and for the backward pass


def _repeated(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Return keys or values with as many heads as the queries that share them (grouped-query attention)."""
    return tensor.repeat_interleave(query.shape[1] // tensor.shape[1], dim=1)


def _probabilities(query: torch.Tensor, key: torch.Tensor, scaling: float | None, window: int | None) -> torch.Tensor:
    """Return attention weights (1, heads, length, length), at least in float32."""
    length = query.shape[2]
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = (query @ _repeated(key, query).transpose(-1, -2) * scale).to(_at_least_float32(query.dtype))
    hidden = ~visible(length, length, window, query.device)
    return scores.masked_fill(hidden, float("-inf")).softmax(-1)


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _generator(query: torch.Tensor, seed: torch.Tensor) -> torch.Generator:
    return torch.Generator(query.device).manual_seed(int(seed))


def _dropout_factors(query: torch.Tensor, dropout: float, generator: torch.Generator) -> torch.Tensor:
    """Draw the factors of dropout for the weights of one segment, (1, heads, length, length): 0, or 1 / (1 - dropout)."""
    shape = (*query.shape[:-1], query.shape[2])
    drawn = torch.rand(shape, generator=generator, device=query.device, dtype=_at_least_float32(query.dtype))
    return (drawn >= dropout) / (1 - dropout)


def _differentiate_segment(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, grad: torch.Tensor, scaling: float | None,
    dropout: float, window: int | None, generator: torch.Generator | None,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the gradients of query, key and value of one segment, each (length, heads, D). ``generator``: None without dropout."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    weights = _probabilities(query, key, scaling, window)
    factors = 1.0 if generator is None else _dropout_factors(query, dropout, generator)
    of_values = (weights * factors).to(grad.dtype).transpose(-1, -2) @ grad
    of_weights = (grad @ _repeated(value, query).transpose(-1, -2)).to(weights.dtype) * factors
    # Backward of softmax: dS = P * (dP - rowsum(P * dP)).
    of_scores = (weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale).to(grad.dtype)
    of_query, of_keys = of_scores @ _repeated(key, query), of_scores.transpose(-1, -2) @ query
    heads = key.shape[1]
    # Query heads that share a key and value head add up their gradients.
    shared = [t.unflatten(1, (heads, -1)).sum(2) for t in (of_keys, of_values)]
    return tuple(t[0].transpose(0, 1) for t in (of_query, *shared))
