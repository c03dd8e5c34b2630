"""Fixtures of the command-line tests."""

from pathlib import Path

import pytest

from tests.e2e import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny model, for tests that do not change it."""
    return tiny.save_model(tmp_path_factory.mktemp("model"))
