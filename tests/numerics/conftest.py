"""Runs that others are compared with, each made once."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.numerics.test_races import Result, train


@pytest.fixture(scope="session")
def undisturbed() -> Callable[..., Result]:
    """Training on the reference device, by settings."""
    known: dict[Any, Result] = {}

    def get(**settings: Any) -> Result:
        key = tuple(sorted(settings.items()))
        if key not in known:
            known[key] = train("cpu", **settings)
        return known[key]

    return get
