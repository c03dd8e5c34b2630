"""Log-probabilities of tokens: what every objective but plain fine-tuning is made of."""

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch

from horizon_lm.engine.chunked_head import ChunkedHead, ChunkedRun, Grads, LossInputs
from horizon_lm.engine.replay import no_autocast_cache
from horizon_lm.errors import StreamingError
from horizon_lm.model.logits import logprobs_of_logits
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
        self, owner: ChunkedHead, inputs: LossInputs, options: dict[str, Any], temperature: float, names: Sequence[str]
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
            result = self.surroundings.run(lambda: self.differentiate(hidden, outer, of_chunk))
            engine.device.poison(engine.memory.head_weights[0])
            head.landed()
        return result

    def _of_chunk(
        self, hidden: torch.Tensor, index: torch.Tensor, names: Sequence[str], outer: list[torch.Tensor],
        grads: dict[str, torch.Tensor] | None = None, first: bool = False,
    ) -> list[torch.Tensor]:  # fmt: skip
        logits = self.call_model(hidden, outer, grads, first).logits[0]
        return logprobs_of_logits(logits, self.inputs.labels.reshape(-1)[index], self._temperature, names)
