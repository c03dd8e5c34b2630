"""Reject weights that are not finite."""

import torch

from horizon_lm.errors import ConfigError

_CHUNK = 1 << 22  # elements per chunk when counting non-finite values


def require_finite(name: str, tensor: torch.Tensor, place: object) -> None:
    """Raise ConfigError, naming ``place``, if a weight has NaN or infinite values; check it in one pass
    without copies.
    """
    if not tensor.numel() or all(bound.isfinite() for bound in torch.aminmax(tensor)):  # aminmax propagates NaN
        return
    number = sum(int((~part.isfinite()).sum()) for part in tensor.reshape(-1).split(_CHUNK))
    raise ConfigError(
        f"{name} has {number:,} NaN or infinite values of {tensor.numel():,} in {place}, which training would spread; "
        "download it again, or use an earlier checkpoint"
    )
