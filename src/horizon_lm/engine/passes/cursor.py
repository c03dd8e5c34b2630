"""The cursor: the position in the schedule of the running pass.

Autograd and the model's forward method drive the cursor. When they reach a computation, the cursor issues all
operations that the schedule lists before it, lets the computation run, and then issues the copies and updates up to the
next computation. The schedule lists the copy of block i+1 before the computation of block i, so weights are prefetched:
the host never decides when to copy, and does not wait for the end of a copy; `device.async_device` says what may hold it up.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from horizon_lm.common.units import Unit
from horizon_lm.device.base import Device, Task
from horizon_lm.device.transfers import Move
from horizon_lm.errors import ScheduleMismatchError
from horizon_lm.schedule.ops import After, Kind, LastUse, Op, Schedule, ScheduleError, Stream

MovesOf = Callable[[Op], Sequence[Move] | None]


class Cursor:
    """The position in the running pass, with the tasks of earlier passes that a new pass may have to wait for.

    One thread uses it at a time: that of the model's forward method, and then the one in which autograd runs the nodes.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last_use: dict[LastUse, Task] = {}  # the last task that reads or writes a buffer, across passes
        self._tasks: list[Task] = []  # tasks of the running pass, in order
        self._position = 0  # position of the first task that is neither issued nor computed
        self._has_computed = False  # True once the running pass has reached a computation
        self.schedule: Schedule | None = None

    @property
    def active(self) -> bool:
        """True while a pass is running."""
        return self.schedule is not None

    def start(self, schedule: Schedule, moves_of: MovesOf) -> None:
        """Begin a pass.

        Args:
            schedule: the operations of the pass and their waits.
            moves_of: function that returns the data movements of an operation; None if they are known only later (see
                `bind`).
        """
        assert self.schedule is None, f"{self.schedule} is still running"
        tasks: list[Task] = []
        for op in schedule.ops:
            # A wait names an earlier operation of this pass, or the last use of a buffer in any pass before.
            awaited = [tasks[w.index] if isinstance(w, After) else self._last_use.get(w) for w in op.waits]
            moves = None if op.stream == Stream.COMPUTE else moves_of(op)
            tasks.append(Task(op, [t for t in awaited if t is not None and not t.done], moves))
        # Recorded after all waits are found: a wait for the last use means that of an earlier pass.
        for task, uses in zip(tasks, schedule.uses, strict=True):
            self._last_use.update(dict.fromkeys(uses, task))
        self.schedule, self._tasks, self._position, self._has_computed = schedule, tasks, 0, False
        self._device.announce(tasks)

    def bind(self, kind: Kind, unit: Unit, moves: Sequence[Move]) -> Task:
        """Set the data movements of an operation, once they are known."""
        assert self.schedule is not None
        task = self._tasks[self.schedule.positions[kind, unit]]
        task.moves = moves
        return task

    @contextmanager
    def compute(self, kind: Kind, unit: Unit) -> Iterator[None]:
        """Context manager: run a computation if it is next in the schedule; raise ScheduleMismatchError otherwise."""
        index = self._advance_to(kind, unit)
        task = self._tasks[index]
        self._device.begin(task)  # orders the computation behind the copies it waits for
        # No `finally`: after an error the engine abandons the pass, and cancels what is left from here on.
        yield
        self._device.end(task)
        self._position = index + 1
        self._issue_copies()

    def has(self, kind: Kind, unit: Unit) -> bool:
        """Return whether the running pass has an operation."""
        return self.schedule is not None and (kind, unit) in self.schedule.positions

    def is_past(self, kind: Kind, unit: Unit) -> bool:
        """Return whether the running pass is beyond a computation; False if it does not have that computation."""
        schedule = self.schedule
        return schedule is not None and schedule.positions.get((kind, unit), self._position) < self._position

    def tasks_of(self, kind: Kind) -> list[Task]:
        """Return the tasks of the running pass of this kind, in order; none between passes."""
        return [t for t in self._tasks if t.op.kind == kind]

    def unfinished(self) -> list[Task]:
        """Return the tasks that were issued and are not done, and the computation that is next. Any thread may call this."""
        # Read once, because the thread that trains goes on meanwhile and replaces both.
        position, tasks = self._position, self._tasks
        issued = {id(t): t for t in [*self._last_use.copy().values(), *tasks] if t.issued and not t.done}
        return [*issued.values(), *(t for t in tasks[position : position + 1] if not t.issued and not t.done)]

    def describe_unfinished(self) -> list[str]:
        """Describe the operations that were begun and are not finished, with stream and thread. Any thread may call this."""
        finished = self._device.is_finished
        return [_describe(task, finished) for task in self.unfinished() if not finished(task)]

    def describe_progress(self) -> str:
        """Describe how far the running pass is; empty between passes. Any thread may call this."""
        position, schedule = self._position, self.schedule
        if schedule is None:
            return ""
        # By block, the position of its last computation: a backward pass may also round the gradients, for example.
        last = {op.unit: i for i, op in enumerate(schedule.ops) if op.stream == Stream.COMPUTE and op.unit.is_block}
        done = sum(each < position for each in last.values())
        return f"{schedule.name}, {done} of {len(last)} blocks" if last else schedule.name

    def update_begun(self) -> bool:
        """Return whether the running pass has issued an update."""
        return any(t.issued for t in self.tasks_of(Kind.UPDATE))

    def finish(self) -> None:
        """End the pass, and drain the device if computations were left out."""
        self._issue_copies()
        left_out = self._tasks[self._position :]
        # Waits across passes are proven for passes that are complete. After one that is not, nothing may be running.
        if left_out:
            self._device.cancel(left_out)
            self._device.synchronize()
        self._end()

    def abandon(self) -> None:
        """Cancel the remaining work of the running pass, except updates that have been issued, which must be completed."""
        if self.active:
            try:
                # UPDATE_ROWS may be cancelled: the table remembers the rows that are done. So may ADVANCE: the update is recorded as
                # partial then.
                self._device.cancel(
                    [t for t in self._tasks if not t.done and not (t.issued and t.op.kind == Kind.UPDATE)]
                )
            finally:
                self._end()

    def drop(self) -> None:
        """End the running pass, and forget all earlier ones. The device has failed, and is not asked."""
        self._end()
        self.forget()

    def forget(self) -> None:
        """Forget the tasks of earlier passes, which are all finished, so that their buffers can be freed."""
        self._last_use.clear()

    def _end(self) -> None:
        self.schedule, self._tasks = None, []

    def _advance_to(self, kind: Kind, unit: Unit) -> int:
        """Issue everything before a computation, and return its position; raise ScheduleMismatchError if it may not come next."""
        wanted = f"{kind} {unit}"
        # -1, which is before every position, if no pass is running or the schedule does not have it.
        index = self.schedule.positions.get((kind, unit), -1) if self.schedule is not None else -1
        if index < self._position:
            expected = next((str(t.op) for t in self._tasks[self._position :]), "the end of the pass")
            raise ScheduleMismatchError(expected, wanted)
        skipped = [t.op for t in self._tasks[self._position : index] if t.op.stream == Stream.COMPUTE]
        if skipped:
            self._skip(skipped, index, wanted)
        self._has_computed = True
        self._issue_copies(up_to=index)
        if self._position < index:
            raise ScheduleError(f"{self._tasks[self._position].op} is before {wanted}, but what it moves is not known")
        return index

    def _skip(self, skipped: list[Op], index: int, wanted: str) -> None:
        """Cancel the operations of units whose computations are left out. Raise ScheduleMismatchError if the schedule does not allow it."""
        units, schedule = {op.unit for op in skipped}, self.schedule
        assert schedule is not None
        if not (units <= schedule.optional or (schedule.begins_anywhere and not self._has_computed)):
            raise ScheduleMismatchError(str(skipped[0]), wanted)
        # Only operations of these units: copies for the wanted computation may stand between them.
        self._device.cancel([t for t in self._tasks[self._position : index] if t.op.unit in units])

    def _issue_copies(self, up_to: int | None = None) -> None:
        """Issue tasks from this position on. Stop at the next computation, at a task whose movements are not known yet, or at ``up_to``."""
        stop = len(self._tasks) if up_to is None else up_to
        while self._position < stop:
            task = self._tasks[self._position]
            if not task.done:
                # Later copies must not overtake one that is not bound yet.
                if task.op.stream == Stream.COMPUTE or task.moves is None:
                    return
                self._device.issue(task)
            self._position += 1


def _describe(task: Task, finished: Callable[[Task], bool]) -> str:
    thread = "the thread of the training" if task.op.stream == Stream.COMPUTE else f"a thread horizon-{task.op.stream}"
    waits = ", ".join(f"{each.op} ({each.op.stream})" for each in task.waits if not finished(each))
    return f"{task.op} on stream {task.op.stream}, {thread}" + (f", which waits for {waits}" if waits else "")
