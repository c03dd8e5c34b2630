"""The Triton kernels that decode quantized weights, run by Triton's interpreter: bit-equal to the codecs' torch code."""

import importlib
import sys
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
import torch

from horizon_lm.device.cpu import HostLink
from horizon_lm.memory.codecs.fp8 import Fp8
from horizon_lm.memory.kernels import decoding
from tests.support.quantized_tensors import CASES, packed_case
from tests.support.thinned_cases import thinned

KERNELS = "horizon_lm.memory.kernels.decoding_kernels"
RUNS = [(name, torch.bfloat16) for name in CASES] + [
    (name, dtype) for name in ("nf4 nested", "mxfp4", "fp8", "int4") for dtype in (torch.float16, torch.float32)
]


@pytest.fixture(scope="module")
def interpreted() -> Any:
    """Have the kernels interpreted, which Triton decides when they are defined."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        sys.modules.pop(KERNELS, None)
        yield importlib.import_module(KERNELS)
    sys.modules.pop(KERNELS, None)


@pytest.mark.parametrize(("name", "dtype"), thinned(RUNS, every=5), ids=str)
def test_kernels_equal_torch(interpreted: Any, name: str, dtype: torch.dtype) -> None:
    codec, shape, packed = packed_case(name)
    expected = codec.decode(packed, torch.empty(shape, dtype=dtype))
    components = codec.views(packed, shape)
    for max_bytes in (packed.numel() // 2, packed.numel() // 5):
        for part in codec.parts(shape, max_bytes):
            out = torch.empty(part.shape, dtype=dtype)
            decoding.decode(codec, {each: components[each][rows] for each, rows in part.rows.items()}, out, dtype)
            assert torch.equal(out.view(-1), expected.view(-1)[part.start : part.stop])


VIA = [("nf4", *pair) for pair in permutations((torch.bfloat16, torch.float16, torch.float32), 2)] + [
    (name, torch.bfloat16, torch.float32) for name in ("nf4 nested", "mxfp4", "fp8", "int4", "stacked nf4", "stacked int4")
]  # fmt: skip


@pytest.mark.parametrize(("name", "first", "dtype"), VIA, ids=str)
def test_values_are_rounded_to_their_own_dtype_first(
    interpreted: Any, name: str, first: torch.dtype, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no memory is allocated for it: the thread that enqueues copies might wait for it."""
    codec, shape, packed = packed_case(name)
    expected, out = codec.decode(packed, torch.empty(shape, dtype=first)).to(dtype), torch.empty(shape, dtype=dtype)
    with monkeypatch.context() as patch:
        for allocate in ("empty", "empty_like", "zeros"):
            patch.setattr(torch, allocate, None)
        decoding.decode(codec, codec.views(packed, shape), out, first)
    assert torch.equal(out, expected)


def test_without_triton_torch_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "has_triton", lambda: False)
    for name in CASES:
        codec, shape, packed = packed_case(name)
        out = torch.empty(shape)
        decoding.decode(codec, codec.views(packed, shape), out, out.dtype)
        assert torch.equal(out, codec.decode(packed, torch.empty(shape)))


class WithoutKernels(Fp8):
    """A format for which no loops were written."""


def test_a_format_without_kernels_is_decoded_by_its_torch_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "has_triton", lambda: True)
    codec, shape, packed = packed_case("fp8")
    other, out = WithoutKernels(codec.tile, codec.scale_dtype), torch.empty(shape)
    expected = codec.decode(packed, torch.empty(shape))
    decoding.decode(other, other.views(packed, shape), out, out.dtype)
    assert torch.equal(out, expected)
    HostLink().decode(out.zero_(), packed, other, out.dtype)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("rounded", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("capability", thinned([90, 80], every=2))
def test_kernels_compile_for_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capability: int, rounded: torch.dtype | None
) -> None:
    """Compile without a GPU, and check that no product is fused with a sum, which would round once instead of twice."""
    pytest.importorskip("triton")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delitem(sys.modules, KERNELS, raising=False)
    kernels = importlib.import_module(KERNELS)
    monkeypatch.delitem(sys.modules, KERNELS)
    via = kernels.ROUNDED_TO[rounded]
    nested = dict.fromkeys(("table", "nested_table", "nested_absmax", "nested_offset"), "*fp32")
    nested |= {"weight": "*u8", "absmax": "*u8", "out": "*i16", "numel": "i32"}
    constants: dict[str, Any] = {"blocksize": 64, "nested": True, "via": via, "size": 1024}
    assert "fma" not in _compiled(kernels.decode_4bit, nested, constants, capability)
    assert "fma" in _compiled(kernels.decode_4bit, nested, constants, capability, fused=True)  # the control
    mxfp4 = {"blocks": "*u8", "scales": "*u8", "out": "*i16", "num_out": "i32"}
    assert "ftz" not in _compiled(kernels.decode_mxfp4, mxfp4, {"via": via, "size": 1024}, capability)
    fp8 = dict.fromkeys(("num_rows", "num_columns", "grid_rows", "grid_columns"), "i32")
    for scales, e8m0 in (("*fp32", False), ("*bf16", False), ("*u8", True)):
        constants = {"tile_rows": 128, "tile_columns": 128, "e8m0": e8m0, "via": via, "size": 1024}
        signature = fp8 | {"weight": "*u8", "scales": scales, "out": "*fp16"}
        assert "ftz" not in _compiled(kernels.decode_fp8, signature, constants, capability)
    for scales in ("*bf16", "*fp16", "*fp32"):
        int4 = {"pairs": "*u8", "scales": scales, "out": "*i16", "num_columns": "i32", "columns_of_scale": "i32"}
        assert "ftz" not in _compiled(kernels.decode_int4, int4, {"via": via, "size": 1024}, capability)


def _compiled(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], capability: int, fused: bool = False
) -> str:
    """Return the PTX of a kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(kernel, signature | dict.fromkeys(constants, "constexpr"), constants)
    target = GPUTarget("cuda", capability, 32)
    return str(triton.compile(source, target=target, options={"enable_fp_fusion": fused}).asm["ptx"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_host_kernels_equal_torch(name: str, dtype: torch.dtype) -> None:
    codec, shape, packed = packed_case(name)
    for rounded in (dtype, torch.bfloat16):
        expected = torch.empty(shape, dtype=dtype)
        codec.decode(packed, expected, rounded)
        out = torch.full(shape, float("nan"), dtype=dtype)
        HostLink().decode(out, packed, codec, rounded)
        assert torch.equal(out, expected)


def test_host_kernels_decode_extreme_scales() -> None:
    """The smallest and largest powers of two, whose products are subnormal or infinite."""
    codec, shape, packed = packed_case("mxfp4")
    scales = codec.views(packed, shape)["scales"]
    scales.copy_((torch.arange(scales.numel()) * 37 % 255).view(scales.shape))
    for dtype in (torch.float32, torch.bfloat16):
        out = torch.empty(shape, dtype=dtype)
        HostLink().decode(out, packed, codec, dtype)
        assert torch.equal(out, codec.decode(packed, torch.empty(shape, dtype=dtype)))
