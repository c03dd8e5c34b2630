"""Reference runs for comparison, each made only once."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.pass_sequences import Result, train


@pytest.fixture(scope="session")
def undisturbed() -> Callable[..., Result]:
    """Return a function that trains on the CPU with given settings, once per combination of settings."""
    known: dict[Any, Result] = {}

    def get(**settings: Any) -> Result:
        key = tuple(sorted(settings.items()))
        if key not in known:
            known[key] = train("cpu", **settings)
        return known[key]

    return get
