"""What the tests of the command line share."""

from pathlib import Path

import pytest

from tests.e2e import tiny


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model, for tests that leave it as it is."""
    return tiny.save_model(tmp_path_factory.mktemp("model"))
