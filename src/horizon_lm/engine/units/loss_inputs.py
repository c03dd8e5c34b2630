"""The inputs of a batch's loss: labels, the positions that are trained, and the divisor."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from horizon_lm.common.constants import IGNORE_INDEX
from horizon_lm.device.base import send


@dataclass(slots=True)
class LossInputs:
    """The inputs of a batch's loss, except for hidden states.

    Attributes:
        labels: the target of each hidden state, shape (B, T): already shifted by one.
        trained: positions of the labels that are not ignored, in the flattened labels; shape (trained tokens,).
        num_items: the divisor of the sum over tokens.
    """

    labels: torch.Tensor
    trained: torch.Tensor
    num_items: torch.Tensor | int

    @classmethod
    def of(cls, call: dict[str, Any], device: torch.device) -> "LossInputs":
        """Remove ``labels`` or ``shift_labels`` (B, T) and ``num_items_in_batch`` from the arguments of a call. Return the loss inputs.

        The trained positions are found before labels are copied to the device, where the host would have to wait for
        their number. The results are on the device.
        """
        labels, shifted = call.pop("labels", None), call.pop("shift_labels", None)
        if shifted is None:
            # (B, T): the last token of a row has no target.
            shifted = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
        trained = (shifted.reshape(-1) != IGNORE_INDEX).nonzero().squeeze(1)
        num_items = call.pop("num_items_in_batch", None)
        # Without a number, the mean over the targets of this batch, as in transformers.
        num_items = len(trained) if num_items is None else num_items
        if isinstance(num_items, torch.Tensor):
            num_items = send(num_items, device)
        return cls(send(shifted, device), send(trained, device), num_items)
