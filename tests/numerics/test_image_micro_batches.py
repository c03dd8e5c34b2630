"""Rows with different numbers of images, of different sizes, give the same in micro-batches as one by one."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from horizon_lm.device.simulated import SimulatedDevice
from tests.support.gradients import assert_close_gradients
from tests.support.models_with_images import streamed, tiny
from tests.support.rows_with_images import ROWS, Batch, batches_of
from tests.support.thinned_cases import thinned

KINDS = (
    "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v", "glm46v", "gemma3", "gemma4", "llava", "llava_onevision", "internvl", "smolvlm", "mistral3",
)  # fmt: skip
# Patches one after the other with the ends of images, and with a mask; images with masks, and with tiles.
DEFAULT = (("qwen2_5_vl", 1), ("mistral3", 2), ("smolvlm", 1), ("llava_onevision", 2))


def token_losses(model: Any, batch: Batch) -> list[torch.Tensor]:
    """Return the losses of the trained tokens of each row."""
    logits = model(**{name: value for name, value in batch.items() if name != "labels"}, use_cache=False).logits
    losses = cross_entropy(logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:], reduction="none")
    return [row[labels != -100] for row, labels in zip(losses, batch["labels"][:, 1:], strict=True)]


def require_same_step(model: Any, plain: Any, batch: Batch, rows: Sequence[Batch]) -> None:
    """Require the losses per token of a streamed model, its loss and its gradients to be those of a plain model row by row."""
    expected = [losses for row in rows for losses in token_losses(plain, row)]
    mean = torch.cat(expected).mean()
    mean.backward()
    with torch.no_grad():
        found = token_losses(model, batch)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    loss = model(**batch).loss
    loss.backward()
    torch.testing.assert_close(loss, mean, rtol=1e-5, atol=1e-5)
    assert_close_gradients(model, plain, tolerance=1e-5)
    for each in (model, plain):
        each.zero_grad()


@pytest.mark.parametrize(("kind", "size"), thinned(product(KINDS, (1, 2)), every=24, keep=DEFAULT))
def test_rows_with_images_of_different_sizes(kind: str, size: int) -> None:
    plain = tiny(kind)
    batch, rows = batches_of(plain)
    assert len(rows) == len(ROWS)
    model = streamed(plain, SimulatedDevice(), device_micro_batch_size=size, activation_checkpoints="host")
    for _ in range(2):
        require_same_step(model, plain, batch, rows)
