"""The placeholders of quantized weights: they are decoded where they may be read, and nothing is written to a decoded copy."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="needs the whole installation")

import horizon_lm
from horizon_lm.engine.host.packed_parameters import decoding
from horizon_lm.errors import StreamingError
from horizon_lm.model.quantization import four_bits
from tests.support.quantized_folders import save_plain


@pytest.fixture(scope="module")
def weight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    save_plain("llama", folder)
    model = horizon_lm.from_pretrained(folder, "cpu", "float32", quantization_config=four_bits())
    return model.get_parameter("model.layers.0.self_attn.q_proj.weight")


READS: dict[str, Callable[[Any], torch.Tensor]] = {
    "alone": lambda w: w.norm(dim=1),
    "in a list": lambda w: torch.cat([w, w[:1]]),
    "in a tuple": lambda w: torch.stack((w, w)),
    "by name": lambda w: torch.nn.functional.linear(torch.ones(w.shape[1]), weight=w),
    "into another tensor": lambda w: torch.zeros(w.shape).add_(w),
    "as out": lambda w: torch.add(w, 1, out=torch.empty(w.shape)),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda w: w.add_(1),
    "by index": lambda w: operator.setitem(w, 0, 5.0),
    "by operator": lambda w: operator.iadd(w, 1),
    "as out": lambda w: torch.add(torch.ones(w.shape), 1, out=w),
    "as one of several out": lambda w: torch.max(torch.ones(w.shape), 1, out=(w, torch.ones(1, dtype=torch.int64))),
    "by init": lambda w: torch.nn.init.zeros_(w),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_gets_decoded_values(weight: Any, read: str) -> None:
    expected = READS[read](weight.decode())
    with decoding():
        assert torch.equal(READS[read](weight), expected)
    with pytest.raises(StreamingError, match=r"q_proj\.weight is quantized: its codes lie in host memory"):
        READS[read](weight)


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_rejected(weight: Any, write: str) -> None:
    before = weight.decode()
    with decoding(), pytest.raises(StreamingError, match=r"q_proj\.weight is quantized: its codes lie in host memory"):
        WRITES[write](weight)
    assert torch.equal(weight.decode(), before)
