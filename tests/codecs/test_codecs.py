"""Codecs of quantized weights, against the decoders of the libraries that the formats come from."""

from typing import Any

import pytest
import torch

from horizon_lm.errors import ConfigError
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.memory.codecs.bnb4bit import Bnb4Bit
from horizon_lm.memory.codecs.fp8 import Fp8
from horizon_lm.memory.codecs.int4 import Int4
from horizon_lm.memory.codecs.mxfp4 import Mxfp4
from horizon_lm.memory.codecs.stack import Stack
from tests.support.int4_folders import decoded
from tests.support.quantized_tensors import CASES, DTYPES, drawn, packed, packed_case


@pytest.mark.parametrize("name", CASES)
def test_parts_decode_like_the_whole(name: str) -> None:
    codec, shape, data = packed_case(name)
    whole = codec.decode(data, torch.empty(shape))
    components = codec.views(data, shape)
    for max_bytes in (1, 3000, 1 << 30):
        stop = 0
        for part in codec.parts(shape, max_bytes):
            assert part.start == stop
            stop = part.stop
            rows = {name: components[name][rows] for name, rows in part.rows.items()}
            small = torch.zeros(codec.num_bytes(part.shape), dtype=torch.uint8)
            for each, view in codec.views(small, part.shape).items():
                view.copy_(rows[each])
            got = codec.decode(small, torch.empty(part.shape))
            assert torch.equal(got.view(-1), whole.view(-1)[part.start : part.stop])
        assert stop == whole.numel()


@pytest.mark.parametrize(
    ("codec", "shape"),
    [
        (Mxfp4(), (2, 320, 64)), (Stack(Bnb4Bit(nested=True)), (2, 512, 256)), (Stack(Fp8((32, 32))), (2, 160, 96)),
        (Stack(Int4()), (2, 160, 96)),
    ],
)  # fmt: skip
def test_one_expert_is_cut(codec: Codec, shape: tuple[int, ...]) -> None:
    """One expert of a mixture may be larger than the memory that codes pass through on their way."""
    data = packed(codec, drawn(*shape))
    components, whole = codec.views(data, shape), codec.decode(data, torch.empty(shape))
    max_bytes, stop = data.numel() // 4, 0
    for part in codec.parts(shape, max_bytes):
        rows = {name: components[name][index] for name, index in part.rows.items()}
        assert sum(each.nbytes for each in rows.values()) <= max_bytes + 1100  # with the tables
        assert part.start == stop
        stop, out = part.stop, torch.empty(part.shape)
        codec.decode_components(rows, out)
        assert torch.equal(out.view(-1), whole.view(-1)[part.start : part.stop])
    assert stop == whole.numel()


@pytest.mark.parametrize("name", CASES)
def test_values_survive_roughly_and_each_byte_counts(name: str) -> None:
    codec, shape = CASES[name]
    weight = drawn(*shape)
    data = packed(codec, weight)
    decoded = codec.decode(data, torch.empty(shape))
    assert (decoded - weight).norm() < 0.16 * weight.norm()
    for dtype in DTYPES:
        assert torch.equal(codec.decode(data, torch.empty(shape, dtype=dtype)), decoded.to(dtype))
    for component, view in codec.views(data, shape).items():
        if not component.endswith("quant_map"):  # an entry of a table may be unused
            raw = view.view(-1).view(torch.uint8)
            raw[3] ^= 0x11
            assert not torch.equal(codec.decode(data, torch.empty(shape)), decoded)
            raw[3] ^= 0x11


@pytest.mark.parametrize(
    ("codec", "shape", "expected"),
    [
        (Bnb4Bit(), (4096, 4096), 0.5625),
        (Bnb4Bit(nested=True), (4096, 4096), 0.515869140625),
        (Mxfp4(), (32, 2880, 5760), 0.53125),
        (Fp8(), (7168, 2048), 1.000244140625),
        (Int4(), (2048, 7168), 0.5625),
        (Int4(128), (2048, 7168), 0.515625),
    ],
)
def test_bytes_per_parameter(codec: Codec, shape: tuple[int, ...], expected: float) -> None:
    per_parameter = codec.num_bytes(shape) / torch.Size(shape).numel()
    assert expected <= per_parameter < expected + 1e-4


def test_damaged_components_are_rejected() -> None:
    codec, shape = Bnb4Bit(), (64, 64)
    data = packed(codec, drawn(*shape))
    components = {name: each.clone() for name, each in codec.views(data, shape).items()}
    with pytest.raises(ConfigError, match="absmax is missing"):
        codec.pack({name: each for name, each in components.items() if name != "absmax"}, data, shape)
    with pytest.raises(ConfigError, match=r"absmax is float32 of shape \(63,\), but float32 of shape \(64,\)"):
        codec.pack(components | {"absmax": components["absmax"][:63]}, data, shape)
    with pytest.raises(ConfigError, match="weight is int8"):
        codec.pack(components | {"weight": components["weight"].view(torch.int8)}, data, shape)


@pytest.mark.parametrize("name", ["nf4", "nf4 nested", "fp4"])
def test_quantizing_in_pieces_changes_nothing(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, whole = packed_case(name)
    monkeypatch.setattr("horizon_lm.memory.codecs.bnb4bit._AT_ONCE", 300)
    assert torch.equal(packed_case(name)[2], whole)


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("shape", [(128, 256), (96, 80), (64, 33), (1024, 2048)])
def test_bitsandbytes(quant_type: str, nested: bool, shape: tuple[int, int]) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    weight = drawn(*shape)
    flat = weight.view(1, -1)  # its decoder for AVX-512 is wrong for some numbers of columns
    codes, state = functional.quantize_4bit(flat, blocksize=64, compress_statistics=nested, quant_type=quant_type)
    codec = Bnb4Bit(quant_type, 64, nested)
    data = packed(codec, weight)
    theirs = {"weight": codes.view(-1), "absmax": state.absmax, "quant_map": state.code}
    if nested:
        theirs |= {
            "nested_absmax": state.state2.absmax, "nested_quant_map": state.state2.code,
            "nested_offset": state.offset.view(1),
        }  # fmt: skip
    for name, view in codec.views(data, shape).items():
        assert torch.equal(view, theirs[name]), name
    for dtype in DTYPES:
        expected = functional.dequantize_4bit(codes, state).to(dtype).view(shape)
        assert torch.equal(codec.decode(data, torch.empty(shape, dtype=dtype)), expected)


def test_transformers_mxfp4() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 40, 2, 16), dtype=torch.uint8, generator=generator)
    scales = torch.randint(100, 140, (3, 40, 2), dtype=torch.uint8, generator=generator)
    codec, shape = Mxfp4(), (3, 64, 40)
    data = torch.zeros(codec.num_bytes(shape), dtype=torch.uint8)
    codec.pack({"blocks": blocks, "scales": scales}, data, shape)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(codec.decode(data, torch.empty(shape, dtype=torch.bfloat16)), expected)
    again = packed(codec, expected)
    assert torch.equal(codec.decode(again, torch.empty(shape, dtype=torch.bfloat16)), expected)


@pytest.mark.parametrize("shape", [(256, 384), (200, 300)])
def test_compressed_tensors_fp8(shape: tuple[int, int]) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    codec = Fp8()
    data = packed(codec, drawn(*shape))
    views = codec.views(data, shape)
    args = QuantizationArgs(num_bits=8, type="float", strategy="block", block_structure=[128, 128])
    expected = dequantize(views["weight"], views["weight_scale_inv"], args=args, dtype=torch.float32)
    assert torch.equal(codec.decode(data, torch.empty(shape)), expected)


def test_transformers_fp8() -> None:
    module: Any = pytest.importorskip("transformers.integrations.finegrained_fp8")
    codec, shape = Fp8(), (256, 384)
    data = packed(codec, drawn(*shape))
    views = codec.views(data, shape)
    operation = module.Fp8Dequantize(type("Quantizer", (), {"quantization_config": None})())
    for dtype in (torch.bfloat16, torch.float32):
        got = codec.decode(data, torch.empty(shape, dtype=dtype))
        expected = operation._dequantize_one(views["weight"], views["weight_scale_inv"])
        assert torch.equal(got, expected.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("group_size", [32, 64, 128, None])
def test_compressed_tensors_int4(group_size: int | None, dtype: torch.dtype) -> None:
    """Random words decode to what compressed-tensors and plain torch decode, and its own words and scales are ours."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    strategy = {"strategy": "channel"} if group_size is None else {"strategy": "group", "group_size": group_size}
    args = QuantizationArgs(num_bits=4, type="int", symmetric=True, **strategy)
    scheme, compressor = (
        QuantizationScheme(targets=["Linear"], weights=args), BaseCompressor.get_value_from_registry("pack-quantized")
    )  # fmt: skip
    codec, shape = Int4(group_size, dtype), (24, 256)
    weight = drawn(*shape).to(dtype)
    weight[:2] = 0.0
    data = packed(codec, weight)
    components = codec.views(data, shape)
    groups = weight.view(*components["weight_scale"].shape, -1)
    scales, zeros = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    theirs = compressor.compress({"weight": weight, "weight_scale": scales, "weight_zero_point": zeros}, scheme)
    assert theirs.keys() == {*components, "weight_shape"}
    assert all(torch.equal(components[name], theirs[name]) for name in components)
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31, (24, 32), dtype=torch.int32, generator=generator)
    scales = -scales + torch.arange(scales.numel()).view(scales.shape) % 3 * 0.01  # of both signs
    tensors = {"weight_packed": words, "weight_scale": scales.to(dtype)}
    expected = compressor.decompress(tensors | {"weight_shape": torch.tensor(shape)}, scheme)["weight"]
    codec.pack(tensors, data, shape)
    got = codec.decode(data, torch.empty(shape, dtype=dtype))
    for each in (expected, decoded(words, tensors["weight_scale"])):
        assert each.dtype == dtype
        assert torch.equal(got.view(torch.uint8), each.contiguous().view(torch.uint8))  # also the signs of zeros
    assert len(torch.unique(decoded(words, torch.ones_like(scales)))) == 16


@pytest.mark.parametrize("shape", [(64,), (4, 64, 64), (64, 48)])
def test_shapes_that_int4_does_not_have(shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="cannot be in INT4, which has matrices of rows in groups of 32"):
        Int4().num_bytes(shape)
