"""The arguments by which models take images, and the tokens that stand for them; transformers has no list of either."""

import inspect
from typing import Any

MARKS = ("token_type_ids", "mm_token_type_ids")
"""Arguments of models for the kind of each token, (B, T): text, or an image."""
_TOKENS = ("image_token_id", "image_token_index", "image_patch_id", "img_context_token_id")  # of configs


def takes_images(model: Any) -> bool:
    """Return whether a model's forward has an argument for images."""
    return "pixel_values" in inspect.signature(type(model).forward).parameters


def image_token(config: Any) -> int | None:
    """Return the token that stands for an image in a model's config; None if it names none."""
    return next((value for name in _TOKENS if isinstance(value := getattr(config, name, None), int)), None)
