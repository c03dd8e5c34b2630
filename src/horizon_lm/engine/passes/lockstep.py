"""Run several functions in lock-step: in threads of which one runs at a time, and which meet at the same points.

Hugging Face's forward method computes one batch. To compute several batches unit by unit, one forward call per batch runs in a
thread of its own and waits at each unit until all calls have arrived; the unit is then computed for all of them, with
its weights loaded once. Outside of a lock-step a meeting has one participant and returns at once.
"""

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from horizon_lm.engine.passes.ambient import ThreadAmbient
from horizon_lm.model.of_thread import OfThread

T = TypeVar("T")
_member = OfThread(None)  # the member whose function this thread runs


class Watcher(Protocol):
    """An object that is told when a lock-step begins and ends."""

    def in_lockstep(self) -> AbstractContextManager[None]:
        """Context manager: a lock-step is running."""
        ...


_watchers: "weakref.WeakSet[Watcher]" = weakref.WeakSet()


def watch_locksteps(watcher: Watcher) -> None:
    """Tell an object about each lock-step, for as long as it lives."""
    _watchers.add(watcher)


@dataclass
class _Meeting:
    """The point at which a member waits, with the value that it brings to it."""

    point: Hashable
    value: Any
    compute: Callable[[list[Any]], Sequence[Any]]
    state: ThreadAmbient


# Not an Exception, which the code of a model or of a loss might catch, and go on.
class _AbandonedError(BaseException):
    """Raised inside a waiting member, to end its thread after another member has failed."""


class _Member:
    """A function in a thread, which runs while the thread that started it waits.

    Attributes:
        meeting: where it waits; None while it runs and after its end.
        answer: the result of the last meeting.
        failure: an error to raise where it waits, instead of the answer.
        result: the result of the function.
        error: the error that ended the function.
        ended: the function has returned or failed.
    """

    def __init__(self, function: Callable[[], Any], state: ThreadAmbient, prepare: Callable[[], None]) -> None:
        self._function, self._state, self._prepare = function, state, prepare
        # A baton: the first lets the function run, the second says that it waits or has ended. Between the two, the
        # thread that resumes it stands still, so no state of the engine needs a lock.
        self._may_run, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self.meeting: _Meeting | None = None
        self.answer: Any = None
        self.failure: BaseException | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended, self._runs = False, False
        self._thread: threading.Thread | None = (
            None  # started by the first `resume`, so that an interrupt leaves none behind
        )

    def resume(self) -> None:
        """Let the function run to its next meeting or its end. Raise the error that ended it."""
        self._prepare()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="horizon-lockstep", daemon=True)
            self._thread.start()
        # Set before the function may run, because it sets the next meeting.
        self.meeting, self._runs = None, True
        self._may_run.release()
        self._waits.acquire()
        self._runs = False
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def wait(self, meeting: _Meeting) -> Any:
        """Wait for a meeting, inside the function. Return the answer."""
        self.meeting = meeting
        self._waits.release()
        self._may_run.acquire()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure
        answer, self.answer = self.answer, None
        return answer

    def abandon(self) -> None:
        """End the thread, which may be running if its `resume` was interrupted."""
        if self._thread is None or self._thread.ident is None:
            return
        # The interrupt came while `resume` waited: the function still runs, to its next meeting or its end.
        if self._runs:
            self._waits.acquire()
        if not self.ended:
            self.failure = _AbandonedError()
            self._may_run.release()
        self._thread.join()
        self.error = None

    def _run(self) -> None:
        """Run the function, in its thread, once it may."""
        self._may_run.acquire()
        try:
            if self.failure is None:
                _member.value = self
                self.result = self._state.run(self._function)
        except _AbandonedError:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            # With it go the batch and the graph that it refers to; the member lives until all have ended.
            del self._function
            self._waits.release()


def run_together(functions: Sequence[Callable[[], T]], prepare: Sequence[Callable[[], None]] | None = None) -> list[T]:
    """Run functions in lock-step, and return their results.

    One runs at a time, in the given order between two meetings. An error of one of them, or of a meeting, ends all of them
    and is raised.

    Args:
        functions: the functions.
        prepare: for each of them, a function that is called whenever it begins or goes on.

    Examples:
        Two batches of different lengths, for which each block is copied to the device twice, and not four times:

        >>> shorter = {name: tensor[:, :5] for name, tensor in batch.items()}
        >>> losses = horizon_lm.run_together([lambda each=each: model(**each).loss for each in (batch, shorter)])
        >>> sum(losses).backward()
    """
    prepare = prepare or [_nothing] * len(functions)
    if len(functions) == 1:
        prepare[0]()
        return [functions[0]()]
    with ExitStack() as stack:
        for watcher in list(_watchers):
            stack.enter_context(watcher.in_lockstep())
        return _run_members(functions, prepare)


def _run_members(functions: Sequence[Callable[[], T]], prepare: Sequence[Callable[[], None]]) -> list[T]:
    """Run the functions from meeting to meeting until all have returned."""
    state = ThreadAmbient()
    members: list[_Member] = []
    try:
        for function, before in zip(functions, prepare, strict=True):
            members.append(_Member(function, state, before))
        for member in members:
            member.resume()
        # The first that waits decides what is computed next; members at other points wait for a meeting of their own.
        while waiting := [member for member in members if member.meeting is not None]:
            _hold(waiting)
        return [member.result for member in members]
    finally:
        for member in members:
            member.abandon()


def _nothing() -> None:
    pass


def _hold(waiting: list[_Member]) -> None:
    """Hold one meeting, of the first of these members and of all members that wait at the same point."""
    first = waiting[0].meeting
    assert first is not None
    together = [
        (member, member.meeting) for member in waiting if member.meeting and member.meeting.point == first.point
    ]
    try:
        answers = first.state.run(lambda: first.compute([meeting.value for _, meeting in together]))
    except BaseException as error:  # raised where the first member waits, whose code may explain it
        waiting[0].failure = error
        waiting[0].resume()
        raise
    for (member, _), answer in zip(together, answers, strict=True):
        member.answer = answer
    # A member may free its answer once it goes on; a reference from here would keep it until all have met again.
    del answers, answer
    for member, _ in together:
        member.resume()


def keep_graph_together(outputs: Any) -> None:
    """Let autograd run the graph of these outputs without a break, once it has begun with it.

    Of the nodes that are ready, autograd takes the one that was made last, by a number that each thread counts for itself. So
    nodes of two graphs that were made in lock-step would take turns, and a streamed model can run one backward pass at a
    time.
    """
    # The next number of this thread, above the numbers of all nodes that it has made.
    number = torch.autograd._get_sequence_nr()
    nodes = [
        leaf.grad_fn for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None
    ]
    seen = set(nodes)
    while nodes:
        node: Any = nodes.pop()
        node._set_sequence_nr(number)
        # Nodes without successors accumulate gradients; autograd runs them first as they are.
        inner = {each for each, _ in node.next_functions if each is not None and each.next_functions} - seen
        seen |= inner
        nodes += inner


def compute_jointly(point: Hashable, value: Any, compute: Callable[[list[Any]], Sequence[Any]]) -> Any:
    """Compute a value together with the other functions of the lock-step that this thread belongs to, if any.

    Args:
        point: where this is; functions that arrive at the same point are computed together.
        value: this function's part.
        compute: function of the parts of all of them that returns a result for each, called in the thread that runs the
            lock-step, with the settings of the first of them.
    """
    member: _Member | None = _member.value
    if member is None:
        (answer,) = compute([value])
        return answer
    # Computed in the thread of the lock-step, which has neither this thread's gradient mode nor its autocast.
    return member.wait(_Meeting(point, value, compute, ThreadAmbient()))


def compute_alone(function: Callable[[], T]) -> T:
    """Call a function at once and alone: its meetings do not wait for the other members of the lock-step."""
    with _member.replaced(None):
        return function()


def member_id() -> int:
    """Return a number that only the function that runs here has among those in lock-step; 0 outside of a lock-step."""
    return 0 if _member.value is None else id(_member.value)
