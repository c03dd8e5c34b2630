"""The GPUs that have kernels for products in FP8 with a scale for each row."""

import torch

from horizon_lm.errors import ConfigError
from horizon_lm.model.float8.requirements import CAPABILITY, LEAVE_OUT, NEEDS_BFLOAT16, needs_capability


def require_float8(device: torch.device | None, compute_dtype: torch.dtype) -> None:
    """Raise ConfigError if a GPU has no products in FP8, or if weights are not in bfloat16 there.

    Args:
        device: the GPU; None if there is none, which is an error of its own.
        compute_dtype: dtype of weights on the device.
    """
    if device is None:
        return
    if compute_dtype != torch.bfloat16:
        raise ConfigError(NEEDS_BFLOAT16)
    name = torch.cuda.get_device_properties(device).name
    if torch.version.hip is not None:
        raise ConfigError(f"products: float8 was written for NVIDIA's GPUs, and {name} is none; {LEAVE_OUT}")
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY:
        raise ConfigError(needs_capability(name, ".".join(map(str, capability))))
