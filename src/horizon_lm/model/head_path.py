"""Find whether a model's loss can be computed over chunks of tokens, by computing it both ways over a few tokens.

The model's forward method runs with stand-ins for everything before the hidden states. If its loss over all tokens
equals the sum of its losses over chunks, training may compute the loss in chunks of real hidden states.

Shapes: B batch, T tokens, H hidden, V vocabulary.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from horizon_lm.constants import IGNORE_INDEX
from horizon_lm.model.functional import in_place
from horizon_lm.model.outer_trial import Decoded, forwards, outer_leaves, try_outer
from horizon_lm.model.parts import ModelParts

_ROWS, _LENGTH, _CHUNK = 2, 5, 3
_TOLERANCE = 1e-5
AUXILIARY = ("output_router_logits",)  # arguments that make a model add other terms to the head's loss


@dataclass(frozen=True, slots=True)
class ChunkedPath:
    """A model's path from hidden states to its loss, token by token.

    Attributes:
        trunk: module that the model calls for hidden states.
        norm_is_last: the trunk ends with the final norm, so the norm can be computed in chunks as well.
        loss_function: the model's loss function at the time of the trial.
    """

    trunk: nn.Module
    norm_is_last: bool
    loss_function: Any


def find_chunked_path(parts: ModelParts) -> ChunkedPath | str:
    """Return the path for computing a model's loss in chunks, or the reason why the loss cannot be computed
    in chunks.
    """
    if parts.classifies:
        return "a classifier has few scores, which need no chunks"
    if type(parts.head) is not nn.Linear:
        return f"the head is a {type(parts.head).__name__}, not a plain Linear"
    reason = "its forward does not call a decoder"
    # Models read the dtype of this weight, and the trial computes in float32. One that multiplies by it itself fails.
    place = (parts.head, "weight", torch.tensor(torch.nan).expand(parts.head.weight.shape))
    for trunk in parts.trunks():
        with torch.random.fork_rng(devices=[]), outer_leaves(parts) as outer, in_place([place]):
            try:
                reason = _difference(parts, trunk, outer)
            except Exception as error:  # the model's code may need more inputs than it gets here
                reason = f"its loss cannot be computed from hidden states alone ({type(error).__name__})"
        if not reason:
            trial = try_outer(parts)
            is_last = trial is not None and trial.norm_is_last
            return ChunkedPath(trunk, is_last, parts.model.loss_function)
    return reason


def _difference(parts: ModelParts, trunk: nn.Module, outer: list[torch.Tensor]) -> str:
    """Return the reason why the loss over chunks differs from the loss over all tokens; empty if they are equal."""
    model, forward = parts.model, type(parts.model).forward
    accepted = inspect.signature(forward).parameters
    vocabulary = parts.sizes().vocabulary
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((_ROWS, _LENGTH, parts.head_width), generator=generator).requires_grad_()  # (B, T, H)
    columns = min(8, parts.head_width)  # a head that reads a few columns shows the same, and is small
    weight = torch.randn((vocabulary, columns), generator=generator)
    ids = torch.randint(min(vocabulary, 1000), (_ROWS, _LENGTH), generator=generator)
    labels = ids.clone()
    labels[0, 2] = labels[1, :2] = IGNORE_INDEX
    shifted = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]  # (B, T), the labels of the next tokens
    trained = (shifted.reshape(-1) != IGNORE_INDEX).nonzero().squeeze(1)
    options = {"use_cache": False} | {name: False for name in AUXILIARY if name in accepted}

    def run(states: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor], **arguments: Any) -> Any:
        replaced: dict[nn.Module, Callable[..., Any]] = {trunk: lambda *a, **k: Decoded(states), parts.head: logits}
        with forwards(replaced), torch.enable_grad():
            return forward(model, **arguments, **options)

    def project(states: torch.Tensor) -> torch.Tensor:
        return F.linear(states[..., :columns], weight)

    # The engine first calls the model without labels and with a single row of logits; that loss must be 0.
    nothing = labels.new_full((1, 1), IGNORE_INDEX)
    count = len(trained)
    empty = run(
        hidden, lambda states: states.new_zeros((1, 1, vocabulary)), input_ids=ids,
        labels=nothing, shift_labels=nothing, num_items_in_batch=count,
    )  # fmt: skip
    if float(empty.loss.detach()) != 0:
        return "its loss is not only that of labels"

    # All tokens at once, as the model computes them; then in chunks, each as a batch of one row.
    whole = run(hidden, project, input_ids=ids, labels=labels)
    used = torch.autograd.grad(whole.loss, outer, allow_unused=True, retain_graph=True) if outer else ()
    if any(grad is not None for grad in used):
        return "it has layers with weights between its decoder and its loss"
    (expected,) = torch.autograd.grad(whole.loss, hidden)
    got, loss = torch.zeros_like(expected).view(-1, expected.shape[-1]), 0.0
    flat = hidden.detach().view(-1, hidden.shape[-1])
    for index in trained.split(_CHUNK):
        chunk = flat[index][None].requires_grad_()  # (1, chunk, H)
        target = shifted.reshape(-1)[index][None]
        part = run(chunk, project, labels=target, shift_labels=target, num_items_in_batch=count)
        got[index] = torch.autograd.grad(part.loss, chunk)[0][0]
        loss += float(part.loss.detach())
        logits = run(chunk, project).logits
        if not torch.allclose(logits[0], whole.logits.detach().flatten(0, 1)[index], rtol=_TOLERANCE, atol=_TOLERANCE):
            return "its logits depend on more than a token's hidden state"
    if abs(loss - float(whole.loss.detach())) > _TOLERANCE * max(1.0, abs(loss)):
        return "its loss is not the sum over the next tokens' losses"
    if (got.view_as(expected) - expected).norm() > _TOLERANCE * expected.norm():
        return "its loss is not the sum over the next tokens' losses"
    return ""
