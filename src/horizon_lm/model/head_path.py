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

from horizon_lm.common.constants import IGNORE_INDEX
from horizon_lm.model.functional import Place
from horizon_lm.model.outer_trial import random_weights, try_outer
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.trial import Answer, Decoded, trial

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
    """Return the path by which a model's loss is computed in chunks, or the reason why it cannot be.

    Every module around the blocks is tried as the trunk, the outermost first; the reason is that of the innermost one.
    """
    if parts.classifies:
        return "a classifier has few scores, which need no chunks"
    if type(parts.head) is not nn.Linear:
        return f"the head is a {type(parts.head).__name__}, not a plain Linear"
    reason = "its forward does not call a decoder"
    for trunk in parts.trunks():
        with torch.random.fork_rng(devices=[]):
            head_trial = _HeadTrial(parts, trunk)
            try:
                reason = _reason_against_chunks(head_trial)
            except Exception as error:  # the model's code may need more inputs than it gets here
                reason = f"its loss cannot be computed from hidden states alone ({type(error).__name__})"
        if not reason:
            outer = try_outer(parts)
            is_last = outer is not None and outer.norm_is_last
            return ChunkedPath(trunk, is_last, parts.model.loss_function)
    return reason


class _HeadTrial:
    """A model's forward method on random hidden states of two short rows.

    Attributes:
        outer: weights of the model's outer code.
        vocabulary: number of logits, V.
        hidden: hidden states (B, T, H), which need gradients.
        ids, labels: tokens (B, T), and the same as labels, some of which are ignored.
        targets: the label of the next token at each position, (B * T,).
        trained: the positions whose target is not ignored, (N,).
    """

    def __init__(self, parts: ModelParts, trunk: nn.Module) -> None:
        self._model, self._head, self._trunk = parts.model, parts.head, trunk
        self.outer = random_weights(parts)
        # NaN, in the trial's float32: a model may read the dtype of the head's weight, but one that multiplies by it itself fails.
        nan = torch.tensor(torch.nan).expand(parts.head.get_parameter("weight").shape)
        self._places: list[Place] = [*self.outer, (parts.head, "weight", nan)]
        accepted = inspect.signature(type(parts.model).forward).parameters
        self._options = {"use_cache": False} | {name: False for name in AUXILIARY if name in accepted}
        self.vocabulary = parts.vocabulary
        generator = torch.Generator().manual_seed(0)
        self.hidden = torch.randn((_ROWS, _LENGTH, parts.head_width), generator=generator).requires_grad_()
        width = min(8, parts.head_width)  # a head that reads a few columns gives the same answer, and is small
        self._columns = torch.randn((self.vocabulary, width), generator=generator)
        self.ids = torch.randint(min(self.vocabulary, 1000), (_ROWS, _LENGTH), generator=generator)
        self.labels = self.ids.clone()
        self.labels[0, 2] = self.labels[1, :2] = IGNORE_INDEX
        self.targets = F.pad(self.labels, (0, 1), value=IGNORE_INDEX)[..., 1:].reshape(-1)
        self.trained = (self.targets != IGNORE_INDEX).nonzero().squeeze(1)

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Return logits (..., V), by a random head that reads the first columns of hidden states (..., H)."""
        return F.linear(states[..., : self._columns.shape[1]], self._columns)

    def run(self, states: torch.Tensor, logits: Callable[[torch.Tensor], torch.Tensor], **arguments: Any) -> Any:
        """Return the model's output for some arguments, with ``states`` in place of the trunk's output, and ``logits`` as the head."""
        answers: dict[nn.Module, Answer] = {self._trunk: lambda *args, **kwargs: Decoded(states), self._head: logits}
        with trial(answers, self._places), torch.enable_grad():
            return type(self._model).forward(self._model, **arguments, **self._options)

    def loss_without_labels(self) -> float:
        """Return the loss of a call whose only label is ignored, with one row of zero logits.

        The engine calls the model once without labels before its chunks. The loss of that call must be 0 if the loss is of labels alone.
        """
        ignored = self.labels.new_full((1, 1), IGNORE_INDEX)

        def zero_logits(states: torch.Tensor) -> torch.Tensor:
            return states.new_zeros((1, 1, self.vocabulary))

        output = self.run(
            self.hidden, zero_logits, input_ids=self.ids,
            labels=ignored, shift_labels=ignored, num_items_in_batch=len(self.trained),
        )  # fmt: skip
        return float(output.loss.detach())


def _reason_against_chunks(head_trial: _HeadTrial) -> str:
    """Return the reason why a model's loss cannot be computed over chunks of tokens; empty if a trial finds none."""
    if head_trial.loss_without_labels() != 0:
        return "its loss is not only that of labels"
    # First all tokens at once, as the model computes them; below in chunks, each of which is a batch of one row.
    whole = head_trial.run(head_trial.hidden, head_trial.project, input_ids=head_trial.ids, labels=head_trial.labels)
    outer = {id(weight): weight for _, _, weight in head_trial.outer}
    reached = torch.autograd.grad(whole.loss, [*outer.values()], allow_unused=True, retain_graph=True) if outer else ()
    if any(grad is not None for grad in reached):
        return "it has layers with weights between its decoder and its loss"
    (expected,) = torch.autograd.grad(whole.loss, head_trial.hidden)
    grads, loss = torch.zeros_like(expected).flatten(0, 1), 0.0
    for index in head_trial.trained.split(_CHUNK):
        chunk = head_trial.hidden.detach().flatten(0, 1)[index][None].requires_grad_()  # (1, chunk, H)
        target = head_trial.targets[index][None]
        part = head_trial.run(
            chunk, head_trial.project, labels=target, shift_labels=target, num_items_in_batch=len(head_trial.trained)
        )
        grads[index] = torch.autograd.grad(part.loss, chunk)[0][0]
        loss += float(part.loss.detach())
        logits = head_trial.run(chunk, head_trial.project).logits
        if not torch.allclose(logits[0], whole.logits.detach().flatten(0, 1)[index], rtol=_TOLERANCE, atol=_TOLERANCE):
            return "its logits depend on more than a token's hidden state"
    is_loss_equal = abs(loss - float(whole.loss.detach())) <= _TOLERANCE * max(1.0, abs(loss))
    are_grads_equal = (grads.view_as(expected) - expected).norm() <= _TOLERANCE * expected.norm()
    return "" if is_loss_equal and are_grads_equal else "its loss is not the sum over the next tokens' losses"
