"""Batches that are built ahead in threads: in order, no more than are needed, with their errors, and no thread remains."""

import threading
from collections.abc import Iterator
from typing import Any, cast

import pytest

from horizon_lm.common.constants import BATCHES_AHEAD
from horizon_lm.errors import DataError
from horizon_lm.runs.data.ahead import BatchesAhead


class Rows:
    """Stands for a table of rows."""

    def __init__(self, has_images: bool) -> None:
        self.has_images = has_images


class Builder:
    """Builds batches that are their numbers. ``bad``: the number that cannot be built."""

    def __init__(self, bad: int | None = None) -> None:
        self.bad, self.threads = bad, dict[int, threading.Thread]()
        self.has_built = threading.Condition()

    def __call__(self, number: int) -> Any:
        with self.has_built:
            assert number not in self.threads, "built twice"
            self.threads[number] = threading.current_thread()
            self.has_built.notify_all()
        if number == self.bad:
            raise DataError(f"rows.jsonl:{number + 1}: damaged")
        return number

    def wait_for(self, count: int) -> None:
        with self.has_built:
            assert self.has_built.wait_for(lambda: len(self.threads) >= count, 60)


@pytest.fixture(autouse=True)
def no_thread_remains() -> Iterator[None]:
    before = {*threading.enumerate()}
    yield
    assert {*threading.enumerate()} <= before


def ahead(build: Builder, end: int, has_images: bool = True) -> BatchesAhead:
    return BatchesAhead(build, end, cast(Any, Rows(has_images)))


@pytest.mark.parametrize("has_images", [True, False])
def test_batches_are_in_order(has_images: bool) -> None:
    build = Builder()
    with ahead(build, 7, has_images) as batches:
        assert [batches.batch(number) for number in range(7)] == [*range(7)]
    assert len(build.threads) == 7
    assert (threading.main_thread() in build.threads.values()) is not has_images


def test_only_the_next_ones_are_built_ahead() -> None:
    build = Builder()
    with ahead(build, 100) as batches:
        batches.batch(3)
        build.wait_for(1 + BATCHES_AHEAD)
        assert sorted(build.threads) == [3, *range(4, 4 + BATCHES_AHEAD)]
        batches.batch(4)
        build.wait_for(2 + BATCHES_AHEAD)
        assert sorted(build.threads) == [3, *range(4, 5 + BATCHES_AHEAD)]


def test_an_error_is_that_of_its_own_batch() -> None:
    with ahead(Builder(bad=2), 9) as batches:
        assert [batches.batch(number) for number in range(2)] == [0, 1]
        with pytest.raises(DataError, match=r"rows.jsonl:3: damaged"):
            batches.batch(2)


def test_an_error_elsewhere_leaves_no_thread() -> None:
    batches = ahead(Builder(), 9)

    def interrupted() -> None:
        with batches:
            batches.batch(0)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
