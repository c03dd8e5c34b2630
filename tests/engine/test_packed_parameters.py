"""The placeholders of quantized weights: they are decoded where they are read, and nothing is written to a decoded copy."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="needs the whole installation")

import horizon_lm
from horizon_lm.errors import StreamingError
from horizon_lm.model.quantization import four_bits
from tests.support.quantized_folders import save_plain


@pytest.fixture(scope="module")
def weight(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("model")
    save_plain("llama", folder)
    model = horizon_lm.from_pretrained(folder, "cpu", "bf16", quantization_config=four_bits())
    return model.get_parameter("model.layers.0.self_attn.q_proj.weight")


READS: dict[str, Callable[[Any], Any]] = {
    "alone": lambda w: w.norm(dim=1),
    "in a list": lambda w: torch.cat([w, w[:1]]),
    "in a tuple": lambda w: torch.stack((w, w)),
    "by name": lambda w: torch.nn.functional.linear(torch.ones(w.shape[1], dtype=w.dtype), weight=w),
    "into another tensor": lambda w: torch.zeros(w.shape).add_(w),
    "as out": lambda w: torch.add(w, 1, out=torch.empty(w.shape)),
    "a view": lambda w: w.data.t()[1:],
    "several views": lambda w: torch.stack(w.detach().unbind(0)),
    "another dtype": lambda w: w.data.to(torch.float32),
    "as numbers": lambda w: torch.tensor(w[0].tolist()),
    "by numpy": lambda w: torch.from_numpy(w.float().numpy()),
    "changed in a copy": lambda w: w.clone().mul_(2),
    "changed in another dtype": lambda w: w.float().mul_(2),
}
WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda w: w.add_(1),
    "by index": lambda w: operator.setitem(w, 0, 5.0),
    "by operator": lambda w: operator.iadd(w, 1),
    "as out": lambda w: torch.add(torch.ones(w.shape), 1, out=w),
    "as one of several out": lambda w: torch.max(torch.ones(w.shape), 1, out=(w, torch.ones(1, dtype=torch.int64))),
    "by init": lambda w: torch.nn.init.zeros_(w),
    "to data": lambda w: w.data.mul_(2),
    "to a view": lambda w: w.view(-1).mul_(2),
    "to a view of views": lambda w: operator.setitem(w.data.t()[1:], 0, 1.0),
    "to one of several views": lambda w: w.chunk(2)[1].zero_(),
    "to the same dtype": lambda w: w.to(torch.bfloat16).zero_(),
    "by foreach": lambda w: torch._foreach_mul_([w], 2),
    "by another tensor": lambda w: setattr(w, "data", torch.zeros(w.shape, dtype=w.dtype)),
    "by a narrower tensor": lambda w: setattr(w, "data", w.to(torch.float16).half()),
    "by a wider tensor": lambda w: setattr(w, "data", w.float() * 2),
}
SAME: dict[str, Callable[[Any], Any]] = {
    "data": lambda w: w.data,
    "detach": lambda w: w.detach(),
    "the same dtype": lambda w: w.to(torch.bfloat16),
    "the same device": lambda w: w.to("cpu"),
    "method": lambda w: w.bfloat16(),
    "cpu": lambda w: w.cpu(),
    "type": lambda w: w.type(torch.bfloat16),
}


@pytest.mark.parametrize("read", READS)
def test_a_read_gets_decoded_values(weight: Any, read: str) -> None:
    found = READS[read](weight)
    assert torch.equal(found, READS[read](weight.decode()))
    assert found.dtype == READS[read](weight.decode()).dtype


@pytest.mark.parametrize("write", WRITES)
def test_a_write_is_rejected(weight: Any, write: str) -> None:
    before = weight.decode()
    with pytest.raises(StreamingError, match=r"q_proj\.weight is quantized.*without quantization.*horizon_lm\.stream"):
        WRITES[write](weight)
    assert torch.equal(weight.decode(), before)


@pytest.mark.parametrize("call", SAME)
def test_a_call_that_changes_nothing_decodes_nothing(weight: Any, call: str) -> None:
    assert SAME[call](weight) is weight


def test_a_cast_to_a_wider_dtype_changes_nothing(weight: Any) -> None:
    before = weight.decode()
    weight.data = weight.data.to(torch.float32)
    weight.data = weight.data
    assert torch.equal(weight.decode(), before)


def test_an_array_is_read_only_and_an_address_is_rejected(weight: Any) -> None:
    wide = weight.view(-1)[:2]
    with pytest.raises(StreamingError, match=r"q_proj\.weight is quantized: .*no memory.*decode\(\)"):
        weight.data_ptr()
    with pytest.raises(ValueError, match="read-only"):
        wide.view(torch.int16).numpy()[0] = 1
