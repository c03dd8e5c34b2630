"""Statistics of a forward's trained tokens, computed from each chunk's logits while they exist.

Shapes: B batch rows, T tokens of a row, N tokens of a chunk, V vocabulary.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from horizon_lm.model.functional import STATISTICS, token_statistics

_SELECTED_TOKENS = 64  # tokens whose logits a CPU copies at once, if the logits of a whole batch exist


class TokenStatistics:
    """The statistics of one forward, of the distributions that the model's own logits define.

    Attributes:
        values: `STATISTICS` by name, float32 (B, T) on the device: at position t, of the distribution of the token that
            follows it. 0 at positions that are not trained; empty before a forward with labels.
    """

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self._labels: torch.Tensor
        self._compiled = False

    def begin(self, labels: torch.Tensor, compiled: bool) -> None:
        """Start with zeros for a batch with these labels (B, T), already shifted by one; use compiled code or not."""
        self._labels, self._compiled = labels.reshape(-1), compiled
        self.values = {name: labels.new_zeros(labels.shape, dtype=torch.float32) for name in STATISTICS}

    def add(self, index: torch.Tensor, logits: torch.Tensor) -> None:
        """Add the tokens at positions (N,) of the flattened batch, from their logits (N, V)."""
        for name, part in token_statistics(logits, self._labels[index], self._compiled).items():
            self.values[name].view(-1)[index] = part

    def add_batch(self, trained: torch.Tensor, logits: torch.Tensor) -> None:
        """Add the trained tokens (N,) of a batch from all of its logits (B, T, V)."""
        flat = logits.detach().flatten(0, 1)  # (B * T, V), a view
        # Not all at once, because selecting tokens copies their logits. Two halves take no more memory than the backward
        # pass of the loss (`token_statistics`).
        size = _SELECTED_TOKENS if logits.device.type == "cpu" else -(-len(trained) // 2)
        for index in trained.split(size) if len(trained) else ():
            self.add(index, flat[index])


@contextmanager
def collect_statistics(model: Any) -> Iterator[TokenStatistics]:
    """Context manager: collect the statistics of a streamed model's next forward with labels.

    Loss and gradients have the same bits with and without. Nothing waits for the device.
    """
    model._horizon.statistics = statistics = TokenStatistics()
    try:
        yield statistics
    finally:
        model._horizon.statistics = None
