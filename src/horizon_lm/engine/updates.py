"""Weight updates: the interface between engine and optimizer, and the updates that are still running."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from horizon_lm.device.base import Device, Task
from horizon_lm.device.transfers import Move
from horizon_lm.errors import PartialUpdateError, StreamingError
from horizon_lm.schedule.ops import EMBED, Kind, Op, Stream


class TableUpdate(Protocol):
    """The update of the embedding in one step. It can begin with the rows of the next batch; each row is updated once."""

    def rows(self, rows: torch.Tensor) -> Sequence[Move]:
        """Return the update of these rows."""
        ...

    def rest(self) -> Sequence[Move]:
        """Return the update of all rows that have not been updated yet when it runs."""
        ...


class TableGrads(NamedTuple):
    """Gradients of an embedding (V, H): of every row, or of ``rows`` (R, H) followed by one row of zeros."""

    grads: torch.Tensor
    rows: torch.Tensor | None


class UpdatesInBackward(Protocol):
    """An optimizer that updates each unit as soon as its gradient has landed."""

    def begin(self) -> None:
        """Begin a step when its backward pass begins, and fix its hyperparameters."""
        ...

    @property
    def pending(self) -> bool:
        """True while gradients of an unfinished step have been applied, or are about to be."""
        ...

    def moves(self, unit: str, names: list[str], grads: torch.Tensor) -> Sequence[Move]:
        """Return the update of these parameters of a unit, whose gradient slab will be in ``grads``."""
        ...

    def table(self, grads: TableGrads) -> TableUpdate | None:
        """Return the update of the embedding; None if the optimizer does not train it."""
        ...


class PartialUpdate:
    """Records that some weights are new and some old, because an update failed inside a kernel."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def record(self, error: BaseException) -> None:
        """Record the error with which an update failed."""
        self.reason = f"{type(error).__name__}: {error}"

    def require_complete(self) -> None:
        """Raise PartialUpdateError if an update failed half-way."""
        if self.reason is not None:
            raise PartialUpdateError(
                f"an optimizer update was not completed ({self.reason}), so some weights are new and some old. "
                "Load the model or a checkpoint again."
            )


class PendingUpdates:
    """Updates that may still be running, and the embedding's, whose rows for the next batch are updated first.

    Attributes:
        table: the part of the embedding's update that is still to be issued; None if there is none.
        partial_update: records an update that failed half-way. Pieces of updates refer to it, and to nothing else here.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._running: list[Task] = []
        self._in_backward: weakref.ref[UpdatesInBackward] | None = None  # weak, because it refers to the engine
        self.table: TableUpdate | None = None
        self.partial_update = PartialUpdate()

    @property
    def in_backward(self) -> UpdatesInBackward | None:
        """The optimizer that updates each unit when its gradient has landed; None if gradients are kept for a step."""
        if self._in_backward is None:
            return None
        optimizer = self._in_backward()
        if optimizer is None:
            raise StreamingError(
                "the optimizer with update_in_backward is gone, and gradients are not kept; load the model again"
            )
        return optimizer

    @in_backward.setter
    def in_backward(self, optimizer: UpdatesInBackward) -> None:
        self._in_backward = weakref.ref(optimizer)

    def add(self, tasks: Sequence[Task]) -> None:
        """Add updates that have been given to the device."""
        unfinished = (task for task in self._running if not task.done or task.error is not None)
        self._running = [*unfinished, *tasks]

    def finish(self) -> None:
        """Block until every update is done, the embedding's included."""
        if self._running:
            self._device.wait(self._running)
            failed = next((task.error for task in self._running if task.error is not None), None)
            if failed is not None:  # its moves have not run, so the weights are not yet those of the step
                raise failed
            self._running = []
        if self.table is not None:
            task = self._rest_of_table(self.table)
            self._device.announce([task])
            self._device.issue(task)
            self._device.wait([task])
            self.table = None

    def complete_without_device(self) -> None:
        """Run every update to its end in host threads, the embedding's last; `Device.give_up` stops everything else."""
        running = [*self._running, *(() if self.table is None else [self._rest_of_table(self.table)])]
        self._device.give_up(running)
        self._running, self.table = [], None

    @staticmethod
    def _rest_of_table(table: TableUpdate) -> Task:
        return Task(Op(Kind.UPDATE, EMBED, Stream.HOST), [], table.rest())

    def wait(self, tasks: Sequence[Task]) -> None:
        """Block until the added updates are done, and those of ``tasks`` that have been issued."""
        self._device.wait([*self._running, *(task for task in tasks if task.issued)])
