"""Log-probabilities of the tokens of a batch, differentiable, by a streamed model.

Shapes: B batch rows, T tokens of a row.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from horizon_lm.errors import StreamingError
from horizon_lm.model.adapter_kinds import require_adapters_that_stream


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


WANTED = "_horizon_lm_logprobs"  # the keyword by which the model's forward method gets a `WantedLogprobs`
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
    # Called through PEFT's model around the streamed one, which puts a prompt before the tokens, or prepares its layers.
    return model(**inputs, **{WANTED: wanted})  # type: ignore[no-any-return]


def as_token_logprobs(
    names: Sequence[str], values: Sequence[torch.Tensor], shape: torch.Size, aux_losses: Mapping[str, torch.Tensor]
) -> TokenLogprobs:
    """Return named values (B * T,) as fields in the shape (B, T) of the labels, with the auxiliary losses."""
    fields = {name: value.view(shape) for name, value in zip(names, values, strict=True)}
    # All values come from one autograd node, which marks every floating-point output as differentiable.
    for name in fields.keys() & set(WITHOUT_GRADIENT):
        fields[name] = fields[name].detach()
    return TokenLogprobs(**fields, **aux_losses)


def aux_losses(model: Any, output: Any) -> dict[str, torch.Tensor]:
    """Return the auxiliary loss that a model adds to its loss, weighted and unweighted, from an output computed
    without labels; empty without such a loss.
    """
    aux = getattr(output, "aux_loss", None)
    if aux is None:
        return {}
    # Kept as an attribute, which may be changed, or read from the config at each call, as in models of images and text.
    weight = vars(model).get("router_aux_loss_coef")
    if weight is None:
        weight = model.config.get_text_config().router_aux_loss_coef
    return {"aux_loss": aux * weight, "unweighted_aux_loss": aux}
