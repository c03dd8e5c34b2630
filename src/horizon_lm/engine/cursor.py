"""The engine's place in the schedule.

Autograd and the model's forward drive: when they reach a computation, the cursor issues everything that stands before
it in the pass, hands the computation to the device, and issues what follows up to the next computation.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from horizon_lm.device.base import Device, Task
from horizon_lm.device.transfers import Move
from horizon_lm.errors import ScheduleMismatchError
from horizon_lm.schedule.ops import After, Kind, LastUse, Op, Pass, Stream, is_block

MovesOf = Callable[[Op], Sequence[Move] | None]


class Cursor:
    """Runs one pass at a time and remembers which tasks of earlier passes a new one may have to wait for."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._last_use: dict[LastUse, Task] = {}
        self._tasks: list[Task] = []
        self._position = 0
        self._reached_any = False
        self.schedule: Pass | None = None

    @property
    def active(self) -> bool:
        return self.schedule is not None

    def start(self, schedule: Pass, moves_of: MovesOf) -> None:
        """Begin a pass. ``moves_of`` gives what an operation moves, or None if that is known only later (`bind`)."""
        assert self.schedule is None, f"{self.schedule} is still running"
        tasks: list[Task] = []
        for op in schedule.ops:
            found = [tasks[w.index] if isinstance(w, After) else self._last_use.get(w) for w in op.waits]
            moves = None if op.stream == Stream.COMPUTE else moves_of(op)
            tasks.append(Task(op, [t for t in found if t is not None and not t.done], moves))
        for task, uses in zip(tasks, schedule.uses, strict=True):
            self._last_use.update(dict.fromkeys(uses, task))
        self.schedule, self._tasks, self._position, self._reached_any = schedule, tasks, 0, False
        self._device.announce(tasks)

    def bind(self, kind: Kind, unit: str, moves: Sequence[Move]) -> Task:
        """Tell what a task moves, once it is known."""
        assert self.schedule is not None
        task = self._tasks[self.schedule.positions[kind, unit]]
        task.moves = moves
        return task

    @contextmanager
    def compute(self, kind: Kind, unit: str) -> Iterator[None]:
        """The caller computes ``kind`` of ``unit`` inside. ScheduleMismatchError if it is not its turn."""
        index = self._advance_to(kind, unit)
        task = self._tasks[index]
        self._device.begin(task)
        yield
        self._device.end(task)
        self._position = index + 1
        self._issue_copies()

    def landing_tasks(self) -> list[Task]:
        """Tasks of the running pass that bring gradients to the host."""
        return [t for t in self._tasks if t.op.kind == Kind.STREAM_OUT]

    def update_tasks(self) -> list[Task]:
        """Tasks of the running pass that update weights."""
        return [t for t in self._tasks if t.op.kind == Kind.UPDATE]

    def update_begun(self) -> bool:
        """Whether the running pass has given an update to the device."""
        return any(t.issued for t in self._tasks if t.op.kind == Kind.UPDATE)

    def finish(self) -> bool:
        """End the pass. False if computations were left out, in which case the device has been drained."""
        self._issue_copies()
        left = self._tasks[self._position :]
        if left:
            self._device.cancel(left)
            self._device.synchronize()
        self._end()
        return not left

    def abandon(self) -> None:
        """Drop whatever the running pass has not done, and leave the device idle but for updates."""
        if self.active:
            self._device.cancel([t for t in self._tasks if not t.done and not (t.issued and t.op.kind == Kind.UPDATE)])
            self._end()

    def forget(self) -> None:
        """Everything is finished: nobody has to wait for earlier passes, nor keep their buffers alive."""
        self._last_use.clear()

    def _end(self) -> None:
        self.schedule, self._tasks = None, []

    def _advance_to(self, kind: Kind, unit: str) -> int:
        wanted = f"{kind} {unit}"
        index = self.schedule.positions.get((kind, unit), -1) if self.schedule is not None else -1
        if index < self._position:
            expected = next((str(t.op) for t in self._tasks[self._position :]), "the end of the pass")
            raise ScheduleMismatchError(expected, wanted)
        skipped = [t.op for t in self._tasks[self._position : index] if t.op.stream == Stream.COMPUTE]
        if skipped:
            self._skip(skipped, index, wanted)
        self._reached_any = True
        self._issue_copies(up_to=index)
        return index

    def _skip(self, skipped: list[Op], index: int, wanted: str) -> None:
        """A backward may start below the head, and leave out units whose gradient nobody asked for at its end."""
        blocks_left_out = self._reached_any and any(is_block(op.unit) for op in skipped)
        if skipped[0].kind == Kind.FORWARD or blocks_left_out:
            raise ScheduleMismatchError(str(skipped[0]), wanted)
        units = {op.unit for op in skipped}
        self._device.cancel([t for t in self._tasks[self._position : index] if t.op.unit in units])

    def _issue_copies(self, up_to: int | None = None) -> None:
        """Issue tasks from the present position on, as far as the next computation or unknown contents."""
        stop = len(self._tasks) if up_to is None else up_to
        while self._position < stop:
            task = self._tasks[self._position]
            if task.op.stream == Stream.COMPUTE and not task.done:
                return
            if task.op.stream != Stream.COMPUTE and not task.done:
                if task.moves is None:
                    return
                self._device.issue(task)
            self._position += 1
