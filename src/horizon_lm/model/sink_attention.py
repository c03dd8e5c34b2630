"""Attention with sinks through fused kernels that know of none.

A sink is a score of a head that belongs to no token: it takes a share of the softmax and adds no value. With the log-sum-exp
L of a query's scores and the sink s of its head, attention with a sink is attention without one, scaled:

    L' = logaddexp(L, s),    O' = O * exp(L - L').

The backward pass of a fused kernel takes the weights from exp(scores - L') and the product dO' . O', so it is exact if it is given
O' and L'. The gradient of a sink is the sum of -exp(s - L') * (dO' . O') over the queries. L' is in float32 or better.

Shapes: B batch, T tokens, S keys, D head dimension; queries are (B, heads, T, D), outputs (B, T, heads, D), log-sum-exps (B, T, heads, 1).
"""

from collections.abc import Sequence

import torch
from torch.nn import functional as F  # noqa: N812

from horizon_lm.model import segment_attention
from horizon_lm.model.segment_attention import Offsets, cut, flash_backward, flash_forward, visible

_MULTIPLE = 8  # of the head dimension and of a mask's rows, for kernels that read 16 bytes at once
Pieces = list[tuple[torch.Tensor, ...]]


def sink_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, mask: torch.Tensor | None = None,
    rows: Offsets | None = None, scaling: float | None = None, causal: bool = True, window: int | None = None, split: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute attention with sinks.

    Args:
        query: queries (B, heads, T, D).
        key, value: keys and values (B, heads, S, D), possibly with fewer heads; values may have another head dimension.
        sinks: (heads,).
        mask: boolean or additive, (B or 1, 1, T, S); None for none.
        rows: segments of the rows, which do not attend to each other; None if every row is a single segment. Not with a mask.
        scaling: factor of the scores; None for 1 / sqrt(D).
        causal: without a mask, tokens attend to themselves and earlier tokens only; the queries are the last T of the S tokens.
        window: in causal attention, the number of tokens that a token attends to, including itself; None for all earlier tokens.
        split: compute segment by segment, without the kernel for segments.

    Returns:
        Output (B, T, heads, D), contiguous.
    """
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    offsets, bounds = (None, None) if rows is None else rows
    sinks = sinks.to(torch.promote_types(query.dtype, torch.float32))
    output: torch.Tensor = _attend(query, key, value, sinks, mask, offsets, bounds, scaling, causal, window, split)[0]
    return output


def add_sinks(output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add sinks to attention that was computed without them, and return the output O' and the log-sum-exps L'.

    Args:
        output: the output O without sinks (B, T, heads, D), which is scaled in place.
        lse: the log-sum-exps L without sinks (B, T, heads, 1).
        sinks: (heads,).
    """
    lse_with_sinks = torch.logaddexp(lse, sinks[:, None])
    return output.mul_((lse - lse_with_sinks).exp_()), lse_with_sinks


def grad_of_sinks(
    grad: torch.Tensor, output: torch.Tensor, lse_with_sinks: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of the sinks (heads,).

    Args:
        grad: the gradient of the output, (B, T, heads, D).
        output, lse_with_sinks: the results of `add_sinks`.
        sinks: (heads,).
    """
    # The products dO' . O', row by row, because a conversion of all rows at once would take much memory.
    products = [(g.to(sinks.dtype) * o).sum(-1) for g, o in zip(grad, output, strict=True)]
    return -((sinks - lse_with_sinks.squeeze(-1)).exp_() * torch.stack(products)).sum((0, 1))


# The operation and its backward operation, because compiled graphs cannot depend on segments


@torch.library.custom_op("horizon_lm::sink_attention", mutates_args=())
def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, mask: torch.Tensor | None,
    offsets: torch.Tensor | None, bounds: torch.Tensor | None, scaling: float, causal: bool, window: int | None, split: bool,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the output (B, T, heads, D), and log-sum-exps with sinks (B, T, heads, 1) for the backward pass.

    Without a kernel for segments, the rows are computed segment by segment; ``offsets`` and ``bounds`` are `Offsets`.
    """
    width = value.shape[-1]
    query, key, value = _of_one_width(query, key, value)
    if _has_kernel(query, value, mask, causal, split):
        output, lse = flash_forward(query, key, value, offsets, bounds, scaling, window)
        lse = lse.t().unflatten(0, output.shape[:2]).unsqueeze(-1)
    else:
        pieces = []
        for q, k, v in _pieces((query, key, value), bounds):
            bias, is_causal = _bias(q, k, mask, causal, window)
            forward = _forward_on_cpu if _is_on_cpu(q) else _forward_on_accelerator
            pieces.append(forward(q, k, v, bias, is_causal, scaling))
        outputs, lses = zip(*pieces, strict=True)
        output, lse = _join(outputs, query, bounds), _join([each.unsqueeze(-1) for each in lses], query, bounds)
    return add_sinks(output[..., :width].contiguous(), lse.contiguous(), sinks)


@_attend.register_fake
def _(query, key, value, sinks, *_):  # type: ignore[no-untyped-def]
    """Return tensors of the shapes that `_attend` returns, for torch.compile."""
    rows, heads, length, _ = query.shape
    return query.new_empty(rows, length, heads, value.shape[-1]), sinks.new_empty(rows, length, heads, 1)


@torch.library.custom_op("horizon_lm::sink_attention_backward", mutates_args=())
def _differentiate(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor,
    lse_with_sinks: torch.Tensor, mask: torch.Tensor | None, offsets: torch.Tensor | None, bounds: torch.Tensor | None,
    scaling: float, causal: bool, window: int | None, split: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of query, key and value, contiguous as (B, T, heads, D).

    Args:
        grad: the gradient of the output.
        query, key, value, mask, scaling, causal, window: as in `sink_attention`.
        output, lse_with_sinks: the results of `_attend`.
        offsets, bounds: the starts of segments on the device, and on the host (`Offsets`); None if every row is one segment.
        split: compute segment by segment, as the forward pass did.
    """
    widths = query.shape[-1], key.shape[-1], value.shape[-1]
    query, key, value, output, grad = _of_one_width(query, key, value, output, grad)
    if _has_kernel(query, value, mask, causal, split):
        lse = lse_with_sinks.squeeze(-1).flatten(0, 1).t().contiguous()
        grads = flash_backward(grad, query, key, value, output, lse, offsets, bounds, scaling, window)
    else:
        by_token = output, grad, lse_with_sinks  # (B, T, heads, ...), which are cut as (B, heads, T, ...)
        tensors = (query, key, value, *(each.transpose(1, 2) for each in by_token))
        pieces = []
        for q, k, v, out, of_out, lse in _pieces(tensors, bounds):
            bias, is_causal = _bias(q, k, mask, causal, window)
            backward = _backward_on_cpu if _is_on_cpu(q) else _backward_on_accelerator
            pieces.append(backward(of_out, q, k, v, bias, out, lse.squeeze(-1), is_causal, scaling))
        grads = tuple(_join(parts, query, bounds) for parts in zip(*pieces, strict=True))  # type: ignore[assignment]
    return tuple(g[..., :width].contiguous() for g, width in zip(grads, widths, strict=True))  # type: ignore[return-value]


@_differentiate.register_fake
def _(grad, query, key, value, *_):  # type: ignore[no-untyped-def]
    """Return tensors of the shapes that `_differentiate` returns, for torch.compile."""
    return tuple(
        torch.empty_like(t.transpose(1, 2), memory_format=torch.contiguous_format) for t in (query, key, value)
    )


def _save_for_backward(ctx, inputs, output):  # type: ignore[no-untyped-def]
    query, key, value, sinks, mask, offsets, bounds, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, sinks, *output, mask, offsets, bounds)
    _, lse_with_sinks = output
    ctx.mark_non_differentiable(lse_with_sinks)


def _backward(ctx, grad, _):  # type: ignore[no-untyped-def]
    """Return the gradients of all arguments of `_attend`, given the gradient of its output; None for mask, offsets, bounds and options."""
    query, key, value, sinks, output, lse_with_sinks, mask, offsets, bounds = ctx.saved_tensors
    grad = grad.contiguous()
    grads = _differentiate(grad, query, key, value, output, lse_with_sinks, mask, offsets, bounds, *ctx.options)
    _, _, _, sinks_need_grad, *_ = ctx.needs_input_grad
    of_sinks = grad_of_sinks(grad, output, lse_with_sinks, sinks) if sinks_need_grad else None
    return *(g.transpose(1, 2) for g in grads), of_sinks, *[None] * (3 + len(ctx.options))


_attend.register_autograd(_backward, setup_context=_save_for_backward)


# Kernels that return log-sum-exps


def _has_kernel(query: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, causal: bool, split: bool) -> bool:
    """Return whether torch's flash kernel, which takes segments but no mask, and as many keys as queries, computes this."""
    is_square = query.shape[2] == value.shape[2]
    return (
        not split and mask is None and causal and is_square and segment_attention.has_kernel(query, value, dropout=0.0)
    )


def _is_on_cpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _forward_on_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, causal: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output (B, heads, T, D) and log-sum-exps (B, heads, T) of torch's flash kernel for CPUs."""
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, causal, attn_mask=bias, scale=scaling
    )
    return output, lse


def _backward_on_cpu(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None,
    output: torch.Tensor, lse: torch.Tensor, causal: bool, scaling: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the gradients of query, key and value, given the gradient of the output; the sinks are in output and lse."""
    grads: tuple[torch.Tensor, ...] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, output, lse, 0.0, causal, attn_mask=bias, scale=scaling
    )
    return grads


def _forward_on_accelerator(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None, causal: bool, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output and log-sum-exps of torch's memory-efficient kernel, which takes masks, float32 and all widths of heads."""
    key, value = _for_all_heads(query, key, value)
    output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, _aligned(bias, query), True, 0.0, causal, scale=scaling
    )
    return output, lse[..., : query.shape[2]]


def _backward_on_accelerator(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None,
    output: torch.Tensor, lse: torch.Tensor, causal: bool, scaling: float,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """Return the gradients of query, key and value, given the gradient of the output; the sinks are in output and lse."""
    keys, values = _for_all_heads(query, key, value)
    seed = torch.zeros((), dtype=torch.int64, device=query.device)  # of dropout, which is 0
    # The kernel reads log-sum-exps in blocks of 32 queries, and its own forward pass fills the last one with infinity.
    lse = F.pad(lse, (0, -lse.shape[-1] % 32), value=float("inf"))
    of_query, of_keys, of_values, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
        grad, query, keys, values, _aligned(bias, query), output, lse, seed, seed, 0.0, [True, True, True, False], causal,
        scale=scaling,
    )  # fmt: skip
    # Query heads that share a key and value head add up their gradients.
    shared = [t.unflatten(1, (key.shape[1], -1)).sum(2) for t in (of_keys, of_values)]
    return of_query, *shared


# Shapes


def _of_one_width(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Fill head dimensions with zeros up to the largest: scores stay the same, and outputs get zeros that can be cut off again."""
    width = max(t.shape[-1] for t in tensors)
    width += -width % _MULTIPLE
    return tuple(t if t.shape[-1] == width else F.pad(t, (0, width - t.shape[-1])) for t in tensors)


def _for_all_heads(query: torch.Tensor, *tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return keys and values with as many heads as the queries that share them (grouped-query attention)."""
    return [t.repeat_interleave(query.shape[1] // t.shape[1], dim=1) for t in tensors]


def _bias(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor | None, causal: bool, window: int | None
) -> tuple[torch.Tensor | None, bool]:
    """Return the additive mask that a kernel takes, and whether the kernel itself is to be causal: only without a mask.

    A mask is made of causal attention that a kernel cannot compute by itself: over more keys than queries, or in a window.
    """
    length, keys = query.shape[2], key.shape[2]
    if mask is None and causal and (length != keys or (window is not None and window < length)):
        mask = visible(length, keys, window, query.device)[None, None]
    if mask is None:
        return None, causal
    if mask.dtype != torch.bool:
        return mask.to(query.dtype), False
    hidden = torch.finfo(query.dtype).min
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, hidden), False


def _aligned(bias: torch.Tensor | None, query: torch.Tensor) -> torch.Tensor | None:
    """Return an additive mask for all rows and heads, whose lines (one for a query) begin at multiples of 16 bytes; None for None."""
    if bias is None:
        return None
    rows, heads, length, _ = query.shape
    keys = bias.shape[-1]
    return F.pad(bias, (0, -keys % _MULTIPLE))[..., :keys].expand(rows, heads, length, keys)


def _pieces(tensors: tuple[torch.Tensor, ...], bounds: torch.Tensor | None) -> Pieces:
    """Return tensors (B, heads, T, D) whole, or cut into segments (1, heads, length, D)."""
    return [tensors] if bounds is None else cut(tensors, bounds.tolist())


def _join(pieces: Sequence[torch.Tensor], query: torch.Tensor, bounds: torch.Tensor | None) -> torch.Tensor:
    """Return the pieces of a batch (`_pieces`) as one tensor (B, T, heads, D)."""
    if bounds is None:
        return pieces[0].transpose(1, 2)
    return torch.cat([piece[0].transpose(0, 1) for piece in pieces]).unflatten(0, (query.shape[0], query.shape[2]))
