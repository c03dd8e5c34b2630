"""What is made of logits besides Hugging Face's own loss."""

from collections.abc import Sequence

import torch


def logprobs_of_logits(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, names: Sequence[str]
) -> list[torch.Tensor]:
    """Values (n,) of each token, by their names.

    Args:
        logits: (n, V).
        labels: (n,), none ignored.
        names: ``logprobs``, of the labels; ``mean``, of the log-probabilities of the vocabulary; ``entropy``, in nats.
    """
    logs = torch.log_softmax(logits.float() / temperature if temperature != 1 else logits.float(), dim=-1)
    make = {
        "logprobs": lambda: logs.gather(-1, labels[:, None]).squeeze(-1),
        "mean": lambda: logs.mean(-1),
        "entropy": lambda: -(logs.exp() * logs).sum(-1),
    }
    return [make[name]() for name in names]
