"""Fixtures of tests that start runs, for the conftests of several folders."""

from pathlib import Path
from typing import Any

import pytest

from horizon_lm.runs.training import loss_png
from tests.e2e import resuming, tiny
from tests.e2e.resuming import Runs


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


@pytest.fixture
def drawn() -> None:
    """Let runs draw their losses."""


@pytest.fixture(autouse=True)
def undrawn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no losses except in tests that look at the picture, which takes much of the time of a short run."""
    if "drawn" not in request.fixturenames:
        monkeypatch.setattr(loss_png, "write_loss_png", lambda *_: None)
