"""Weights leave a streamed model one by one, under the names of a checkpoint, as inference engines take them."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import horizon_lm
from tests.seams.compare import difference
from tests.support import tiny_models


class Receiver:
    """A stand-in for an inference engine: it takes pairs of name and tensor, as vLLM's ``load_weights`` does."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        self.largest = 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            assert name not in self.weights
            self.weights[name] = tensor.clone()
            self.largest = max(self.largest, tensor.nbytes)


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
@pytest.mark.parametrize("precision", ["float32", "fp32_master"])
def test_a_receiver_gets_the_tensors_of_the_checkpoint(family: str, precision: str, tmp_path: Any) -> None:
    model = horizon_lm.stream(tiny_models.build(family), precision=precision)
    optimizer = horizon_lm.AdamW(model, lr=1e-2)
    model(**tiny_models.batch()).loss.backward()
    optimizer.step()  # its updates may be running
    receiver = Receiver()
    receiver.load_weights(horizon_lm.named_weights(model))
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    assert {tensor.dtype for tensor in receiver.weights.values() if tensor.is_floating_point()} == {dtype}
    model.save_pretrained(tmp_path, dtype=dtype)
    assert difference(receiver.weights, load_file(tmp_path / "model.safetensors"), 0.0) is None
    whole = Receiver()
    whole.load_weights(horizon_lm.named_weights(model, torch.float32))
    model.save_pretrained(tmp_path, dtype=torch.float32)
    assert difference(whole.weights, load_file(tmp_path / "model.safetensors"), 0.0) is None
    assert whole.largest <= 4 * max(param.numel() for param in model.parameters())
