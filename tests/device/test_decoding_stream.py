"""Codes cross the link while those before are decoded, in any order that two streams may take."""

from typing import Any

import pytest
import torch

from horizon_lm.device import cuda_link
from horizon_lm.device.cuda_link import CudaLink
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.memory.codecs.mxfp4 import Mxfp4
from tests.support.queued_streams import Order, Streams, beside_first, lose_waits, own_first, replace_cuda, shuffled

SHAPE = torch.Size((6, 64, 32))  # six matrices, one a part
PART = Mxfp4().num_bytes((1, *SHAPE[1:]))


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Streams:
    streams = replace_cuda(monkeypatch)

    def decode(codec: Codec, components: Any, out: torch.Tensor, dtype: torch.dtype) -> None:
        streams.enqueue("decode", lambda: codec.decode_part(components, out, dtype))

    monkeypatch.setattr(cuda_link, "decode", decode)
    monkeypatch.setattr(cuda_link, "_PACKED_BYTES", PART)
    monkeypatch.setattr(cuda_link, "_PACKED_BYTES_OF_TORCH", PART)
    monkeypatch.setattr(cuda_link, "_PIECE_ELEMENTS", 1024)
    return streams


def decode_two(streams: Streams, choose: Order) -> bool:
    """Decode two tensors. Return whether all values are right, and were before the next operation."""
    link, codec = CudaLink(torch.device("cpu")), Mxfp4()
    packed = [torch.randint(0, 256, (codec.num_bytes(SHAPE),), dtype=torch.uint8) for _ in range(2)]
    for each in packed:
        codec.views(each, SHAPE)["scales"].fill_(127)
    got = [torch.empty(SHAPE, dtype=torch.bfloat16) for _ in packed]
    for out, codes in zip(got, packed, strict=True):
        link.decode(out, codes, codec, torch.bfloat16)
    link.finish()
    streams.enqueue("copy", lambda: None)  # of the next operation
    streams.run(choose)
    return streams.log[-1][0] == "copy" and all(
        torch.equal(out, codec.decode(codes, torch.empty(SHAPE, dtype=torch.bfloat16)))
        for out, codes in zip(got, packed, strict=True)
    )


@pytest.mark.parametrize("choose", [own_first, beside_first, *map(shuffled, range(8))])
def test_values_are_right_in_any_order(streams: Streams, choose: Order) -> None:
    assert decode_two(streams, choose)


@pytest.mark.parametrize("lost", ["decoded", "arrived"])
def test_a_missing_wait_is_found(streams: Streams, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """Negative control."""
    lose_waits(monkeypatch, streams, own=lost == "decoded")
    assert not decode_two(streams, own_first if lost == "decoded" else beside_first)


def test_the_link_copies_while_the_part_before_is_decoded(streams: Streams) -> None:
    """Also from one tensor to the next; each part has two components."""
    assert decode_two(streams, own_first)
    at = {entry: place for place, entry in enumerate(streams.log)}
    assert all(at["copy", 2 * part + 2] < at["decode", part] for part in range(2 * SHAPE[0] - 1))
