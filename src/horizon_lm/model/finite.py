"""Weights that are NaN or infinite."""

import torch

from horizon_lm.errors import ConfigError

_CHUNK = 1 << 22  # elements looked at at once, once it is known that some are not finite


def require_finite(name: str, tensor: torch.Tensor, place: object) -> None:
    """Check a tensor of weights in one pass without copies; ConfigError with ``place``, where it was read."""
    if not tensor.numel() or all(bound.isfinite() for bound in torch.aminmax(tensor)):  # NaN is passed on by both
        return
    number = sum(int((~part.isfinite()).sum()) for part in tensor.reshape(-1).split(_CHUNK))
    raise ConfigError(
        f"{name} has {number:,} NaN or infinite values of {tensor.numel():,} in {place}, and training would spread them; "
        "download it again, or take a checkpoint from before they came"
    )
