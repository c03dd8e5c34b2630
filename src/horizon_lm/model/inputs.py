"""What a model's forward is given besides text."""

import re
from collections.abc import Mapping
from typing import Any

import torch

_MODAL = re.compile("pixel|image|video|audio|speech|visual|vision|patch|feature")


def modal_inputs(call: Mapping[str, Any]) -> list[str]:
    """Return the names of a forward's arguments that hold images, video or audio."""
    return [name for name, value in call.items() if isinstance(value, torch.Tensor) and _MODAL.search(name)]
