"""Losses and log-probabilities over chunks of tokens, so that logits never exist as a whole."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from horizon_lm.engine.chunked_lm_head import ChunkedLmHead, ChunkedRun, Grads, LossInputs
from horizon_lm.engine.recompute import no_autocast_cache
from horizon_lm.errors import StreamingError
from horizon_lm.model.functional import logprobs_of_logits
from horizon_lm.schedule.ops import HEAD, Kind


class LossRun(ChunkedRun):
    """The chunked loss of one forward, and its gradients: made at once where the buffer is free, else recomputed."""

    made: Grads | None = None

    def forward(self, hidden: torch.Tensor, outer: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        forward_state = self.forward_state
        with self.engine.cursor.compute(Kind.FORWARD, HEAD):
            if forward_state is not None and forward_state.head_grads:
                loss, self.made = self._loss_and_grads(hidden, outer)
                self.engine.head_buffer.take(forward_state)
            else:
                loss = self._loss(hidden, outer)
            self.engine.device.poison(self.engine.memory.head_weights[0])
        return (loss,)

    def backward(self, grads: Sequence[torch.Tensor | None], hidden: torch.Tensor, outer: list[torch.Tensor]) -> Grads:
        (grad,) = grads
        assert grad is not None
        assert self.forward_state is not None
        head, engine = self.owner.head, self.engine
        with engine.cursor.compute(Kind.BACKWARD, HEAD):
            if self.made is None or not self.forward_state.head_grads:  # never made, or evicted by another backward
                _, self.made = self.context.run(lambda: self._loss_and_grads(hidden, outer))
                engine.device.poison(engine.memory.head_weights[0])
            (hidden_grad, outer_grads), self.made = self.made, None
            if grad.device.type != "cpu" or grad != 1:  # reading it from an accelerator would cost a wait
                for tensor in (hidden_grad, *outer_grads, *head.grads().values()):
                    tensor.mul_(grad)
            head.landed()
        return hidden_grad, outer_grads

    def _loss(self, hidden: torch.Tensor, outer: list[torch.Tensor]) -> torch.Tensor:
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.no_grad(), no_autocast_cache():
            for index in self.chunks():
                total = total + self._of_chunk(flat[index], index, outer, None, first=False)
        return total if len(self.inputs.trained) else total / self.inputs.num_items

    def _loss_and_grads(self, hidden: torch.Tensor, outer: list[torch.Tensor]) -> tuple[torch.Tensor, Grads]:
        """Also the gradients for a loss gradient of one; those of the head go into its buffer."""
        losses = [torch.zeros((), dtype=torch.float32, device=hidden.device)]

        def of_chunk(*chunk: Any) -> None:
            loss = self._of_chunk(*chunk)
            torch.autograd.backward([loss])
            losses[0] = losses[0] + loss.detach()

        grads = self.differentiate(hidden, outer, of_chunk)
        return losses[0] if len(self.inputs.trained) else losses[0] / self.inputs.num_items, grads

    def _of_chunk(
        self, hidden: torch.Tensor, index: torch.Tensor, outer: list[torch.Tensor],
        grads: dict[str, torch.Tensor] | None, first: bool,
    ) -> torch.Tensor:  # fmt: skip
        """The loss of the tokens at ``index``, whose hidden states (n, H) are given."""
        target = self.inputs.labels.reshape(-1)[index][None]
        return self.call_model(
            hidden, outer, grads, first, labels=target, shift_labels=target, num_items_in_batch=self.inputs.num_items
        ).loss


class TokenLogprobs(NamedTuple):
    """Values (B, T) in fp32 of the token that follows each position, 0 where it is not trained.

    Attributes:
        logprobs: natural logarithm of the token's probability.
        mean: of the log-probabilities of the whole vocabulary, for label smoothing; None unless asked for.
        entropy: of the distribution, in nats; None unless asked for.
        aux_loss: what the model adds to its loss for the balance of experts, weighed; None if it adds nothing.
    """

    logprobs: torch.Tensor
    mean: torch.Tensor | None
    entropy: torch.Tensor | None
    aux_loss: torch.Tensor | None = None


def token_logprobs(
    model: Any, *, temperature: float = 1.0, statistics: Collection[str] = (), **inputs: Any
) -> TokenLogprobs:
    """Log-probabilities of labels, differentiable, without logits as a whole.

    With ``head="chunked"`` logits exist for one chunk of tokens at a time, and are made again for the backward.

    Args:
        model: a streamed model.
        temperature: logits are divided by it.
        statistics: what is wanted besides: ``mean``, the mean log-probability over the vocabulary, and ``entropy``.
        inputs: arguments of the model's forward, with ``labels`` (B, T) (the next token's, as for a loss) or
            ``shift_labels`` (already shifted); -100 where a token does not count.

    Returns:
        Values (B, T) in fp32: at position t, of the token that follows it.

    Raises:
        ValueError: no labels, or statistics that there are not.
        StreamingError: the model is not streamed.
    """
    if not hasattr(model, "_horizon"):
        raise StreamingError("token_logprobs needs a streamed model; call horizon_lm.stream(model) first")
    if unknown := set(statistics) - set(TokenLogprobs._fields[1:3]):
        raise ValueError(f"statistics are mean and entropy, not {', '.join(sorted(unknown))}")
    names = [name for name in TokenLogprobs._fields[:3] if name == "logprobs" or name in statistics]
    return model._horizon.token_logprobs(inputs, temperature, names)


class LogprobRun(ChunkedRun):
    """Log-probabilities of one forward's trained tokens; logits are made again for the backward."""

    def __init__(
        self,
        owner: ChunkedLmHead,
        inputs: LossInputs,
        options: dict[str, Any],
        temperature: float,
        names: Sequence[str],
    ) -> None:
        super().__init__(owner, inputs, options)
        self._temperature, self._names = temperature, names

    def forward(self, hidden: torch.Tensor, outer: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        values = [flat.new_zeros(flat.shape[0], dtype=torch.float32) for _ in self._names]
        with self.engine.cursor.compute(Kind.FORWARD, HEAD), torch.no_grad(), no_autocast_cache():
            for index in self.chunks():
                for whole, part in zip(values, self._of_chunk(flat[index], index, self._names, outer), strict=True):
                    whole[index] = part
            self.engine.device.poison(self.engine.memory.head_weights[0])
        return tuple(values)

    def backward(self, grads: Sequence[torch.Tensor | None], hidden: torch.Tensor, outer: list[torch.Tensor]) -> Grads:
        head, engine = self.owner.head, self.engine

        wanted = {name: grad for name, grad in zip(self._names, grads, strict=True) if grad is not None}

        def of_chunk(leaf: torch.Tensor, index: torch.Tensor, *rest: Any) -> None:
            torch.autograd.backward(
                self._of_chunk(leaf, index, list(wanted), *rest), [grad[index] for grad in wanted.values()]
            )

        with engine.cursor.compute(Kind.BACKWARD, HEAD):
            result = self.context.run(lambda: self.differentiate(hidden, outer, of_chunk))
            engine.device.poison(engine.memory.head_weights[0])
            head.landed()
        return result

    def _of_chunk(
        self, hidden: torch.Tensor, index: torch.Tensor, names: Sequence[str], outer: list[torch.Tensor],
        grads: dict[str, torch.Tensor] | None = None, first: bool = False,
    ) -> list[torch.Tensor]:  # fmt: skip
        logits = self.call_model(hidden, outer, grads, first).logits[0]
        return logprobs_of_logits(logits, self.inputs.labels.reshape(-1)[index], self._temperature, names)
