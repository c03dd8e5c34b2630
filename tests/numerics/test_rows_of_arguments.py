"""Arguments whose rows are cut into micro-batches: positions and masks, of all rows together or of each row."""

import copy
from typing import Any

import pytest
import torch

import horizon_lm
from tests.support.gradients import assert_close_gradients
from tests.support.tiny_models import batch, build

ROWS, LENGTH = 3, 11
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[None, None]  # (1, 1, T, T)


def masks_of_rows() -> torch.Tensor:
    """Return a mask (B, 1, T, T) in which a row hides tokens that the others see."""
    masks = CAUSAL.repeat(ROWS, 1, 1, 1)
    masks[1, 0, 4:, 3] = False
    return masks


def require_equal_step(streamed: Any, plain: Any, arguments: dict[str, Any]) -> None:
    ids = batch(ROWS, LENGTH, padding="none")["input_ids"]
    losses = []
    for model, options in ((plain, {"use_cache": False}), (streamed, {})):
        model.zero_grad()
        losses.append(model(input_ids=ids, labels=ids, **arguments, **options).loss)
        losses[-1].backward()
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-6, atol=1e-6)
    assert_close_gradients(streamed, plain)


@pytest.mark.parametrize("first_of_rows", [False, True])
@pytest.mark.parametrize("name", ["attention_mask", "position_ids"])
def test_one_for_all_rows_and_one_for_each(name: str, first_of_rows: bool) -> None:
    together, of_rows = {
        "attention_mask": (CAUSAL, masks_of_rows()),
        "position_ids": (torch.arange(LENGTH)[None], torch.arange(LENGTH) + 3 * torch.arange(ROWS)[:, None]),
    }[name]
    plain = build("llama")
    streamed = horizon_lm.stream(copy.deepcopy(plain), precision="float32", device_micro_batch_size=2)
    for value in (of_rows, together) if first_of_rows else (together, of_rows):
        require_equal_step(streamed, plain, {name: value})


def test_masks_by_kind_of_layer() -> None:
    plain = build("gemma3_text")
    streamed = horizon_lm.stream(copy.deepcopy(plain), precision="float32", device_micro_batch_size=2)
    masks = {"full_attention": masks_of_rows(), "sliding_attention": CAUSAL}
    require_equal_step(streamed, plain, {"attention_mask": masks})


@pytest.mark.parametrize("padded_first", [False, True])
def test_a_mask_that_only_padding_needs(padded_first: bool) -> None:
    """Blocks get a mask in one of two calls with the same arguments."""
    plain = build("llama")
    streamed = horizon_lm.stream(copy.deepcopy(plain), precision="float32", device_micro_batch_size=2)
    tokens = torch.ones(ROWS, LENGTH, dtype=torch.long)
    padded = tokens.clone()
    padded[1, 7:] = 0
    for mask in (padded, tokens) if padded_first else (tokens, padded):
        require_equal_step(streamed, plain, {"attention_mask": mask})
