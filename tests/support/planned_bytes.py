"""Outline a tiny model, to plan its bytes on this machine."""

from typing import Any

import torch

from horizon_lm.cost.model_outline import outline_model
from horizon_lm.model.adapters import Adapters
from horizon_lm.model.source import ModelSource
from horizon_lm.planning.request import Machine

HERE = Machine("here", True, None)
LENGTH = 24


def outline_of(model: Any, trainable: str | None = None, adapters: Adapters | None = None) -> Any:
    """Return the outline of a config, without weights."""
    attention = model.config._attn_implementation
    return outline_model(ModelSource(model.config, "tiny", attn_implementation=attention), length=LENGTH, dtype=torch.float32, masked=True, trainable=trainable, adapters=adapters)  # fmt: skip
