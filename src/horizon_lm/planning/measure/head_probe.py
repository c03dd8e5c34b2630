"""Find the memory and work of the norm, head and loss by running the model's own code on the meta device."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from horizon_lm.common.units import HEAD, OUTER
from horizon_lm.model.chunk_linear import ChunkLinear
from horizon_lm.model.compiling import loss_computed_by
from horizon_lm.model.functional import Place, logprobs_of_logits
from horizon_lm.model.parts import ModelParts, ParamRef
from horizon_lm.model.skeletons import meta_copy
from horizon_lm.model.trial import Answer, Decoded, outer_weights, trial
from horizon_lm.planning.arithmetic.outline import HeadCosts, Linear, Work
from horizon_lm.planning.measure.meta_recorder import recording

_TOKENS = 4096  # tokens of a trial, enough to make the part that does not depend on the number of tokens negligible


def head_costs(
    parts: ModelParts, trunk: nn.Module, dtype: torch.dtype, chunked: bool, compiled: bool, values: Sequence[str]
) -> HeadCosts:
    """Return the peak bytes of norm, head and loss, and their work. The arguments are those of `head_peak`."""
    peak = head_peak(parts, trunk, dtype, chunked, compiled, values)
    # The work is that of the model's own loss, whatever per-token values the loss of the run uses.
    one, two = (
        _run(parts, trunk, dtype, tokens, linear=F.linear, holds_logits=False, compiled=compiled) for tokens in (1, 2)
    )
    forward = Linear(one=one.forward, two=two.forward)
    backward = Linear(one=one.both - one.forward, two=two.both - two.forward)
    return HeadCosts(peak, forward, backward)


def head_peak(
    parts: ModelParts,
    trunk: nn.Module,
    dtype: torch.dtype,
    chunked: bool,
    compiled: bool = False,
    values: Sequence[str] = (),
) -> Linear[int]:
    """Return the peak bytes of norm, head and loss for any number of tokens, without hidden states, weights and gradient slots.

    Args:
        parts: parts of a skeleton.
        trunk: module that the model calls for hidden states.
        dtype: dtype of weights and hidden states.
        chunked: weight gradients are added directly to their slot, and the logits are not kept.
        compiled: the loss, or the per-token values, are computed by compiled code.
        values: per-token values that the loss uses, as in `functional.logprobs_of_logits`; empty for Hugging Face's own loss.
    """
    linear = _without_weight_gradient if chunked else F.linear
    peak, peak_of_twice = (
        _run(parts, trunk, dtype, tokens, linear, holds_logits=not chunked, compiled=compiled, values=values).peak
        for tokens in (_TOKENS, 2 * _TOKENS)
    )
    bytes_of_token = (peak_of_twice - peak) // _TOKENS
    one = peak - (_TOKENS - 1) * bytes_of_token  # the bytes for one token
    return Linear(one=one, two=one + bytes_of_token)


class _HeadRun(NamedTuple):
    """The cost of a run.

    Attributes:
        peak: peak bytes.
        forward: work of the forward pass.
        both: work of forward and backward pass together.
    """

    peak: int
    forward: Work
    both: Work


def _run(
    parts: ModelParts,
    trunk: nn.Module,
    dtype: torch.dtype,
    tokens: int,
    linear: Callable[..., torch.Tensor],
    holds_logits: bool,
    compiled: bool = False,
    values: Sequence[str] = (),
) -> _HeadRun:
    """Run norm, head and loss, forward and backward.

    Args:
        parts, trunk, dtype, compiled, values: as in `head_peak`.
        tokens: tokens of the trial.
        linear: the product of hidden states and the weight of the head.
        holds_logits: the caller keeps the logits until the backward pass.
    """
    model, width = parts.model, parts.head_width
    norm = _norm(parts, dtype)
    weight = torch.empty((parts.num_outputs, width), dtype=parts.head_dtype(dtype), device="meta")
    weight.requires_grad_(any(ref.param.requires_grad for ref in parts.head_refs))
    hidden = torch.empty((1, tokens, width), dtype=dtype, device="meta", requires_grad=True)
    labels = torch.empty((1, tokens), dtype=torch.long, device="meta")
    answers: dict[nn.Module, Answer] = {
        trunk: lambda *args, **kwargs: Decoded(norm(hidden)),
        parts.head: lambda states: linear(states, weight),
    }
    options = {"output_router_logits": False} if hasattr(model.config, "output_router_logits") else {}
    loss_code = loss_computed_by(model, _fused_loss) if compiled else nullcontext()
    with (
        trial(answers, _read_weights(parts, dtype, weight)),
        loss_code,
        recording(norm, weight, hidden, labels, accelerated=True) as recorder,
        torch.enable_grad(),
    ):
        if values:
            output = type(model).forward(model, input_ids=labels, **options)
            logits = output.logits.flatten(0, 1)
            if compiled:
                loss = _fused_loss(logits)
            else:
                # Without chunks, the head selects the logits of trained tokens, which makes a copy.
                made = logprobs_of_logits(logits.clone() if holds_logits else logits, labels[0], 1.0, values)
                loss = torch.stack(made).sum()
            del logits
        elif parts.classifies:  # a label belongs to a row, and its loss takes next to nothing
            output = type(model).forward(model, input_ids=labels, **options)
            loss = output.logits.sum()
        else:
            output = type(model).forward(
                model, input_ids=labels, labels=labels, shift_labels=labels, num_items_in_batch=tokens, **options
            )
            loss = output.loss
        forward = recorder.work
        if not holds_logits:
            del output
        torch.autograd.backward(loss, torch.empty_like(loss))
    return _HeadRun(recorder.peak, forward, recorder.work)


def _read_weights(parts: ModelParts, dtype: torch.dtype, head: torch.Tensor) -> Iterator[Place]:
    """Yield the weights that the model's own code reads beside norm and head, with the places that it reads them from."""

    def make(ref: ParamRef) -> torch.Tensor:
        own_dtype = parts.computed_dtype(ref.name, dtype)
        return torch.empty(ref.param.shape, dtype=own_dtype, device="meta", requires_grad=True)

    yield from outer_weights(parts, make)
    for ref in parts.units[HEAD]:
        if ref.name in parts.in_float32:  # a model that keeps its head in float32 reads the dtype of this weight
            yield from ((module, attribute, head) for module, attribute in ref.places)


def _without_weight_gradient(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the logits as a chunk of the head computes them, whose gradient of the weight takes no additional memory."""
    logits: torch.Tensor = ChunkLinear.apply(states, weight, None, {}, False)
    return logits


def _fused_loss(logits: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Return a scalar that costs as much as a compiled loss, or compiled values, of logits (..., V)."""
    value: torch.Tensor = _FusedLoss.apply(logits)
    return value


class _FusedLoss(torch.autograd.Function):
    """A stand-in for a compiled loss: it makes no tensor of the size of the logits but their gradient, in their dtype."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(logits)
        return (
            logits.amax() + logits.sum()
        )  # reads the logits once for the maximum, and once for the sum of exponentials

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (logits,) = ctx.saved_tensors
        return logits * grad.to(logits.dtype)


def _norm(parts: ModelParts, dtype: torch.dtype) -> nn.Module:
    """Return the final norm, or an identity if hidden states are projected to another width after the norm."""
    norm = parts.final_norm
    if norm is None or any(param.shape[-1] != parts.head_width for param in norm.parameters()):
        return nn.Identity()
    in_float32 = [ref for ref in parts.units[OUTER] if ref.name in parts.in_float32]
    keeps_float32 = any(module is norm for ref in in_float32 for module, _ in ref.places)
    copy = meta_copy(norm).to(device="meta", dtype=torch.float32 if keeps_float32 else dtype)
    copy.__dict__.pop("forward", None)  # the forward override of a streamed model
    return copy
