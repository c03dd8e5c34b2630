"""Attention by segment as a custom operation: equal to autograd, and valid for torch.compile."""

from typing import Any

import pytest
import torch

from horizon_lm.model import segment_attention as module
from horizon_lm.model.attention import Segments
from horizon_lm.model.segment_attention import _attend, _differentiate, by_segment, segment_attention
from tests.support.thinned_cases import thinned

LENGTHS = [[5, 2], [1, 6]]
CASES: dict[str, dict[str, Any]] = {
    "segments": {},
    "whole rows": {"rows": None},
    "a window": {"window": 3},
    "a window, whole rows": {"window": 3, "rows": None},
    "a scale of its own": {"scaling": 0.3},
    "dropout": {"dropout": 0.3},
}


def tensors(dtype: torch.dtype, width: int = 4, head_dim: int = 8) -> list[torch.Tensor]:
    """Return queries of four heads, and keys and values of two; values are of another width."""
    generator = torch.Generator().manual_seed(0)
    sizes = [(2, 4, 7, head_dim), (2, 2, 7, head_dim), (2, 2, 7, width)]
    return [torch.randn(size, dtype=dtype, generator=generator).requires_grad_() for size in sizes]


def arguments(rows: Any = LENGTHS, scaling: Any = None, dropout: float = 0.0, window: Any = None) -> list[Any]:
    """Return offsets on the device and on the host, and the options."""
    offsets = (None, None) if rows is None else Segments(rows, torch.device("cpu")).offsets(0, 2)
    return [*offsets, scaling, dropout, window]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", sorted(set(CASES) - {"dropout"}))
def test_equal_to_autograd(case: str, dtype: torch.dtype) -> None:
    inputs, (offsets, ends, *options) = tensors(dtype, width=8), arguments(**CASES[case])
    got = _attend(*inputs, offsets, ends, *options)[0]
    scaling, dropout, window = options
    borders = [0, 7, 14] if ends is None else ends.tolist()
    expected = by_segment(*inputs, borders, scaling, dropout, window)
    assert torch.equal(got, expected)
    assert got.shape == (2, 7, 4, 8)
    grad = torch.randn(got.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    pairs = (torch.autograd.grad(output, inputs, grad) for output in (got, expected))
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 3e-2, "atol": 2e-2}
    for ours, theirs in zip(*pairs, strict=True):
        torch.testing.assert_close(ours, theirs, **tolerance)
    # Without compilation, the gradient equals autograd's to the last bit.
    rows = None if offsets is None else (offsets, ends)
    plain = segment_attention(*inputs, rows, scaling, dropout, window)
    assert plain.grad_fn.name() != got.grad_fn.name()
    assert torch.equal(plain, expected)


@pytest.mark.parametrize("case", thinned(CASES))
def test_gradients_are_those_of_the_output(case: str) -> None:
    options = arguments(**CASES[case])

    def attend(*inputs: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(0)
        return _attend(*inputs, *options)[0]

    assert torch.autograd.gradcheck(attend, tensors(torch.float64, width=2, head_dim=4))


@pytest.mark.parametrize("case", CASES)
def test_the_operation_passes_opcheck(case: str) -> None:
    """The operation returns shapes without data and no aliases, and its backward pass can be traced."""
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    traced = () if case == "dropout" else ("test_aot_dispatch_dynamic",)  # compares two runs, so nothing may be random
    torch.library.opcheck(_attend, (*tensors(torch.float32), *arguments(**CASES[case])), test_utils=tests + traced)


def test_dropout_leaves_the_mean() -> None:
    inputs, options = tensors(torch.float32), arguments(dropout=0.4)
    with torch.no_grad():
        exact = _attend(*inputs, *arguments())[0]
        outputs = torch.stack([_attend(*inputs, *options)[0] for _ in range(2000)])
    assert not torch.equal(outputs[0], outputs[1])
    assert (outputs.mean(0) - exact).abs().max() < 0.15


@pytest.mark.parametrize("window", [None, 3])
def test_calls_of_the_flash_kernel_have_the_right_shapes(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """On meta tensors, the outputs have the shapes for which graphs are compiled."""
    monkeypatch.setattr(module, "has_kernel", lambda *_: True)
    query, key, value = (t.detach().bfloat16().to("meta") for t in tensors(torch.float32, width=8))
    offsets, ends, *options = arguments(window=window)
    rows = (offsets.to("meta"), ends, *options)
    results = _attend._init_fn(query, key, value, *rows)
    told = _attend(query, key, value, *rows)
    grads = _differentiate._init_fn(results[0], query, key, value, *results, *rows)
    told_grads = _differentiate(results[0], query, key, value, *results, *rows)
    for got, expected in zip((*results[:2], *grads), (*told[:2], *told_grads), strict=True):
        assert (got.shape, got.stride(), got.dtype) == (expected.shape, expected.stride(), expected.dtype)
    assert [g.shape[2] for g in grads] == [4, 2, 2]  # fewer key and value heads, not repeated
