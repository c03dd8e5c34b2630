"""Compare grouped-query attention over segments on the device with float32 attention, segment by segment."""

from typing import Any

import pytest
import torch

from horizon_lm.model.attention import Segments
from horizon_lm.model.segment_attention import by_segment, has_kernel, segment_attention
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
