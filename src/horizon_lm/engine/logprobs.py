"""Log-probabilities of tokens: what every objective but plain fine-tuning is made of."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from horizon_lm.engine.chunked_head import ChunkedHead, ChunkedRun, Grads, LossInputs
from horizon_lm.engine.replay import no_autocast_cache
from horizon_lm.errors import StreamingError
from horizon_lm.schedule.ops import HEAD, Kind


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


def logprobs_of_logits(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, statistics: bool
) -> list[torch.Tensor]:
    """Per token the log-probability of its label, and on request the mean over the vocabulary and the entropy.

    Args:
        logits: (n, V).
        labels: (n,), none ignored.
    """
    logs = torch.log_softmax(logits.float() / temperature if temperature != 1 else logits.float(), dim=-1)
    values = [logs.gather(-1, labels[:, None]).squeeze(-1)]
    if statistics:
        values += [logs.mean(-1), -(logs.exp() * logs).sum(-1)]
    return values


def token_logprobs(model: Any, *, temperature: float = 1.0, statistics: bool = False, **inputs: Any) -> TokenLogprobs:
    """Log-probabilities of labels, differentiable, without logits as a whole.

    With ``head="chunked"`` logits exist for one chunk of tokens at a time, and are made again for the backward.

    Args:
        model: a streamed model.
        temperature: logits are divided by it.
        statistics: also the mean log-probability over the vocabulary, and the entropy.
        inputs: arguments of the model's forward, with ``labels`` (B, T) (the next token's, as for a loss) or
            ``shift_labels`` (already shifted); -100 where a token does not count.

    Returns:
        Values (B, T) in fp32: at position t, of the token that follows it.

    Raises:
        ValueError: no labels.
        StreamingError: the model is not streamed.
    """
    if not hasattr(model, "_horizon"):
        raise StreamingError("token_logprobs needs a streamed model; call horizon_lm.stream(model) first")
    return model._horizon.token_logprobs(inputs, temperature, statistics)


class LogprobRun(ChunkedRun):
    """Log-probabilities of one forward's trained tokens; logits are made again for the backward."""

    def __init__(
        self, owner: ChunkedHead, inputs: LossInputs, options: dict[str, Any], temperature: float, statistics: bool
    ) -> None:
        super().__init__(owner, inputs, options)
        self._temperature, self._statistics = temperature, statistics

    def forward(self, hidden: torch.Tensor, norm: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        values = [flat.new_zeros(flat.shape[0], dtype=torch.float32) for _ in range(3 if self._statistics else 1)]
        with self.engine.cursor.compute(Kind.FORWARD, HEAD), torch.no_grad(), no_autocast_cache():
            for index in self.chunks():
                for whole, part in zip(values, self._of_chunk(flat[index], index, norm, None, False), strict=True):
                    whole[index] = part
            self.engine.device.poison(self.engine.memory.head_weights[0])
        return tuple(values)

    def backward(self, grads: Sequence[torch.Tensor | None], hidden: torch.Tensor, norm: list[torch.Tensor]) -> Grads:
        head, engine = self.owner.head, self.engine

        def of_chunk(leaf: torch.Tensor, index: torch.Tensor, *rest: Any) -> None:
            pairs = zip(self._of_chunk(leaf, index, *rest), grads, strict=True)
            wanted = [(value, grad[index]) for value, grad in pairs if grad is not None]
            torch.autograd.backward([value for value, _ in wanted], [grad for _, grad in wanted])

        with engine.cursor.compute(Kind.BACKWARD, HEAD):
            result = self.surroundings.run(lambda: self.differentiate(hidden, norm, of_chunk))
            head.zero_gaps()
            engine.device.poison(engine.memory.head_weights[0])
        if head.grads():
            engine.landed(HEAD)
        return result

    def _of_chunk(
        self, hidden: torch.Tensor, index: torch.Tensor, norm: list[torch.Tensor],
        grads: dict[str, torch.Tensor] | None, first: bool,
    ) -> list[torch.Tensor]:  # fmt: skip
        logits = self.call_model(hidden, norm, grads, first).logits[0]
        return logprobs_of_logits(logits, self.inputs.labels.reshape(-1)[index], self._temperature, self._statistics)
