"""Direct preference optimisation (arXiv 2305.18290) and its relatives, on log-probabilities of whole answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F  # noqa: N812

from horizon_lm.config import DpoConfig
from horizon_lm.constants import IGNORE_INDEX
from horizon_lm.data.loader import Batch
from horizon_lm.objective.base import Loss, with_balance


@dataclass(frozen=True, slots=True)
class Ratios:
    """Log-ratios of the model to the reference, of B pairs.

    Attributes:
        chosen, rejected: (B,), of the whole answers.
        chosen_length, rejected_length: (B,), their tokens.
    """

    chosen: torch.Tensor
    rejected: torch.Tensor
    chosen_length: torch.Tensor
    rejected_length: torch.Tensor


PairLoss = Callable[[Ratios, float, float], torch.Tensor]


def sigmoid(ratios: Ratios, beta: float, smoothing: float) -> torch.Tensor:
    """DPO (arXiv 2305.18290, equation 7)."""
    return -F.logsigmoid(beta * (ratios.chosen - ratios.rejected))


def hinge(ratios: Ratios, beta: float, smoothing: float) -> torch.Tensor:
    """SLiC-HF's (arXiv 2305.10425), with log-ratios."""
    return torch.relu(1 - beta * (ratios.chosen - ratios.rejected))


def ipo(ratios: Ratios, beta: float, smoothing: float) -> torch.Tensor:
    """IPO (arXiv 2310.12036, equation 17), of log-ratios per token, as TRL has it."""
    difference = ratios.chosen / ratios.chosen_length - ratios.rejected / ratios.rejected_length
    return (difference - 1 / (2 * beta)) ** 2


def robust(ratios: Ratios, beta: float, smoothing: float) -> torch.Tensor:
    """Robust DPO (arXiv 2403.00409, equation 12): a share of the preferences is the wrong way round."""
    logits = beta * (ratios.chosen - ratios.rejected)
    return (-(1 - smoothing) * F.logsigmoid(logits) + smoothing * F.logsigmoid(-logits)) / (1 - 2 * smoothing)


LOSSES: dict[str, PairLoss] = {"sigmoid": sigmoid, "hinge": hinge, "ipo": ipo, "robust": robust}


def answer_logprobs(model: Any, batch: Batch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probabilities (2, B) of the chosen and the rejected answers of a batch of pairs, and the model's own loss."""
    from horizon_lm.engine.chunked_losses import token_logprobs

    output = token_logprobs(model, labels=batch.labels, **batch.inputs())
    return output.logprobs.sum(1).view(2, -1), output.aux_loss


class Dpo:
    """The loss of a batch of pairs: the mean over them.

    Args:
        config: of the run.
        references: log-probabilities (2, B) of the answers of a batch under the model that the run started from.
    """

    def __init__(self, config: DpoConfig, references: Callable[[Batch], np.ndarray]) -> None:
        self._config, self._references = config, references
        self._losses: Sequence[PairLoss] = [LOSSES[name] for name in config.loss_type]
        self._weights = config.loss_weights or [1.0] * len(self._losses)

    def __call__(self, model: Any, batch: Batch) -> Loss:
        beta = self._config.beta
        logprobs, aux_loss = answer_logprobs(model, batch)
        reference = torch.from_numpy(self._references(batch)).to(logprobs.device)
        lengths = (batch.labels[:, 1:] != IGNORE_INDEX).sum(1).view(2, -1).to(logprobs.device)
        ratios = Ratios(*(logprobs - reference), *lengths)
        terms = [
            weight * loss(ratios, beta, self._config.label_smoothing).mean()
            for loss, weight in zip(self._losses, self._weights, strict=True)
        ]
        rewards = beta * (logprobs.detach() - reference)
        margins = rewards[0] - rewards[1]
        metrics = {
            "rewards/chosen": rewards[0], "rewards/rejected": rewards[1], "rewards/margins": margins,
            "rewards/accuracies": (margins > 0).float(), "logps/chosen": logprobs[0], "logps/rejected": logprobs[1],
        }  # fmt: skip
        names, sums = list(metrics), torch.stack([values.detach().sum() for values in metrics.values()]).tolist()
        return Loss(
            with_balance(torch.stack(terms).sum(), aux_loss),
            float(margins.numel()),
            dict(zip(names, sums, strict=True)),
        )
