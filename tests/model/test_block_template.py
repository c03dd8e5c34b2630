"""Streamed blocks: the tensors in the places of their parameters."""

import pytest
import torch
from torch import nn

from horizon_lm.model.block_template import BuffersOfModules, StreamedBlock


class _WithoutMemory(BuffersOfModules):
    """Buffers on a device without memory for them."""

    def copy(self, buffer: torch.Tensor):
        raise RuntimeError("out of memory")


def test_parameters_stay_if_there_is_no_memory_for_a_copy_of_the_buffers():
    module = nn.BatchNorm1d(4)
    weight, bias = module.weight, module.bias
    block = StreamedBlock("block", module, _WithoutMemory(torch.device("cpu")))
    tensors = {name: torch.zeros(4) for name in block.param_names()}
    with pytest.raises(RuntimeError, match="out of memory"), block.bound(tensors):
        raise AssertionError("it is bound")
    assert module._parameters["weight"] is weight
    assert module._parameters["bias"] is bias


def test_bound_tensors_are_in_the_places_of_parameters_and_buffers_until_the_end():
    module = nn.BatchNorm1d(4)
    weight, mean = module.weight, module.running_mean
    block = StreamedBlock("block", module, BuffersOfModules(torch.device("cpu")))
    tensors = {name: torch.zeros(4) for name in block.param_names()}
    with block.bound(tensors):
        assert module._parameters["weight"] is tensors["weight"]
        assert module._buffers["running_mean"] is not mean
    assert module._parameters["weight"] is weight
    assert module._buffers["running_mean"] is mean
