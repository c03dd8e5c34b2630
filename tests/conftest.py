"""Settings of all tests."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch
import transformers

torch.set_num_threads(1)  # tiny models: more threads only fight
transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


@pytest.fixture(autouse=True, scope="session")
def no_profile(tmp_path_factory: pytest.TempPathFactory) -> None:
    """One that doctor has left on this machine would change plans."""
    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cuda", choices=["cuda", "cpu"], help="for tests marked gpu; cpu tries the tests"
    )
