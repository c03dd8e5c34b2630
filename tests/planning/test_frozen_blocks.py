"""The memory and the work of blocks of which only some are trained."""

import torch

from horizon_lm.model.source import ModelSource
from horizon_lm.planning.arithmetic.outline import ModelOutline
from horizon_lm.planning.measure.model_outline import outline_model
from tests.support import tiny_models


def outline(trainable: str | None) -> ModelOutline:
    config = tiny_models.build("llama").config
    source = ModelSource(config, "tiny", attn_implementation=config._attn_implementation)
    return outline_model(source, length=32, dtype=torch.bfloat16, trainable=trainable)


def test_a_trained_block_takes_as_much_beside_frozen_ones() -> None:
    """The graph of a frozen block lacks the inputs of its products with weights, and it computes no gradients of weights."""
    trained, last_two = outline(None), outline("layers.1.*|layers.2.*")
    assert last_two.first_differentiated == 1
    assert last_two.footprints(rows=1)[1:] == trained.footprints(rows=1)[1:]
    assert last_two.kind(1).backward == trained.kind(1).backward
    assert last_two.footprints(rows=1)[0].graph < trained.footprints(rows=1)[0].graph
