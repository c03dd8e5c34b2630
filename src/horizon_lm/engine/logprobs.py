"""Log-probabilities of tokens: what every objective but plain fine-tuning is made of."""

from typing import Any

from horizon_lm.engine.loss import TokenLogprobs
from horizon_lm.errors import StreamingError


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
