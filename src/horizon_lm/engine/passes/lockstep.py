"""Run several functions in lock-step: in threads of which one runs at a time, and which meet at the same points.

Hugging Face's forward method computes one batch. To compute several batches unit by unit, one forward call per batch runs in a
thread of its own and waits at each unit until all calls have arrived; the unit is then computed for all of them, with
its weights loaded once. Outside of a lock-step a call is computed alone, at once.
"""

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from math import inf
from typing import Any, Protocol, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from horizon_lm.engine.passes.ambient import ThreadAmbient
from horizon_lm.model.of_thread import OfThread

T = TypeVar("T")
_caller = OfThread(None)  # the caller whose function this thread runs


class Watcher(Protocol):
    """An object that is notified when a lock-step begins and ends."""

    def in_lockstep(self) -> AbstractContextManager[None]:
        """Context manager: a lock-step is running."""
        ...


_watchers: "weakref.WeakSet[Watcher]" = weakref.WeakSet()


def watch_locksteps(watcher: Watcher) -> None:
    """Notify an object of each lock-step, for as long as it lives."""
    _watchers.add(watcher)


@dataclass
class _Arrival:
    """The point at which a caller waits, with the value that it brings to it."""

    point: Hashable
    place: float
    value: Any
    compute: Callable[[list[Any]], Sequence[Any]]
    ambient: ThreadAmbient


# Not an Exception, which the code of a model or of a loss might catch, and go on.
class _AbandonedError(BaseException):
    """Raised inside a waiting caller, to end its thread after another caller has failed."""


class _Caller:
    """A function in a thread, which runs while the thread that started it waits.

    Attributes:
        number: its number among the callers of the lock-step.
        arrival: where it waits; None while it runs and after its end.
        answer: the result of the last arrival.
        failure: an error to raise where it waits, instead of the answer.
        result: the result of the function.
        error: the error that ended the function.
        ended: the function has returned or failed.
    """

    def __init__(
        self, number: int, function: Callable[[], Any], ambient: ThreadAmbient, prepare: Callable[[], None]
    ) -> None:
        self.number, self._function, self._ambient, self._prepare = number, function, ambient, prepare
        # A baton: the first lets the function run, the second says that it waits or has ended. Between the two, the
        # thread that resumes it stands still, so no state of the engine needs a lock.
        self._may_run, self._waits = threading.Semaphore(0), threading.Semaphore(0)
        self.arrival: _Arrival | None = None
        self.answer: Any = None
        self.failure: BaseException | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended, self._runs = False, False
        self._thread: threading.Thread | None = (
            None  # started by the first `resume`, so that an interrupt leaves none behind
        )

    def resume(self) -> None:
        """Let the function run to its next arrival or its end. Raise the error that ended it."""
        self._prepare()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="horizon-lockstep", daemon=True)
            self._thread.start()
        # Set before the function may run, because it sets the next arrival.
        self.arrival, self._runs = None, True
        self._may_run.release()
        self._waits.acquire()
        self._runs = False
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def wait(self, arrival: _Arrival) -> Any:
        """Wait at a point, inside the function. Return the answer."""
        self.arrival = arrival
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
        # The interrupt came while `resume` waited: the function still runs, to its next arrival or its end.
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
                _caller.value = self
                self.result = self._ambient.run(self._function)
        except _AbandonedError:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            # Frees the batch and the graph that the function refers to; this object lives until all functions have ended.
            del self._function
            self._waits.release()


def run_together(functions: Sequence[Callable[[], T]], prepare: Sequence[Callable[[], None]] | None = None) -> list[T]:
    """Run functions in lock-step, and return their results.

    One runs at a time, in the given order between two meetings. An error of one of them, or of a batched call, ends all of them
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
    """Run the functions from arrival to arrival until all have returned."""
    ambient = ThreadAmbient()
    callers: list[_Caller] = []
    try:
        for number, (function, before) in enumerate(zip(functions, prepare, strict=True)):
            callers.append(_Caller(number, function, ambient, before))
        for caller in callers:
            caller.resume()
        while waiting := [caller for caller in callers if caller.arrival is not None]:
            _compute_first_point(waiting)
        return [caller.result for caller in callers]
    finally:
        for caller in callers:
            caller.abandon()


def _nothing() -> None:
    pass


def _compute_first_point(waiting: list[_Caller]) -> None:
    """Compute the first point at which these callers wait, for all that wait there. Then let each of them run to its next point. Callers
    at other points go on waiting. Of points at the same place, the first caller's comes first.
    """
    arrivals = [(caller, caller.arrival) for caller in waiting if caller.arrival is not None]
    leader, first = min(arrivals, key=lambda each: each[1].place)
    together = [(caller, arrival) for caller, arrival in arrivals if arrival.point == first.point]
    try:
        answers = first.ambient.run(lambda: first.compute([arrival.value for _, arrival in together]))
    except BaseException as error:  # raised where the first caller waits, whose code may explain it
        leader.failure = error
        leader.resume()
        raise
    for (caller, _), answer in zip(together, answers, strict=True):
        caller.answer = answer
    # A caller may free its answer once it goes on; a reference from here would keep it until all have met again.
    del answers, answer
    for caller, _ in together:
        caller.resume()


def keep_graph_together(outputs: Any) -> None:
    """Let autograd run the graph of these outputs without a break, once it has begun with it.

    Of the nodes that are ready, autograd takes the one that was made last, by a number that each thread counts for itself. So
    nodes of two graphs that were made in lock-step would take turns, and a streamed model can run one backward pass at a
    time.
    """
    # The next number of this thread is above the numbers of all nodes that it has made, so these nodes come first.
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


def batched_call(point: Hashable, value: Any, compute: Callable[[list[Any]], Sequence[Any]], place: float = inf) -> Any:
    """Compute a value together with the other functions of the lock-step that this thread belongs to, if any.

    Args:
        point: where this is; functions that arrive at the same point are computed together.
        value: this function's part.
        compute: function of the parts of all of them that returns a result for each, called in the thread that runs the
            lock-step, with the settings of the first of them.
        place: points that not all functions reach are computed in the order of their places, before points without one.
    """
    caller: _Caller | None = _caller.value
    if caller is None:
        (answer,) = compute([value])
        return answer
    # Computed in the thread of the lock-step, which has neither this thread's gradient mode nor its autocast.
    return caller.wait(_Arrival(point, place, value, compute, ThreadAmbient()))


def compute_alone(function: Callable[[], T]) -> T:
    """Call a function at once and alone: it does not wait for the other callers of the lock-step."""
    with _caller.replaced(None):
        return function()


def caller_id() -> int:
    """Return a number that only the function that runs here has among those in lock-step; 0 outside of a lock-step."""
    return 0 if _caller.value is None else id(_caller.value)


def caller_number() -> int:
    """Return the number of the function that runs here among those in lock-step; 0 outside of a lock-step."""
    caller: _Caller | None = _caller.value
    return 0 if caller is None else caller.number
