"""Compare grouped-query attention over segments on the device with float32 attention, segment by segment."""

from typing import Any

import pytest
import torch

from horizon_lm.model.attention import Segments
from horizon_lm.model.segment_attention import by_segment, has_kernel, segment_attention
from horizon_lm.model.sink_attention import sink_attention
from tests.gpu.accelerator import Accelerator

pytestmark = pytest.mark.gpu

LENGTHS = [[100, 28], [1, 60, 67]]
# A kernel may round, where torch's code does not, the scores' probabilities, their gradients, the results of each head, and the
# sum over heads that share keys and values; each by at most half of the distance to the next number.
_ROUNDING = 4 * torch.finfo(torch.bfloat16).eps / 2


def _gradients(output: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, output.numel(), device=output.device).view(output.shape)
    return [
        output.detach().float(),
        *(g.float() for g in torch.autograd.grad((output.float() * weights).sum(), inputs)),
    ]


def _error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("heads", [8, 2, 1], ids=lambda count: f"{count} of 8 heads")
@pytest.mark.parametrize(
    "options", [{}, {"window": 16}, {"scaling": 0.5}, {"rows": None}, {"rows": None, "window": 16}], ids=str
)
def test_attention_over_segments(accelerator: Accelerator, heads: int, options: dict[str, Any]) -> None:
    device, generator = accelerator.torch_device, torch.Generator().manual_seed(0)
    exact = [torch.randn(2, count, 128, 64, generator=generator).bfloat16().float() for count in (8, heads, heads)]
    exact = [t.to(device).requires_grad_() for t in exact]
    halves = [t.detach().bfloat16().requires_grad_() for t in exact]
    offsets = Segments(LENGTHS, device).offsets(0, 2)
    options = {"rows": offsets, "window": None, "scaling": None} | options
    borders = [0, 128, 256] if options["rows"] is None else offsets[1].tolist()
    expected = _gradients(by_segment(*exact, borders, options["scaling"], 0.0, options["window"]), exact)
    plain = _gradients(by_segment(*halves, borders, options["scaling"], 0.0, options["window"]), halves)
    got = _gradients(segment_attention(*halves, **options), halves)
    assert has_kernel(halves[0], halves[2], 0.0) == accelerator.is_cuda  # otherwise the kernel was not tested
    for ours, theirs, true in zip(got, plain, expected, strict=True):
        assert _error(ours, true) < _error(theirs, true) + _ROUNDING


def _eagerly(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor, seen: torch.Tensor
) -> torch.Tensor:
    key, value = (t.repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value))
    scores = (query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5).masked_fill(~seen, torch.finfo(query.dtype).min)
    scores = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return (scores.softmax(-1)[..., :-1] @ value).transpose(1, 2)


@pytest.mark.parametrize("widths", [(64, 64), (192, 128), (512, 512)], ids=str)
@pytest.mark.parametrize("options", ["segments", "window", "mask"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_with_sinks(
    accelerator: Accelerator, widths: tuple[int, int], options: str, dtype: torch.dtype
) -> None:
    """Compare with eager attention in float64; some queries of the mask see no token."""
    device, generator = accelerator.torch_device, torch.Generator().manual_seed(0)
    sizes = [(2, 8, 77, widths[0]), (2, 2, 77, widths[0]), (2, 2, 77, widths[1]), (8,)]
    inputs = [torch.randn(size, generator=generator).to(device, dtype).requires_grad_() for size in sizes]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    distance = torch.arange(77, device=device)[:, None] - torch.arange(77, device=device)
    seen = (distance >= 0).expand(2, 1, 77, 77).clone()
    call: dict[str, Any] = {}
    if options == "segments":
        call["rows"] = Segments([[30, 47], [77]], device).offsets(0, 2)
        seen[0, :, 30:, :30] = False
    elif options == "window":
        call["window"] = 16
        seen &= distance < 16
    else:
        seen[0, ..., :5] = False
        call["mask"] = seen
    expected = _gradients(_eagerly(*exact, seen), exact)
    got = _gradients(sink_attention(*inputs, **call), inputs)
    for ours, true in zip(got, expected, strict=True):
        assert _error(ours, true) < 16 * torch.finfo(dtype).eps
