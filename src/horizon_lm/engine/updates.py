"""What the engine asks of an optimizer whose updates it runs."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from horizon_lm.device.moves import Move


class TableUpdate(Protocol):
    """One step's update of the embedding table, of which a batch's rows can come first. Every row is updated once."""

    def rows(self, rows: torch.Tensor) -> Sequence[Move]:
        """The update of these rows."""
        ...

    def rest(self) -> Sequence[Move]:
        """The update of all rows that are left when it runs."""
        ...


class TableGrads(NamedTuple):
    """Gradients of a table (V, H): all of them, or of ``rows`` only, followed by one row of zeros."""

    grads: torch.Tensor
    rows: torch.Tensor | None


class UpdatesInBackward(Protocol):
    """An optimizer that updates each unit as soon as its gradient has landed."""

    def begin(self) -> None:
        """A backward begins: the hyperparameters of now are those of its step."""
        ...

    def moves(self, unit: str, grads: torch.Tensor) -> Sequence[Move]:
        """The update of a unit, whose gradient slab will be in ``grads``."""
        ...

    def table(self, grads: TableGrads) -> TableUpdate | None:
        """The update of the table; None if the optimizer does not have it."""
        ...
