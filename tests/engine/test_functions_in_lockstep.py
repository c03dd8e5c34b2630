"""Functions in lock-step meet, one runs at a time, and errors end all of them."""

import contextvars
import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from horizon_lm.engine.passes.lockstep import batched_call, compute_alone, run_together

VARIABLE = contextvars.ContextVar("variable", default="outside")


def double(values: list[int]) -> list[int]:
    return [2 * value for value in values]


def test_meetings_compute_all_parts_at_once() -> None:
    log: list[Any] = []

    def compute(values: list[int]) -> list[int]:
        log.append(("together", values))
        return double(values)

    def function(number: int) -> int:
        for step in (1, 2):
            log.append((number, step))
            assert batched_call(step, number, compute) == 2 * number
        return number * number

    assert run_together([lambda number=number: function(number) for number in (1, 2, 3)]) == [1, 4, 9]
    assert log == [
        (1, 1), (2, 1), (3, 1), ("together", [1, 2, 3]), (1, 2), (2, 2), (3, 2), ("together", [1, 2, 3]),
    ]  # fmt: skip


def test_meeting_outside_of_a_lock_step_has_one_part() -> None:
    assert batched_call("here", 3, double) == 6
    assert run_together([lambda: batched_call("here", 3, double)]) == [6]


def test_functions_at_different_points_are_computed_apart() -> None:
    together: list[list[int]] = []

    def compute(values: list[int]) -> list[int]:
        together.append(values)
        return values

    def function(number: int) -> None:
        if number == 2:
            batched_call("extra", number, compute)
        batched_call("last", number, compute)

    run_together([lambda number=number: function(number) for number in (1, 2, 3)])
    assert together == [[1, 3], [2], [2]]


def test_lock_step_inside_a_meeting() -> None:
    def inner(values: list[int]) -> list[int]:
        return run_together([lambda value=value: batched_call("inner", value, double) for value in values])

    assert run_together([lambda value=value: batched_call("outer", value, inner) for value in (1, 2)]) == [2, 4]


def test_what_runs_apart_waits_for_nobody() -> None:
    log: list[int] = []

    def function(number: int) -> None:
        compute_alone(lambda: batched_call("apart", number, lambda values: [log.append(value) for value in values]))
        log.append(10 * number)
        batched_call("together", number, double)

    run_together([lambda number=number: function(number) for number in (1, 2)])
    assert log == [1, 10, 2, 20]


def test_settings_of_the_thread_are_those_outside() -> None:
    def settings(_: Any = None) -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"),
            torch.get_default_device().type,
            VARIABLE.get(),
        )

    def function() -> list[Any]:
        found = [settings()]
        with torch.enable_grad():
            found.append(batched_call("here", None, lambda values: [settings()] * len(values)))
        return found

    VARIABLE.set("inside")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
        for found in run_together([function, function]):
            assert found == [(False, True, "meta", "inside"), (True, True, "meta", "inside")]


@pytest.mark.parametrize("where", ["before", "in the meeting", "after"])
def test_an_error_ends_all(where: str) -> None:
    class FoundError(Exception):
        pass

    ended: list[int] = []

    def compute(values: list[int]) -> list[int]:
        if where == "in the meeting":
            raise FoundError
        return values

    def function(number: int) -> None:
        try:
            if where == "before" and number == 2:
                raise FoundError
            batched_call("here", number, compute)
            if where == "after" and number == 1:
                raise FoundError
            batched_call("there", number, compute)
        finally:
            ended.append(number)

    before = set(threading.enumerate())
    with pytest.raises(FoundError):
        run_together([lambda number=number: function(number) for number in (1, 2, 3)])
    assert sorted(ended) == ([1, 2] if where == "before" else [1, 2, 3])
    assert set(threading.enumerate()) <= before


def test_code_of_the_first_function_may_explain_an_error() -> None:
    def fail(values: list[int]) -> list[int]:
        raise ValueError("too short")

    def function() -> None:
        try:
            batched_call("here", 1, fail)
        except ValueError as error:
            raise RuntimeError("increase max_length") from error

    with pytest.raises(RuntimeError, match="increase max_length"):
        run_together([function, function])


def test_interrupt_while_a_function_runs() -> None:
    """As after Ctrl-C: the thread that waits is interrupted, and the function is still running."""
    main, interrupted = threading.main_thread(), threading.Event()

    def function() -> None:
        import signal

        signal.pthread_kill(main.ident, signal.SIGINT)
        interrupted.wait(0.2)
        batched_call("here", 1, double)

    before = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        run_together([function, function])
    assert set(threading.enumerate()) <= before


def test_nothing_is_kept() -> None:
    tensors = [torch.zeros(3), torch.ones(3)]
    refs = [weakref.ref(tensor) for tensor in tensors]
    run_together(
        [lambda tensor=tensor: batched_call("here", tensor, lambda values: values).sum() for tensor in tensors]
    )
    del tensors
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


def test_members_stay_on_the_gpu_of_their_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread begins on the first GPU: leaving the stream of another would go back there, and make a context on it."""
    current = threading.local()
    entered: list[int] = []
    stream = SimpleNamespace(device=torch.device("cuda:3"))

    @contextmanager
    def use(of: Any) -> Iterator[None]:
        before = getattr(current, "index", 0)
        current.index = of.device.index
        try:
            yield
        finally:
            entered.append(before)  # to which torch goes back
            current.index = before

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: setattr(current, "index", device.index))
    monkeypatch.setattr(torch.cuda, "stream", use)
    assert run_together([lambda: 1, lambda: 2, lambda: 3]) == [1, 2, 3]
    assert entered
    assert set(entered) == {3}
