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
def own_folders(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What doctor and other runs have left on this machine would change plans, and be changed."""
    import datasets

    os.environ["XDG_CONFIG_HOME"] = str(tmp_path_factory.mktemp("config"))
    cache = tmp_path_factory.mktemp("datasets")
    os.environ["HF_DATASETS_CACHE"] = str(cache)
    datasets.config.HF_DATASETS_CACHE = cache


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cuda", choices=["cuda", "cpu"], help="for tests marked gpu; cpu tries the tests"
    )
