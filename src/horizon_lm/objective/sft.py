"""Losses of each token: supervised fine-tuning and pre-training. The loss of a step is the mean over its targets."""

from typing import Any

from horizon_lm.data.loader import Batch
from horizon_lm.objective.base import Loss, with_balance


def nll(model: Any, batch: Batch) -> Loss:
    """Negative log-likelihood of the targets, as Hugging Face's model computes it."""
    output = model(**batch.inputs(), labels=batch.labels, num_items_in_batch=batch.num_trained)
    return Loss(output.loss, batch.num_trained)


def likelihood(model: Any, batch: Batch) -> Loss:
    """The same of held-out rows: without what a mixture of experts adds to its loss for their balance."""
    options = {"output_router_logits": False} if hasattr(model.config.get_text_config(), "output_router_logits") else {}
    output = model(**batch.inputs(), **options, labels=batch.labels, num_items_in_batch=batch.num_trained)
    return Loss(output.loss, batch.num_trained)


def dft(model: Any, batch: Batch) -> Loss:
    """Each target's loss weighed by its probability (arXiv 2508.05629, equation 9)."""
    from horizon_lm.engine.chunked_losses import token_logprobs

    output = token_logprobs(model, labels=batch.labels, **batch.inputs())
    loss = -(output.logprobs * output.logprobs.exp().detach()).sum() / batch.num_trained
    return Loss(with_balance(loss, output.aux_loss), batch.num_trained)


class SmoothedNll:
    """Negative log-likelihood with a share of each target spread over the vocabulary (arXiv 1512.00567, section 7)."""

    def __init__(self, share: float) -> None:
        self._share = share

    def __call__(self, model: Any, batch: Batch) -> Loss:
        from horizon_lm.engine.chunked_losses import token_logprobs

        output = token_logprobs(model, labels=batch.labels, **batch.inputs(), statistics=["mean"])
        assert output.mean is not None
        total = (1 - self._share) * output.logprobs.sum() + self._share * output.mean.sum()
        return Loss(with_balance(-total / batch.num_trained, output.aux_loss), batch.num_trained)
