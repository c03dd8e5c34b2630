"""Tiny models with a tower, and batches with and without images."""

import copy
from typing import Any

import pytest
import torch
import transformers

import horizon_lm
from horizon_lm.model.proven import _table
from tests.census.tiny_models import CannotBuildError, build
from tests.support.gradients import without_dropout

# One tower before the embedding and after it, outputs of several blocks, or not of the last one, two towers, and audio.
KINDS = (
    "llava",
    "gemma3",
    "qwen2_5_vl",
    "qwen3_vl",
    "vipllava",
    "deepseek_vl_hybrid",
    "ovis2",
    "granite4_vision",
    "video_llava",
)


def tiny(kind: str, **overrides: Any) -> Any:
    """Return a model with random weights; skip the test if a version of transformers other than that of the census cannot build it."""
    try:
        return without_dropout(build(kind, "image_text", **overrides)).train()
    except (CannotBuildError, KeyError):
        if transformers.__version__ == _table()["transformers"]:
            raise
        pytest.skip(f"transformers {transformers.__version__} does not build {kind}")


def text_batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 60, (2, 7), generator=torch.Generator().manual_seed(7))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def streamed(model: Any, device: Any = "cpu", **settings: Any) -> Any:
    """The head is computed as a whole, because chunks sum the gradient of the norm before it in another order."""
    defaults = {"precision": "float32", "head": "whole", "check_recompute": True}
    return horizon_lm.stream(copy.deepcopy(model), device, **defaults | settings).train()
