"""A deterministic device for tests that tries to break the schedule.

It computes as soon as the engine reaches a computation. All other tasks of a pass are known when the pass begins.
Before and after each computation, a seeded adversary may run *any* of them whose declared waits and stream predecessor
are done, at any position in the list. Copies run in pieces, so that they straddle computations. A computation can rely
only on the waits that it declares. Memory that is invalid or not yet written holds NaN.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from horizon_lm.device.base import Task
from horizon_lm.device.cpu import CpuDevice
from horizon_lm.device.transfers import Move
from horizon_lm.schedule.ops import ScheduleError, Stream


@dataclass(slots=True)
class _QueuedTask:
    """A task in the queue of its stream, with the pieces that have not run yet."""

    task: Task
    pieces: deque[Move] | None = None


class SimulatedDevice(CpuDevice):
    """A CPU device on which a seeded adversary decides when copies and updates run.

    Args:
        seed: the seed of the adversary. The same seed gives the same interleaving.
        capacity: limit on the bytes of all buffers; None for no limit.
        pieces: the number of pieces of a copy.
        eagerness: the probability that the adversary runs another piece when it may: 0 for as late as possible, 1 for
            as early as possible, None to draw a new probability for each pass.
    """

    name = "simulated"

    def __init__(
        self, seed: int = 0, capacity: int | None = None, pieces: int = 3, eagerness: float | None = None
    ) -> None:
        super().__init__(capacity)
        self._random = random.Random(seed)
        self._queues: dict[Stream, deque[_QueuedTask]] = {s: deque() for s in Stream if s != Stream.COMPUTE}
        self._pieces = pieces
        self._fixed_eagerness = eagerness
        self._eagerness = eagerness or 0.0  # of the running pass

    def poison(self, buffer: torch.Tensor) -> None:
        buffer.view(torch.uint8).fill_(0xFF)  # NaN in every floating-point format

    def announce(self, tasks: Sequence[Task]) -> None:
        """Queue the tasks of a pass other than computation: from now on, the adversary may run them."""
        if self._fixed_eagerness is None:
            self._eagerness = self._random.choice((0.0, 0.5, 0.9, 1.0))
        for task in tasks:
            if task.op.stream != Stream.COMPUTE:
                self._queues[task.op.stream].append(_QueuedTask(task))
        self._interfere()

    def issue(self, task: Task) -> None:
        task.issued = True
        self._interfere()

    def begin(self, task: Task) -> None:
        self._interfere()
        for other in task.waits:
            self._force(other, for_task=task)
        self._interfere()

    def end(self, task: Task) -> None:
        task.finish()
        self._interfere()

    def wait(self, tasks: Sequence[Task]) -> None:
        for task in tasks:
            self._force(task, for_task=task)

    def synchronize(self) -> None:
        issued = [entry.task for queue in self._queues.values() for entry in queue if entry.task.issued]
        self.wait(issued)

    def cancel(self, tasks: Sequence[Task]) -> None:
        dropped = set(map(id, tasks))
        for stream, queue in self._queues.items():
            self._queues[stream] = deque(entry for entry in queue if id(entry.task) not in dropped)
        for task in tasks:
            task.drop()

    def give_up(self, updates: Sequence[Task]) -> None:
        for queue in self._queues.values():
            queue.clear()
        super().give_up(updates)

    def _interfere(self) -> None:
        """Run a random selection of the pieces that may run now."""
        while self._random.random() < self._eagerness:
            runnable = [queue for queue in self._queues.values() if queue and self._may_run(queue[0].task)]
            if not runnable:
                return
            self._run_piece(self._random.choice(runnable))

    @staticmethod
    def _may_run(task: Task) -> bool:
        return task.moves is not None and all(other.done for other in task.waits)

    def _run_piece(self, queue: deque[_QueuedTask]) -> None:
        """Run the next piece of the first task of a queue; remove the task after its last piece."""
        entry = queue[0]
        task = entry.task
        if entry.pieces is None:
            assert task.moves is not None
            task.issued = True  # it may run before its turn in the list, and must then be completed
            entry.pieces = deque(piece for move in task.moves for piece in move.split(self._pieces))
            self.counters.moved[f"{task.op.kind}:{task.op.unit}"] += sum(move.host_bytes for move in task.moves)
        if entry.pieces:
            entry.pieces.popleft().run(self.link)
        if not entry.pieces:
            task.finish()
            queue.popleft()

    def _force(self, task: Task, for_task: Task) -> None:
        """Run a task to its end, and before it nothing but its declared waits and the tasks before it in its stream; raise ScheduleError if
        one of these cannot run. ``for_task`` is the task that needs it, for the message.
        """
        if task.done:
            return
        queue = self._queues.get(task.op.stream)
        if queue is None or all(entry.task is not task for entry in queue):
            raise ScheduleError(f"{for_task.op} waits for {task.op}, which has not been reached")
        while not task.done:
            first = queue[0].task
            for other in first.waits:
                self._force(other, for_task=first)
            if first.moves is None:
                raise ScheduleError(f"{for_task.op} waits for {first.op}, whose moves are not known yet")
            self._run_piece(queue)
