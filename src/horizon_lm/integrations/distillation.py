"""Compute the loss of TRL's DistillationTrainer from logits.

TRL multiplies hidden states by the weights of both heads itself, tile by tile. The weights of streamed heads are not on the
device, so the logits of the completions are computed by the models; what follows of them is computed in chunks.

Shapes: N tokens of completions, V vocabulary.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

_CHUNK_TOKENS = 512  # tokens of which float32 probabilities exist at once


class DistilledFromLogits:
    """A mixin for subclasses of ``trl.DistillationTrainer``."""

    def _compute_loss(
        self, student: Any, inputs: Mapping[str, torch.Tensor], num_items_in_batch: Any
    ) -> tuple[torch.Tensor, ...]:
        """Return the loss of a batch, the sum of its tokens' entropies under the student, and the number of these tokens; TRL calls it."""
        trainer: Any = self
        counted = (inputs["completion_mask"] * inputs.get("tool_mask", 1)).bool()
        student_logits = self._completion_logits(student, inputs)[counted]
        trainer.teacher_model.eval()
        with torch.no_grad():
            teacher_logits = self._completion_logits(trainer.teacher_model, inputs)[counted]
        loss = entropy = student_logits.new_zeros((), dtype=torch.float32)
        for chunk in zip(student_logits.split(_CHUNK_TOKENS), teacher_logits.split(_CHUNK_TOKENS), strict=True):
            sums: Any = checkpoint(_divergence, *chunk, trainer.beta, trainer.temperature, use_reentrant=False)
            loss, entropy = loss + sums[0], entropy + sums[1].detach()
        num_tokens = counted.sum()
        return (
            loss / (num_tokens.clamp(min=1) if num_items_in_batch is None else num_items_in_batch),
            entropy,
            num_tokens,
        )

    def _completion_logits(self, model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the logits with which a model predicts the completions, (B, T, V) for the T positions of `completion_mask`."""
        trainer: Any = self
        ids, mask = (torch.cat([inputs[f"prompt_{k}"], inputs[f"completion_{k}"]], dim=1) for k in ("ids", "mask"))
        length = inputs["completion_ids"].shape[1]
        options = {"logits_to_keep": length + 1} if "logits_to_keep" in trainer.model_kwarg_keys else {}
        logits: torch.Tensor = model(input_ids=ids, attention_mask=mask, use_cache=False, **options).logits
        return logits[:, -length - 1 : -1]  # each position predicts the next token


def _divergence(
    student: torch.Tensor, teacher: torch.Tensor, beta: float, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the generalized Jensen-Shannon divergence of two distributions, summed over tokens, and the student's entropy.

    With ``beta`` 0 it is KL(teacher || student), and with 1 KL(student || teacher) (Agarwal et al. 2024, equation 1).

    Args:
        student, teacher: logits (N, V).
        beta: weight of the teacher in the mixture.
        temperature: divides the logits.
    """
    of_student, of_teacher = (torch.log_softmax(each.float() / temperature, dim=-1) for each in (student, teacher))
    if beta in (0, 1):
        divergence = _kl(of_teacher, of_student) if beta == 0 else _kl(of_student, of_teacher)
    else:
        mixture = torch.logaddexp(of_student + math.log(1 - beta), of_teacher + math.log(beta))
        divergence = beta * _kl(of_teacher, mixture) + (1 - beta) * _kl(of_student, mixture)
    return divergence, -(of_student.exp() * of_student).sum()


def _kl(of: torch.Tensor, to: torch.Tensor) -> torch.Tensor:
    """Return KL(of || to), summed over tokens, from log-probabilities (N, V)."""
    return (of.exp() * (of - to)).sum()
