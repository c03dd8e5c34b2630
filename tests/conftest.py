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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cuda", choices=["cuda", "cpu"], help="for tests marked gpu; cpu tries the tests"
    )
