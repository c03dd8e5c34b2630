"""Experts without tokens: zero gradients where torch's grouped product would leave them unwritten.

Shapes: S tokens sorted by expert, E experts, I and O the features of an expert's input and output.
"""

from typing import Any

import torch

_UNWRITTEN_SINCE = (10, 0)  # compute capability: B200, B300 and what may use their kernel; Hopper writes zeros


def zero_idle_experts(device: torch.device) -> None:
    """Make experts without tokens get zero gradients on this device, in all models of the process.

    On Blackwell, torch's grouped product leaves the weight gradient of an empty group as its memory was. Clearing costs a
    pass over the gradients of a block's experts, so other devices are left as they are.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _UNWRITTEN_SINCE:
        return
    from transformers.integrations import moe

    multiply = moe._grouped_mm
    if multiply.__module__ == __name__:  # done already
        return

    def multiply_and_clear(input: torch.Tensor, weight: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = multiply(input, _ClearIdle.apply(weight, offs), offs)
        return product

    moe._grouped_mm = multiply_and_clear


class _ClearIdle(torch.autograd.Function):
    """Return weight (E, I, O) as it is, and fill the gradients of experts without tokens with zeros."""

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(offsets)
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (offsets,) = ctx.saved_tensors
        idle = torch.diff(offsets, prepend=offsets.new_zeros(1)) == 0  # (E,)
        # In place, because only the grouped product has made this gradient, and a second one has no room in the plan.
        return grad.masked_fill_(idle[:, None, None], 0), None
