"""Losses and log-probabilities over chunks of tokens, which avoids computing all logits of a batch.

Shapes: B batch rows, T tokens of a row, N tokens of a chunk, H hidden size, V vocabulary.
"""

from collections.abc import Collection, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from horizon_lm.engine.passes.ambient import no_autocast_cache
from horizon_lm.engine.units.chunked_lm_head import ChunkedLmHead
from horizon_lm.engine.units.chunked_runs import ChunkedRun, Grads
from horizon_lm.engine.units.loss_inputs import LossInputs
from horizon_lm.engine.units.token_statistics import TokenStatistics
from horizon_lm.errors import StreamingError
from horizon_lm.model.adapter_kinds import require_adapters_that_stream
from horizon_lm.model.compiled_loss import compiled_loss
from horizon_lm.model.functional import logprobs_of_logits


class LossRun(ChunkedRun):
    """The loss of one forward pass over chunks, and its gradients.

    If the head's gradient buffer is free, the forward pass also computes the gradients, which saves the backward pass a
    second pass over the chunks, as long as several blocks. Otherwise the backward pass recomputes the chunks.

    Attributes:
        computed: gradients for a loss gradient of one, once they are computed.
    """

    computed: Grads | None = None

    def forward(self, hidden: torch.Tensor, outer: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the loss as the only result, and compute the gradients if the head's gradient buffer is free."""
        forward_state = self.forward_state
        if forward_state is not None and forward_state.has_head_grads:
            # The gradient of the loss is not known yet: gradients are computed for 1, and `backward` scales them.
            loss, self.computed = self._loss_and_grads(hidden, outer, None, overwrite=True)
            # From now on the buffer holds these gradients. A forward pass that begins before this one's backward pass
            # finds it taken, and computes none.
            self.engine.between.head_grads_lease.take(forward_state)
        else:
            loss = self._loss(hidden, outer)
        self.statistics = None  # collected once: the backward pass may compute the chunks again
        return (loss,)

    def backward(
        self, grads: Sequence[torch.Tensor | None], hidden: torch.Tensor, outer: list[torch.Tensor], overwrite: bool
    ) -> Grads:
        """Return the gradients that the forward pass has computed, multiplied by that of the loss, or compute them again."""
        (grad,) = grads
        assert grad is not None  # a run whose only result has no gradient is skipped
        assert self.forward_state is not None
        # The forward pass has computed no gradients, or another backward pass has overwritten those of the head.
        if self.computed is None or not self.forward_state.has_head_grads:
            _, recomputed = self.context.run(lambda: self._loss_and_grads(hidden, outer, grad, overwrite))
            return recomputed
        # The loss that the caller keeps holds this node: gradients (B, T, H) must not stay with it.
        (hidden_grad, outer_grads), self.computed = self.computed, None
        # Reading the loss gradient from an accelerator would make the host wait, so there the product is always
        # computed.
        if grad.device.type != "cpu" or grad != 1:
            for tensor in (hidden_grad, *outer_grads, *self.owner.head.grads().values()):
                tensor.mul_(grad)
        return hidden_grad, outer_grads

    def _loss(self, hidden: torch.Tensor, outer: list[torch.Tensor]) -> torch.Tensor:
        """Return only the loss."""
        flat = hidden.detach().reshape(-1, hidden.shape[-1])  # (B * T, H)
        total = _zero(hidden.device)
        with torch.no_grad(), no_autocast_cache():
            for index in self.chunks():
                total = total + self._chunk_loss(flat[index], index, outer, None, overwrite=False)
        return self._nan_without_items(total)

    def _nan_without_items(self, total: torch.Tensor) -> torch.Tensor:
        """Return the sum of the chunks' losses, each divided already (`_chunk_loss`); NaN, as in Hugging Face, if there are no items."""
        # Without a chunk the sum is 0, and 0 / 0 is NaN.
        return total if len(self.inputs.trained) else total / self.inputs.num_items

    def _loss_and_grads(
        self, hidden: torch.Tensor, outer: list[torch.Tensor], grad: torch.Tensor | None, overwrite: bool
    ) -> tuple[torch.Tensor, Grads]:
        """Return the loss and the gradients. The head's gradients go into its buffer.

        Args:
            hidden: hidden states (B, T, H).
            outer: the outer parameters of `outer_names`.
            grad: gradient of the loss; None for one.
            overwrite: overwrite the head's gradient buffer.
        """
        total = _zero(hidden.device)

        def differentiate_chunk(
            leaf: torch.Tensor, index: torch.Tensor, outer_leaves: list[torch.Tensor],
            head_grads: dict[str, torch.Tensor], overwrites: bool,
        ) -> None:  # fmt: skip
            nonlocal total
            loss = self._chunk_loss(leaf, index, outer_leaves, head_grads, overwrites)
            # The batch's loss is the plain sum of these. A model's own loss may have another dtype than the total.
            loss.backward(None if grad is None else grad.to(loss.dtype))
            total = total + loss.detach()

        grads = self.differentiate(hidden, outer, differentiate_chunk, overwrite)
        return self._nan_without_items(total), grads

    def _chunk_loss(
        self, hidden: torch.Tensor, index: torch.Tensor, outer: list[torch.Tensor],
        grads: dict[str, torch.Tensor] | None, overwrite: bool,
    ) -> torch.Tensor:  # fmt: skip
        """Return what the tokens at these positions (N,) add to the batch's loss: the sum of their losses, divided by the
        number of items of the whole batch.

        Args:
            hidden: the tokens' hidden states (N, H).
            index: their positions.
            outer, grads, overwrite: as in `call_model`.
        """
        # transformers computes a loss if there are `labels`, and shifts none if there are `shift_labels`: tokens of a
        # chunk need not follow each other.
        target = self.inputs.labels.reshape(-1)[index][None]  # (1, N)
        loss_inputs = {"labels": target, "shift_labels": target, "num_items_in_batch": self._num_items()}
        with compiled_loss(self.engine.parts.model) if self.engine.options.compile else nullcontext():
            output = self.call_model(hidden, outer, grads, overwrite, **loss_inputs)
        if self.statistics is not None:
            # Here, while the logits exist: what this takes is freed before the chunk's backward pass, whose peak is higher.
            self.statistics.add(index, output.logits[0])
        return output.loss  # type: ignore[no-any-return]

    def _num_items(self) -> torch.Tensor | int:
        """Return the divisor of the batch's loss; for compiled code as a tensor, since it is compiled again for another number."""
        num_items = self.inputs.num_items
        if isinstance(num_items, int) and self.engine.options.compile:
            return torch.full((), num_items, device=self.inputs.labels.device)
        return num_items


def _zero(device: torch.device) -> torch.Tensor:
    """Return zero, to which losses are added: in float32, as the loss of transformers, which upcasts the logits."""
    return torch.zeros((), dtype=torch.float32, device=device)


class TokenLogprobs(NamedTuple):
    """Log-probabilities of the token that follows each position, and statistics of the predicted distribution.

    Values have shape (B, T) and dtype float32; they are 0 at positions that are not trained.

    Attributes:
        logprobs: natural logarithm of the token's probability.
        mean: mean of the log-probabilities over the vocabulary, for label smoothing; None unless requested.
        entropy: entropy of the distribution, in nats; None unless requested.
        aux_loss: the model's weighted auxiliary loss, which balances its experts; None without such a loss.
        unweighted_aux_loss: the auxiliary loss before it is weighted by the model's ``router_aux_loss_coef``.
        mean_logits: mean of the logits over the vocabulary, divided by the temperature; without gradient. None unless
            requested.
        log_sum_sq_probs: logarithm of the sum of squared probabilities over the vocabulary, without gradient; None unless
            requested.
        is_top1: 1 where the token has the largest logit; None unless requested.
    """

    logprobs: torch.Tensor
    mean: torch.Tensor | None = None
    entropy: torch.Tensor | None = None
    aux_loss: torch.Tensor | None = None
    unweighted_aux_loss: torch.Tensor | None = None
    mean_logits: torch.Tensor | None = None
    log_sum_sq_probs: torch.Tensor | None = None
    is_top1: torch.Tensor | None = None


class WantedLogprobs(NamedTuple):
    """The values that `token_logprobs` wants of a forward pass, instead of a loss."""

    temperature: float
    names: Sequence[str]


WANTED = "_horizon_lm_logprobs"  # the argument of the model's forward method that has them
STATISTICS = ("mean", "entropy", "mean_logits", "log_sum_sq_probs", "is_top1")
WITHOUT_GRADIENT = ("mean_logits", "log_sum_sq_probs", "is_top1")


def token_logprobs(
    model: Any, *, temperature: float = 1.0, statistics: Collection[str] = (), **inputs: Any
) -> TokenLogprobs:
    """Compute the log-probabilities of labels, differentiably, without the logits of the whole batch.

    With ``head="chunked"``, logits exist for one chunk of tokens at a time, and are recomputed in the backward pass.

    Args:
        model: a streamed model.
        temperature: divides the logits.
        statistics: further values to return, fields of TokenLogprobs: ``mean``, ``entropy``, ``mean_logits``,
            ``log_sum_sq_probs``, ``is_top1``.
        inputs: arguments of the model, with ``labels`` (B, T), as for a loss, or ``shift_labels`` (B, T), already
            shifted by one; -100 at positions to ignore.

    Returns:
        float32 values of shape (B, T): at position t, of the token that follows it. A prompt of P virtual tokens, which PEFT
        puts before the tokens of each row, has positions of its own: values are (B, P + T), and position P - 1 is followed by
        the first token.

    Raises:
        ValueError: labels are missing, or a statistic is unknown.
        StreamingError: the model is not streamed, or classifies rows.

    Examples:
        >>> found = horizon_lm.token_logprobs(model, statistics=["entropy"], **batch)
        >>> found.logprobs.shape == found.entropy.shape == batch["labels"].shape
        True
        >>> (-found.logprobs.sum()).backward()
    """
    if not hasattr(model, "_horizon"):
        raise StreamingError("token_logprobs needs a streamed model; call horizon_lm.stream(model) first")
    if model._horizon.engine.parts.classifies:
        raise StreamingError(
            f"{type(model).__name__} gives scores of rows, not log-probabilities of tokens; use model(...).logits"
        )
    if unknown := set(statistics) - set(STATISTICS):
        raise ValueError(f"statistics are {', '.join(STATISTICS)}, not {', '.join(sorted(unknown))}")
    wanted = WantedLogprobs(temperature, ["logprobs", *(name for name in STATISTICS if name in statistics)])
    if "_horizon" in vars(model):  # the streamed model itself, not a wrapper that hands the attribute on
        if getattr(vars(model).get("forward"), "__self__", model) is not model:
            raise StreamingError(
                "the model's forward is that of another module, as in PEFT's disable_adapter() of a prompt that was streamed with "
                "the model; add the prompt after stream(), where it can be switched off"
            )
        return model._horizon.token_logprobs((), inputs, wanted)  # type: ignore[no-any-return]
    require_adapters_that_stream(model)
    # By PEFT's model around the streamed one, which puts a prompt before the tokens, or prepares its layers for the call.
    return model(**inputs, **{WANTED: wanted})  # type: ignore[no-any-return]


class LogprobRun(ChunkedRun):
    """The log-probabilities of the trained tokens in one forward pass. The backward pass recomputes the logits by
    chunk.
    """

    def __init__(
        self,
        owner: ChunkedLmHead,
        inputs: LossInputs,
        options: dict[str, Any],
        temperature: float,
        names: Sequence[str],
        statistics: TokenStatistics | None = None,
    ) -> None:
        super().__init__(owner, inputs, options, statistics)
        self._temperature, self._names = temperature, names

    def forward(self, hidden: torch.Tensor, outer: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return each of the named values for all tokens, (B * T,) in float32; 0 for tokens that are not trained."""
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        values = [flat.new_zeros(flat.shape[0], dtype=torch.float32) for _ in self._names]
        with torch.no_grad(), no_autocast_cache():
            for index in self.chunks():
                # All values of a chunk come from the same logits, which are gone after it.
                parts = self._chunk_values(flat[index], index, self._names, outer)
                for whole, part in zip(values, parts, strict=True):
                    whole[index] = part  # (B * T,) at (N,)
        self.statistics = None  # added once: the backward pass computes the same logits again
        return tuple(values)

    def backward(
        self, grads: Sequence[torch.Tensor | None], hidden: torch.Tensor, outer: list[torch.Tensor], overwrite: bool
    ) -> Grads:
        """Return the gradients. The logits of each chunk are computed again."""
        # Values that no loss uses are not recomputed: entropy alone takes two more tensors (N, V).
        grad_of = {name: grad for name, grad in zip(self._names, grads, strict=True) if grad is not None}

        def differentiate_chunk(
            leaf: torch.Tensor, index: torch.Tensor, outer: list[torch.Tensor],
            head_grads: dict[str, torch.Tensor], overwrite: bool,
        ) -> None:  # fmt: skip
            values = self._chunk_values(leaf, index, list(grad_of), outer, head_grads, overwrite)
            torch.autograd.backward(values, [grad[index] for grad in grad_of.values()])

        return self.context.run(lambda: self.differentiate(hidden, outer, differentiate_chunk, overwrite))

    def _chunk_values(
        self, hidden: torch.Tensor, index: torch.Tensor, names: Sequence[str], outer: list[torch.Tensor],
        grads: dict[str, torch.Tensor] | None = None, overwrite: bool = False,
    ) -> list[torch.Tensor]:  # fmt: skip
        """Return the named values (N,) of the tokens at these positions (N,), from their hidden states (N, H).

        ``outer``, ``grads`` and ``overwrite`` are those of `call_model`.
        """
        logits = self.call_model(hidden, outer, grads, overwrite).logits[0]  # (N, V)
        if self.statistics is not None:
            self.statistics.add(index, logits)
        labels = self.inputs.labels.reshape(-1)[index]  # (N,)
        return logprobs_of_logits(logits, labels, self._temperature, names, self.engine.options.compile)
