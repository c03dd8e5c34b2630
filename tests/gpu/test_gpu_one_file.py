"""examples/in_one_file.py trains on the device under test as the library does on the CPU."""

import copy

import pytest
import torch

from tests.gpu.accelerator import Accelerator
from tests.support import tiny_models
from tests.support.one_file_example import load, train, train_streamed

pytestmark = pytest.mark.gpu


def test_losses_are_those_of_the_library(accelerator: Accelerator) -> None:
    module, model = load(), tiny_models.build("llama", num_hidden_layers=5)
    expected, _ = train_streamed(copy.deepcopy(model))
    got, _ = train(module, model)
    torch.testing.assert_close(torch.stack(got).cpu(), torch.stack(expected), rtol=1e-4, atol=1e-4)
    if accelerator.is_cuda:  # copies from and to other memory would make the host wait
        assert all(param.is_pinned() and param.grad.is_pinned() for param in model.parameters())
