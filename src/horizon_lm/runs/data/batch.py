"""The rows of one step as tensors, which losses read. This needs torch alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """The sequences of one step, padded on the right to the longest, as int64 tensors (B, T).

    A batch of preferences has all chosen answers first, then all rejected ones in the same order.

    Attributes:
        input_ids: token ids, 0 in the padding.
        attention_mask: 1 for tokens and 0 for padding; None for packed rows.
        position_ids: positions that restart with each packed row and with the padding; None for other rows.
        labels: token ids of the targets, `IGNORE_INDEX` elsewhere.
        num_trained: number of targets; the loss of a step is the mean over them. For a user's loss function on one of several
            ranks, it is the step's number times ``share`` (`horizon_lm.runs.objective.base`).
        num_tokens: number of tokens without padding.
        rows: indices of the rows in their dataset.
        places: origins of the rows, for messages; empty for a stand-in.
        share: share of the step's rows that this batch has, if the step is dealt to several ranks; 0 for a stand-in.
        num_trained_of_step, places_of_step: number of targets and origins of all rows of such a step.
        image_inputs: arguments of the model for the images of the rows, in the order of the sequences, such as ``pixel_values``.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    labels: torch.Tensor
    num_trained: float
    num_tokens: int
    rows: tuple[int, ...]
    places: tuple[str, ...]
    share: float = 1.0
    num_trained_of_step: int | None = None
    places_of_step: tuple[str, ...] = ()
    image_inputs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_stand_in(self) -> bool:
        """True for a row that does not count, computed by a rank that got no rows of the step."""
        return not self.places

    @property
    def normalizer(self) -> float:
        """The number of targets by which the sum of a step's losses is divided."""
        return self.num_trained if self.num_trained_of_step is None else max(1, self.num_trained_of_step)

    @property
    def all_places(self) -> tuple[str, ...]:
        """The origins of all rows of the step, also of the rows of other ranks."""
        return self.places_of_step or self.places

    def inputs(self) -> dict[str, Any]:
        """Return the arguments of the model, without the labels."""
        arguments = {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "position_ids": self.position_ids,
        }
        return {name: tensor for name, tensor in arguments.items() if tensor is not None} | dict(self.image_inputs)
