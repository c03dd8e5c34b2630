"""A value that each thread has for itself (`OfThread`)."""

import threading

import pytest

from horizon_lm.model.of_thread import OfThread


def test_each_thread_begins_with_the_first_value() -> None:
    value, seen = OfThread(1), []

    def look() -> None:
        seen.append(value.value)
        with value.replaced(3):
            seen.append(value.value)

    with value.replaced(2):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert (seen, value.value) == ([1, 3], 2)
    assert value.value == 1


def test_the_value_before_is_put_back_after_an_error() -> None:
    value = OfThread(1)
    with value.replaced(2):
        with pytest.raises(KeyError), value.replaced(3):
            raise KeyError
        assert value.value == 2
