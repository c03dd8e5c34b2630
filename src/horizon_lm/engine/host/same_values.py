"""Compare two tensors that may be the same values."""

import torch

_AT_ONCE = 1 << 22  # elements that are compared at once


def is_same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are the same view of the same memory."""
    return (
        one.data_ptr() == other.data_ptr()
        and one.dtype == other.dtype
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.device == other.device
    )


def is_wider_copy(value: torch.Tensor, present: torch.Tensor) -> bool:
    """Return whether a tensor has the present values, on the host, in float32 instead of fewer bits."""
    widens = value.dtype == torch.float32 and present.dtype.itemsize < value.dtype.itemsize
    if not widens or value.shape != present.shape or value.device != present.device:
        return False
    pairs = zip(value.reshape(-1).split(_AT_ONCE), present.reshape(-1).split(_AT_ONCE), strict=True)
    return all(torch.equal(each, other.to(each.dtype)) for each, other in pairs)
