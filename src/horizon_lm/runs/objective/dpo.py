"""Losses of direct preference optimization (arXiv 2305.18290) on the log-probabilities of whole answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from horizon_lm.device.host_copy import HostCopy
from horizon_lm.engine.calls.token_logprobs import token_logprobs
from horizon_lm.engine.units.token_statistics import collect_statistics
from horizon_lm.runs.config import DpoConfig
from horizon_lm.runs.data.batch import Batch
from horizon_lm.runs.objective.base import Loss, TokenSums, add_aux_loss, num_targets


@dataclass(frozen=True, slots=True)
class Ratios:
    """Log-ratios of the model to the reference for B pairs.

    Attributes:
        chosen, rejected: log-ratios of the whole answers, shape (B,).
        chosen_length, rejected_length: number of tokens in the answers, shape (B,).
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_length: torch.Tensor
    rejected_length: torch.Tensor


PairLoss = Callable[[Ratios, float, float], torch.Tensor]


def sigmoid(ratios: Ratios, beta: float, smoothing: float) -> torch.Tensor:
    """Return the DPO loss of each pair (arXiv 2305.18290, equation 7)."""
    return -F.logsigmoid(beta * (ratios.chosen - ratios.rejected))


def hinge(ratios: Ratios, beta: float, smoothing: float) -> torch.Tensor:
    """Return the hinge loss of SLiC-HF (arXiv 2305.10425), applied to log-ratios."""
    return torch.relu(1 - beta * (ratios.chosen - ratios.rejected))


def ipo(ratios: Ratios, beta: float, smoothing: float) -> torch.Tensor:
    """Return the IPO loss (arXiv 2310.12036, equation 17), with log-ratios per token as in TRL."""
    difference = ratios.chosen / ratios.chosen_length - ratios.rejected / ratios.rejected_length
    return (difference - 1 / (2 * beta)) ** 2


def robust(ratios: Ratios, beta: float, smoothing: float) -> torch.Tensor:
    """Return the robust DPO loss (arXiv 2403.00409, equation 12) for a share ``smoothing`` of wrong preferences."""
    logits = beta * (ratios.chosen - ratios.rejected)
    return (-(1 - smoothing) * F.logsigmoid(logits) + smoothing * F.logsigmoid(-logits)) / (1 - 2 * smoothing)


LOSSES: dict[str, PairLoss] = {"sigmoid": sigmoid, "hinge": hinge, "ipo": ipo, "robust": robust}


def answer_logprobs(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the log-probabilities (2, B) of the chosen and rejected answers, and the auxiliary loss of the experts if any."""
    output = token_logprobs(model, labels=batch.labels, **batch.inputs())
    return output.logprobs.sum(1).view(2, -1), output.aux_loss


class Dpo:
    """The objective of DPO: the mean loss of the pairs in a batch.

    Args:
        config: settings of the run.
        references: function from a batch to the log-probabilities (2, B) of its answers under the initial model.
    """

    def __init__(self, config: DpoConfig, references: Callable[[Batch], np.ndarray]) -> None:
        self._config, self._references = config, references
        self._losses: Sequence[PairLoss] = [LOSSES[name] for name in config.loss_type]
        self._weights = config.loss_weights or [1.0] * len(self._losses)

    def __call__(self, model: Any, batch: Batch) -> Loss:
        beta = self._config.beta
        with collect_statistics(model) as statistics:
            logprobs, aux_loss = answer_logprobs(model, batch)
        reference = torch.from_numpy(self._references(batch)).to(logprobs.device)
        lengths = num_targets(batch).view(2, -1)
        ratios = Ratios(*(logprobs - reference), *lengths.to(logprobs.device))
        weighted_losses = [
            weight * loss(ratios, beta, self._config.label_smoothing).mean()
            for loss, weight in zip(self._losses, self._weights, strict=True)
        ]
        rewards = beta * (logprobs.detach() - reference)
        margins = rewards[0] - rewards[1]
        metrics = {
            "rewards/chosen": rewards[0], "rewards/rejected": rewards[1], "rewards/margins": margins,
            "rewards/accuracies": (margins > 0).float(), "logps/chosen": logprobs[0], "logps/rejected": logprobs[1],
        }  # fmt: skip
        # Stacked, and read together: each reading from the device waits for it.
        sums = torch.stack([values.detach().sum() for values in metrics.values()]).tolist()
        sums_by_answer = {name: values.sum(1).view(2, -1) for name, values in statistics.values.items()}
        token_metrics = {  # as in TRL's DPOTrainer: the entropy of both answers, the accuracy of the chosen one
            "entropy": TokenSums(HostCopy(sums_by_answer["entropy"].sum(0)), lengths.sum(0)),
            "mean_token_accuracy": TokenSums(HostCopy(sums_by_answer["is_top1"][0]), lengths[0]),
        }
        mean = torch.stack(weighted_losses).sum()
        return Loss(
            value=add_aux_loss(mean if batch.share == 1 else mean * batch.share, aux_loss, batch),
            weight=float(margins.numel()),
            metrics=dict(zip(metrics, sums, strict=True)),
            token_metrics=token_metrics,
        )
