"""Updates of weights: what the engine asks of an optimizer for them, and those that are not done yet."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from horizon_lm.device.base import Device, Task
from horizon_lm.device.transfers import Move
from horizon_lm.errors import PartialUpdateError
from horizon_lm.schedule.ops import EMBED, Kind, Op, Stream


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

    @property
    def pending(self) -> bool:
        """Whether gradients have been applied, or are about to be, for a step that is not over."""
        ...

    def moves(self, unit: str, names: list[str], grads: torch.Tensor) -> Sequence[Move]:
        """The update of these parameters of a unit, whose gradient slab will be in ``grads``."""
        ...

    def table(self, grads: TableGrads) -> TableUpdate | None:
        """The update of the table; None if the optimizer does not have it."""
        ...


class PartialUpdate:
    """Whether some weights are new and some old, because an update failed inside a kernel."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def record(self, error: BaseException) -> None:
        """An update failed inside a kernel."""
        self.reason = f"{type(error).__name__}: {error}"

    def require_complete(self) -> None:
        """PartialUpdateError if an update failed half-way."""
        if self.reason is not None:
            raise PartialUpdateError(
                f"an optimizer update was not completed ({self.reason}), so some weights are new and some old. "
                "Load the model or a checkpoint again."
            )


class PendingUpdates:
    """Updates that may still be running, and the table's, which the next forward begins with its own rows.

    Attributes:
        table: what is left to do of the table; None if nothing is.
        torn: whether an update failed half-way. Pieces of updates have it, and nothing else of this.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._running: list[Task] = []
        self.table: TableUpdate | None = None
        self.partial_update = PartialUpdate()

    def add(self, tasks: Sequence[Task]) -> None:
        """These have been given to the device."""
        self._running += tasks

    def finish(self) -> None:
        """Block until every update is done, the table's included."""
        running, self._running = self._running, []
        self._device.wait(running)
        if self.table is not None:
            task = Task(Op(Kind.UPDATE, EMBED, Stream.HOST), [], self.table.rest())
            self._device.announce([task])
            self._device.issue(task)
            self._device.wait([task])
            self.table = None

    def wait(self, tasks: Sequence[Task]) -> None:
        """Block until the updates given so far are done, and those of these tasks that have been issued."""
        self._device.wait([*self._running, *(task for task in tasks if task.issued)])
