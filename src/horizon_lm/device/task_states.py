"""The states of the tasks of a device with streams: enqueued, and then finished; failed; or dropped.

A task is enqueued once an event marks its end in a stream. Each change of a state wakes up the threads that wait for it.
"""

import threading
from collections.abc import Sequence
from typing import Protocol

from horizon_lm.device.base import Task
from horizon_lm.schedule.ops import Stream


class Event(Protocol):
    def query(self) -> bool:
        """Return whether the stream has reached the point where the event was recorded, without blocking."""
        ...

    def synchronize(self) -> None:
        """Block the host until the stream has reached the point at which the event was recorded."""
        ...


class TaskStates:
    """The states of tasks, changed by the threads that enqueue them and by the caller of the device."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        # The events that mark the ends of tasks not known to be finished, in the order in which the streams reach them.
        self._ends: dict[Stream, dict[Task, Event]] = {stream: {} for stream in Stream}
        self._failed: list[Task] = []

    def enqueued(self, task: Task, end: Event) -> None:
        """Record that a task was enqueued, and the event at its end. Mark earlier tasks of its stream that have ended as finished."""
        self.finish_reached(task.op.stream)
        with self._changed:
            self._ends[task.op.stream][task] = end
            self._changed.notify_all()

    def finish(self, task: Task) -> None:
        """Mark a task as finished."""
        with self._changed:
            task.finish()
            self._ends[task.op.stream].pop(task, None)
            self._changed.notify_all()

    def finish_reached(self, stream: Stream) -> None:
        """Mark the tasks that a stream has run as finished. It runs them in order, so the search ends at the first that has not ended."""
        while True:
            with self._changed:
                task, end = next(iter(self._ends[stream].items()), (None, None))
            if task is None or end is None or not end.query():
                return
            self.finish(task)

    def fail(self, task: Task, error: BaseException) -> None:
        """Keep the error of a task, which every wait for it raises until the task is dropped."""
        with self._changed:
            task.error = error
            self._failed.append(task)
            self._changed.notify_all()

    def drop(self, tasks: Sequence[Task]) -> None:
        """Mark tasks as dropped: nobody waits for them any longer."""
        with self._changed:
            for task in tasks:
                task.drop()
            self._changed.notify_all()

    def drop_failed(self) -> None:
        """Drop all tasks that have failed, also those of other passes, so that later passes do not raise their errors."""
        with self._changed:
            failed, self._failed = self._failed, []
        self.drop(failed)

    def is_finished(self, task: Task) -> bool:
        """Return whether a task has run to its end, or was dropped, without blocking."""
        end = self._ends[task.op.stream].get(task)
        return task.done or (end is not None and end.query())

    def error_of(self, stream: Stream) -> BaseException | None:
        """Return the error of the first task of a stream that has failed, or None."""
        return next((task.error for task in self._failed if task.op.stream == stream), None)

    def end_of(self, task: Task) -> Event | None:
        """Wait until a task is enqueued, and return the event that marks its end; None if it is done.

        Raises:
            BaseException: the error of the task, if it has failed and is not dropped.
        """
        ends = self._ends[task.op.stream]
        with self._changed:
            self._changed.wait_for(lambda: task.done or task in ends or task.error is not None)
            if task.error is not None and not task.done:
                # At every wait and not only at the first: the update that needs this gradient waits for it, and so does the
                # optimizer, later.
                raise task.error
            return None if task.done else ends[task]
