"""Weight updates: the interface between engine and optimizer, and the updates that are still running."""

import weakref
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from horizon_lm.common.units import EMBED
from horizon_lm.device.base import Device, Task
from horizon_lm.device.transfers import Move
from horizon_lm.errors import PartialUpdateError, StreamingError
from horizon_lm.memory.unit_slabs import Slab
from horizon_lm.schedule.ops import Kind, Op, Stream


class TableUpdate(Protocol):
    """The embedding's update in one step. It can begin with the rows of the next batch; each row is updated once."""

    def rows(self, rows: torch.Tensor) -> Sequence[Move]:
        """Return the update of these rows."""
        ...

    def rest(self) -> Sequence[Move]:
        """Return the update of the rows that are not yet updated when it runs."""
        ...


class TableGrads(NamedTuple):
    """Gradients of an embedding (V, H): of every row, or of ``rows`` (R, H) followed by one row of zeros."""

    grads: torch.Tensor
    rows: torch.Tensor | None


class UnitOptimizer(Protocol):
    """An optimizer that updates each unit as soon as its gradient has landed."""

    def begin(self) -> None:
        """Begin a step when its backward pass begins, and fix its hyperparameters."""
        ...

    @property
    def pending(self) -> bool:
        """True while gradients of an unfinished step have been applied, or are about to be applied."""
        ...

    def moves(self, slab: Slab, names: list[str], grads: torch.Tensor) -> Sequence[Move]:
        """Return the update of these parameters of a slab. Their gradients, of the part that this rank owns, will be
        in ``grads``.
        """
        ...

    def table(self, grads: TableGrads) -> TableUpdate | None:
        """Return the update of the embedding, or None if the optimizer does not train it."""
        ...


class RunningSave(Protocol):
    """A checkpoint that is being written, as the engine knows it."""

    def abandon(self, error: BaseException) -> None:
        """Stop writing soon, because of this error, before updates change the weights that are being written."""
        ...

    def discard(self) -> None:
        """Remove the files that were written."""
        ...


class PartialUpdate:
    """A record that some weights are updated and some are not, because an update failed inside a kernel."""

    def __init__(self) -> None:
        self.reason: str | None = None

    def record(self, error: BaseException) -> None:
        """Record the error with which an update failed."""
        self.reason = f"{type(error).__name__}: {error}"

    def fail(self, error: BaseException) -> None:
        """Record the error of an update, and raise PartialUpdateError."""
        self.record(error)
        self.require_complete()

    def require_complete(self) -> None:
        """Raise PartialUpdateError if an update failed after it had begun."""
        if self.reason is not None:
            raise PartialUpdateError(
                f"an optimizer update was not completed ({self.reason}), so some weights are new and some old. "
                "Load the model or a checkpoint again."
            )


class PendingUpdates:
    """The updates that are running, and the update of the embedding, which a forward pass begins.

    The embedding is updated in the next forward pass: first the rows that this pass reads, which it alone knows, then the others. Until
    then its update is kept here; code that needs all weights earlier runs it as a whole (`finish`).

    Attributes:
        table: the embedding's update, until a forward pass has issued all of it; None if there is none.
        partial_update: the record of an update that failed after it had begun. Pieces of updates refer only to this
            record.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._running: list[Task] = []
        self._optimizer_in_backward: weakref.ref[UnitOptimizer] | None = None  # weak, because it refers to the engine
        self.table: TableUpdate | None = None
        self.partial_update = PartialUpdate()

    @property
    def optimizer_in_backward(self) -> UnitOptimizer | None:
        """The optimizer that updates each unit when its gradient has landed; None if gradients are kept for a step."""
        if self._optimizer_in_backward is None:
            return None
        optimizer = self._optimizer_in_backward()
        if optimizer is None:
            raise StreamingError(
                "the optimizer with update_in_backward is gone, and gradients are not kept; load the model again"
            )
        return optimizer

    @optimizer_in_backward.setter
    def optimizer_in_backward(self, optimizer: UnitOptimizer) -> None:
        self._optimizer_in_backward = weakref.ref(optimizer)

    def add(self, tasks: Sequence[Task]) -> None:
        """Add the updates of a pass, all of which are given to the device when it ends."""
        # Finished tasks are dropped, or their pieces would pile up; failed ones stay, for `finish` to raise their errors.
        unfinished = (task for task in self._running if not task.done or task.error is not None)
        self._running = [*unfinished, *tasks]

    def finish(self) -> None:
        """Run the rest of the embedding's update, and block until every update is done. Raise the error of one that could not begin."""
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

    def need_device(self) -> bool:
        """Return whether a running update still waits for matrices from the device. The device, which may have failed, is not asked."""
        waits = [wait for task in self._running if not task.finished for wait in task.waits]
        return any(wait.op.kind == Kind.RETURN_MATRICES and not wait.finished for wait in waits)

    def complete_without_device(self) -> None:
        """Run every update to its end in host threads, the embedding's last; `Device.give_up` stops everything else."""
        running = [*self._running, *(() if self.table is None else [self._rest_of_table(self.table)])]
        self._device.give_up(running)
        self._running, self.table = [], None

    @staticmethod
    def _rest_of_table(table: TableUpdate) -> Task:
        """Return the task of the rest of the embedding's update. It has no waits: it runs between passes, after all other updates."""
        return Task(Op(Kind.UPDATE, EMBED, Stream.HOST), [], table.rest())

    def wait(self, tasks: Sequence[Task]) -> None:
        """Block until the added updates are done, and also the updates in ``tasks`` that have been issued."""
        # Waiting for a task that is not issued would never end: the thread that issues it is the one that waits.
        self._device.wait([*self._running, *(task for task in tasks if task.issued)])
