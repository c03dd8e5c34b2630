"""The writing of a checkpoint, as a pass of operations that later updates wait for."""

from collections.abc import Mapping, Sequence

from horizon_lm.common.units import EMBED, Unit
from horizon_lm.device.base import Device, Task
from horizon_lm.device.transfers import Move
from horizon_lm.engine.host.updates import PendingUpdates, RunningSave
from horizon_lm.engine.passes.cursor import Cursor, MovesOf
from horizon_lm.schedule import between
from horizon_lm.schedule.build import Layout
from horizon_lm.schedule.ops import Kind, Schedule


class Saves:
    """The operations that write a checkpoint. Other code must not write weights before they are done.

    Attributes:
        running: the checkpoint that is being written.
    """

    def __init__(self, cursor: Cursor, updates: PendingUpdates, device: Device) -> None:
        self._cursor, self._updates, self._device = cursor, updates, device
        self._tasks: list[Task] = []
        self._table: tuple[Schedule, Sequence[Move]] | None = None  # the embedding's part, if that was not issued yet
        self.running: RunningSave | None = None

    def run(self, moves: Mapping[Unit, Sequence[Move]], layout: Layout) -> list[Task]:
        """Issue the pass that writes a checkpoint. Later updates of a unit wait for its task.

        The embedding is written after the next forward pass if its update is left to that pass.

        Args:
            moves: the moves that write each unit's slabs.
            layout: the properties that determine the model's schedules.

        Returns:
            The tasks; that of the embedding is added later.
        """
        self._tasks, self._table = [], None
        units = set(moves)
        if self._updates.table is not None:
            self._table = between.save_table(layout), moves[EMBED]
            units.remove(EMBED)
        self._issue(between.save(layout, units), lambda op: moves[op.unit])
        return self._tasks

    def _issue(self, schedule: Schedule, moves_of: MovesOf) -> None:
        """Issue a pass of save operations, and keep its tasks for `wait`."""
        # What was begun before an interrupt must be waited for, too: other code may write the weights after `wait`.
        try:
            self._cursor.start(schedule, moves_of)
        finally:
            self._tasks += self._cursor.tasks_of(Kind.SAVE)
        self._cursor.finish()

    def issue_table(self) -> None:
        """Issue the writing of the embedding, whose update is issued, if a checkpoint lacks it."""
        table, self._table = self._table, None
        if table is not None:
            schedule, moves = table
            self._issue(schedule, lambda op: moves)

    def finish_issuing(self) -> None:
        """Wait for all updates, and issue the writing of the embedding, if a checkpoint lacks it. A running pass does this at its end."""
        if self._table is not None and not self._cursor.active:
            self._updates.finish()
            self.issue_table()

    def wait(self) -> None:
        """Block until no checkpoint is being written."""
        self.finish_issuing()
        if self._tasks:
            self._device.wait(self._tasks)
            self._tasks = []

    def drop(self) -> None:
        """Forget the checkpoint that was being written when the device failed."""
        self._tasks, self._table, self.running = [], None, None
