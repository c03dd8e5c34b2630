"""Losses of supervised fine-tuning and pre-training, each a mean over the targets of a step."""

from typing import Any

from horizon_lm.device.host_copy import HostCopy
from horizon_lm.engine.calls.token_logprobs import token_logprobs
from horizon_lm.engine.units.token_statistics import TokenStatistics, collect_statistics
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.objective.base import Loss, TokenSums, add_aux_loss, num_targets, share_aux_loss


def _token_metrics(statistics: TokenStatistics, batch: Batch) -> dict[str, TokenSums]:
    """Return the metrics that TRL's SFTTrainer logs, by its names, as sums over the targets of each row."""
    names, counts = {"entropy": "entropy", "mean_token_accuracy": "is_top1"}, num_targets(batch)
    return {name: TokenSums(HostCopy(statistics.values[key].sum(1)), counts) for name, key in names.items()}


def nll(model: Any, batch: Batch) -> Loss:
    """Return the negative log-likelihood of the targets, as the Hugging Face model computes it."""
    with collect_statistics(model) as statistics:
        output = model(**batch.inputs(), labels=batch.labels, num_items_in_batch=batch.normalizer)
    loss = share_aux_loss(output.loss, output, model, batch)
    return Loss(loss, batch.num_trained, token_metrics=_token_metrics(statistics, batch))


def likelihood(model: Any, batch: Batch) -> Loss:
    """Return the negative log-likelihood for evaluation, without the auxiliary loss of a mixture of experts."""
    options = {"output_router_logits": False} if hasattr(model.config.get_text_config(), "output_router_logits") else {}
    with collect_statistics(model) as statistics:
        output = model(**batch.inputs(), **options, labels=batch.labels, num_items_in_batch=batch.num_trained)
    return Loss(output.loss, batch.num_trained, token_metrics=_token_metrics(statistics, batch))


def dft(model: Any, batch: Batch) -> Loss:
    """Return the dynamic fine-tuning loss, which weights each target by its probability (arXiv 2508.05629, equation 9)."""
    with collect_statistics(model) as statistics:
        output = token_logprobs(model, labels=batch.labels, **batch.inputs())
    loss = -(output.logprobs * output.logprobs.exp().detach()).sum() / batch.normalizer
    return Loss(
        add_aux_loss(loss, output.aux_loss, batch), batch.num_trained, token_metrics=_token_metrics(statistics, batch)
    )


class SmoothedNll:
    """The negative log-likelihood with label smoothing (arXiv 1512.00567, section 7).

    Args:
        share: share of each target that is spread over the vocabulary.
    """

    def __init__(self, share: float) -> None:
        self._share = share

    def __call__(self, model: Any, batch: Batch) -> Loss:
        with collect_statistics(model) as statistics:
            output = token_logprobs(model, labels=batch.labels, **batch.inputs(), statistics=["mean"])
        assert output.mean is not None
        total = (1 - self._share) * output.logprobs.sum() + self._share * output.mean.sum()
        loss = add_aux_loss(-total / batch.normalizer, output.aux_loss, batch)
        return Loss(loss, batch.num_trained, token_metrics=_token_metrics(statistics, batch))
