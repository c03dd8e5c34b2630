"""Fixtures of the command-line tests."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horizon_lm.cost import model_outline
from tests.e2e import resuming, tiny
from tests.e2e.resuming import Runs
from tests.support import remembered


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model, for tests that do not change it."""
    return tiny.save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def base(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the settings of a run that is interrupted and resumed."""
    return resuming.settings(tmp_path_factory.mktemp("rows"), model)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Return what starts such runs, and interrupts them."""
    return Runs(monkeypatch)


@pytest.fixture(autouse=True, scope="session")
def outlines() -> Iterator[Any]:
    """Outline a model once for all runs in this process.

    Yields:
        The function that outlines a model, for tests that change it.
    """
    outline_model = model_outline.outline_model
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_outline, "outline_model", remembered.remember(outline_model))
        yield outline_model
