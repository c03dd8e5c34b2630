"""Gradients in host memory are read while sums are written, in any order that two streams may take."""

import pytest
import torch

from horizon_lm.device import cuda_link
from horizon_lm.device.cuda_link import CudaLink
from tests.support.queued_streams import Order, Streams, beside_first, lose_waits, own_first, replace_cuda, shuffled

PIECE, PIECES = 32, 6


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = replace_cuda(monkeypatch)
    accumulate = cuda_link._accumulate
    monkeypatch.setattr(cuda_link, "_accumulate", lambda *tensors: streams.enqueue("add", lambda: accumulate(*tensors)))
    monkeypatch.setattr(cuda_link, "_sum_of_squares", lambda norms: norms)
    monkeypatch.setattr(cuda_link, "_PIECE_ELEMENTS", 2 * PIECE)
    return streams


def add_two(streams: Streams, choose: Order, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Land two gradients, the second where the first is. Return whether the sum is right."""
    link = CudaLink(torch.device("cpu"))
    before, *sources = (torch.randn(PIECE * PIECES - 1) for _ in range(3))
    kept = before.to(dtype)
    expected = kept.clone()
    for source in sources:
        link.land(kept, source, add=True)
        expected = (expected.float() + source).to(dtype)
    streams.run(choose)
    return torch.equal(kept, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("choose", [own_first, beside_first, *map(shuffled, range(8))])
def test_sums_are_right_in_any_order(streams: Streams, choose: Order, dtype: torch.dtype) -> None:
    assert add_two(streams, choose, dtype)


@pytest.mark.parametrize("lost", ["read", "free"])
def test_a_missing_wait_is_found(streams: Streams, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """Negative control."""
    lose_waits(monkeypatch, streams, own=lost == "read")
    assert not add_two(streams, own_first if lost == "read" else beside_first)


def test_a_piece_is_read_while_the_one_before_is_written(streams: Streams) -> None:
    """Each piece crosses the link twice, and all but one copy in each direction at the same time."""
    kept, source = torch.zeros(PIECE * PIECES), torch.ones(PIECE * PIECES)
    CudaLink(torch.device("cpu")).land(kept, source, add=True)
    assert streams.copy_times() == PIECES + 1
    assert torch.equal(kept, source)
