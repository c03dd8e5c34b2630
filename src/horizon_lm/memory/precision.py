"""Storage modes of parameters in host memory, and the split of an fp32 master into two halves."""

from dataclasses import dataclass, replace

import torch

from horizon_lm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Precision:
    """A storage mode.

    Attributes:
        name: value of the setting ``precision``.
        weight_dtype: dtype of the streamed weights, which `model.parameters()` shows.
        grad_dtype: dtype of the gradient store.
        low_half: a second slab holds 16 more bits, which make the weight an exact fp32 master.
    """

    name: str
    weight_dtype: torch.dtype
    grad_dtype: torch.dtype
    low_half: bool


PRECISIONS = {
    mode.name: mode
    for mode in (
        Precision("float32", torch.float32, torch.float32, low_half=False),
        Precision("bf16", torch.bfloat16, torch.bfloat16, low_half=False),
        Precision("fp32_master", torch.bfloat16, torch.bfloat16, low_half=True),
    )
}


def get_precision(name: str, grad_dtype: torch.dtype | None = None) -> Precision:
    """Return the mode of that name, with another gradient dtype if one is given; raise ConfigError if either is not supported."""
    if name not in PRECISIONS:
        raise ConfigError(f"precision {name!r} is not known; choose one of {', '.join(PRECISIONS)}")
    if grad_dtype not in (None, torch.bfloat16, torch.float32):
        raise ConfigError(f"grad_dtype is {grad_dtype}; choose torch.bfloat16 or torch.float32, or None")
    mode = PRECISIONS[name]
    return mode if grad_dtype is None else replace(mode, grad_dtype=grad_dtype)


def split_master(master: torch.Tensor, high: torch.Tensor, low: torch.Tensor) -> None:
    """Write fp32 ``master`` as a bf16 ``high`` half and 16 ``low`` bits (int16), all of one shape.

    ``high`` is the nearest bf16 value, ties away from zero, because one signed addition undoes this rounding:
    ``master_bits == (high_bits << 16) + low``. NaN stays NaN, both in ``high`` and after joining, but with other bits.
    """
    bits, halves = master.view(torch.int32), high.view(torch.int16)
    halves.copy_((bits + 0x8000).bitwise_right_shift_(16))
    low.copy_(bits)  # int32 -> int16 keeps the low 16 bits
    is_nan = master.isnan()
    if is_nan.any():  # rounding may have made them 0 or infinity
        halves[is_nan] |= 0x7FC0


def join_master(high: torch.Tensor, low: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Join the halves written by `split_master` to the fp32 master, bit for bit."""
    bits = high.view(torch.int16).to(torch.int32).bitwise_left_shift_(16).add_(low)
    return bits.view(torch.float32) if out is None else out.copy_(bits.view(torch.float32))
