"""Compare quantized weights that are decoded on the device with the codecs' torch code on the CPU, bit for bit."""

import importlib.util
from typing import Any

import pytest
import torch

from horizon_lm.device.cuda_link import CudaLink, packed_bytes
from horizon_lm.memory.kernels import decoding
from tests.gpu.accelerator import Accelerator
from tests.support.quantized_tensors import CASES, DTYPES, packed_case

pytestmark = pytest.mark.gpu


@pytest.fixture(params=["triton", "torch"])
def device(request: pytest.FixtureRequest, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return where to decode; with Triton, or with torch as on a machine without it."""
    if request.param == "torch":
        monkeypatch.setattr(decoding, "has_triton", lambda: False)
    elif not accelerator.is_cuda or importlib.util.find_spec("triton") is None:
        pytest.skip("Triton's kernels need a GPU; tests/kernels/test_decoding.py has them interpreted")
    return accelerator.torch_device.type


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_values_equal_those_of_the_cpu(device: str, name: str, dtype: torch.dtype) -> None:
    codec, shape, packed = packed_case(name)
    expected = codec.decode(packed, torch.empty(shape, dtype=dtype))
    out = torch.empty(shape, dtype=dtype, device=device)
    decoding.decode(codec, codec.views(packed.to(device), shape), out, dtype)
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("name", CASES)
def test_values_are_rounded_to_their_own_dtype_first(device: str, name: str) -> None:
    codec, shape, packed = packed_case(name)
    out = torch.empty(shape, device=device)
    decoding.decode(codec, codec.views(packed.to(device), shape), out, torch.bfloat16)
    assert torch.equal(out.cpu(), codec.decode(packed, torch.empty(shape, dtype=torch.bfloat16)).float())


@pytest.mark.parametrize("name", CASES)
def test_warming_up_compiles_all_that_a_link_needs(device: str, only_cuda: Accelerator, name: str) -> None:
    """A link that decodes after it finds each kernel compiled."""
    if not decoding.has_triton():
        pytest.skip("torch compiles nothing")
    codec, shape, packed = packed_case(name)
    kernels = decoding._kernels()
    compiled = [getattr(kernels, each) for each in ("decode_4bit", "decode_mxfp4", "decode_fp8", "decode_int4")]
    decoding.warm_up(codec, shape, torch.float32, torch.float16, packed_bytes(), only_cuda.torch_device)
    before = [_variants(each) for each in compiled]
    assert any(before)
    out = torch.empty(shape, device=device)
    CudaLink(only_cuda.torch_device).decode(out, packed, codec, torch.float16)
    assert torch.equal(out.cpu(), codec.decode(packed, torch.empty(shape, dtype=torch.float16)).float())
    assert [_variants(each) for each in compiled] == before


def _variants(kernel: Any) -> int:
    """Return how many variants of a kernel Triton has compiled on this device."""
    return len(kernel.device_caches[torch.cuda.current_device()][0])


@pytest.mark.parametrize("name", CASES)
def test_a_link_decodes_what_it_copies(device: str, only_cuda: Accelerator, name: str) -> None:
    codec, shape, packed = packed_case(name)
    out = torch.empty(shape, dtype=torch.bfloat16, device=device)
    CudaLink(only_cuda.torch_device).decode(out, packed, codec, torch.bfloat16)
    assert torch.equal(out.cpu(), codec.decode(packed, torch.empty(shape, dtype=torch.bfloat16)))


def test_nothing_is_allocated_or_awaited(device: str, only_cuda: Accelerator) -> None:
    if not decoding.has_triton():
        pytest.skip("torch allocates temporary tensors")
    for name in CASES:
        codec, shape, packed = packed_case(name)
        components = codec.views(packed.cuda(), shape)
        for dtype in (torch.bfloat16, torch.float32):  # the same as rounded values have, and another
            out = torch.empty(shape, dtype=dtype, device="cuda")
            decoding.decode(codec, components, out, torch.bfloat16)  # compiles
            torch.cuda.synchronize()
            before = torch.cuda.memory_stats()["allocation.all.allocated"]
            with only_cuda.without_synchronization():
                decoding.decode(codec, components, out, torch.bfloat16)
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == before, (name, dtype)
