"""Triton kernels that decode parts of quantized weights on a GPU, bit-equal to the codecs' torch code.

Values are multiplied in fp32 and rounded once, or first to the dtype ``via`` and then to that of the result. Formats are decoded from
their bits, because not every GPU converts FP8. bf16 is rounded by its bits, too, and stored through a pointer to int16. Launch them
without fusing multiply and add (``enable_fp_fusion=False``).
"""

import torch
import triton
import triton.language as tl

BLOCK = 1024  # elements of a program
# The argument ``via`` of the kernels, by the dtype that values are rounded to first; None for the dtype of the result alone.
ROUNDED_TO = {None: tl.float32, torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def _power_of_two(code: tl.tensor) -> tl.tensor:
    """Return the fp32 value of E8M0 codes in int32; code 0 is subnormal."""
    return tl.where(code == 0, 1 << 22, code << 23).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(code: tl.tensor) -> tl.tensor:
    """Return the fp32 value of E2M1 codes in int32."""
    exponent, mantissa = (code >> 1) & 3, code & 1
    normal = ((exponent + 126) << 23) | (mantissa << 22)
    subnormal = mantissa * 0x3F000000  # 0 or 0.5
    return (tl.where(exponent == 0, subnormal, normal) | ((code >> 3) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _e4m3(code: tl.tensor) -> tl.tensor:
    """Return the fp32 value of E4M3 codes in int32."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    normal = (((exponent + 120) << 23) | (mantissa << 20)).to(tl.float32, bitcast=True)
    magnitude = tl.where(exponent == 0, mantissa.to(tl.float32) * 0.001953125, normal)  # 2**-9
    return (magnitude.to(tl.int32, bitcast=True) | ((code >> 7) << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _bf16_bits(value: tl.tensor) -> tl.tensor:
    """Return the bits of fp32 values in bf16, in the lower half of an int32: to nearest, ties to even. No value is NaN."""
    bits = value.to(tl.int32, bitcast=True)
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def _rounded(value: tl.tensor, out: tl.tensor, via: tl.constexpr) -> tl.tensor:
    """Round fp32 values to the dtype ``via``, then to the element type of ``out``, where int16 stands for the bits of bf16: to nearest,
    ties to even. No value is NaN.
    """
    if via == tl.bfloat16:
        value = (_bf16_bits(value) << 16).to(tl.float32, bitcast=True)
    elif via == tl.float16:
        value = value.to(tl.float16).to(tl.float32)
    if out.dtype.element_ty == tl.int16:
        return _bf16_bits(value).to(tl.int16)
    else:
        return value.to(out.dtype.element_ty)


@triton.jit
def decode_4bit(
    weight: tl.tensor, table: tl.tensor, absmax: tl.tensor, nested_table: tl.tensor, nested_absmax: tl.tensor,
    nested_offset: tl.tensor, out: tl.tensor, numel: tl.tensor, blocksize: tl.constexpr, nested: tl.constexpr, via: tl.constexpr,
    size: tl.constexpr,
) -> None:  # fmt: skip
    """Decode 4-bit codes of bitsandbytes, two a byte with the high four bits first."""
    i = tl.program_id(0) * size + tl.arange(0, size)
    inside = i < numel
    pair = tl.load(weight + i // 2, mask=inside, other=0).to(tl.int32)
    code = (pair >> (4 - 4 * (i % 2))) & 15
    block = i // blocksize
    if nested:
        scale = tl.load(nested_table + tl.load(absmax + block, mask=inside, other=0).to(tl.int32))
        scale = scale * tl.load(nested_absmax + block // 256, mask=inside, other=0.0)
        scale = scale + tl.load(nested_offset)
    else:
        scale = tl.load(absmax + block, mask=inside, other=0.0)
    tl.store(out + i, _rounded(tl.load(table + code) * scale, out, via), mask=inside)


@triton.jit
def decode_mxfp4(
    blocks: tl.tensor, scales: tl.tensor, out: tl.tensor, num_out: tl.tensor, via: tl.constexpr, size: tl.constexpr
) -> None:  # fmt: skip
    """Decode MXFP4 bytes (in/2, out) and scales (in/32, out) to (in, out); a program decodes a part of a row of bytes."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * size + tl.arange(0, size)
    inside = column < num_out
    pair = tl.load(blocks + row * num_out + column, mask=inside, other=0).to(tl.int32)
    scale = _power_of_two(tl.load(scales + row // 16 * num_out + column, mask=inside, other=0).to(tl.int32))
    low, high = _e2m1(pair & 15) * scale, _e2m1(pair >> 4) * scale
    first = out + 2 * row * num_out + column
    tl.store(first, _rounded(low, out, via), mask=inside)
    tl.store(first + num_out, _rounded(high, out, via), mask=inside)


@triton.jit
def decode_fp8(
    weight: tl.tensor, scales: tl.tensor, out: tl.tensor, num_rows: tl.tensor, num_columns: tl.tensor, grid_rows: tl.tensor,
    grid_columns: tl.tensor, tile_rows: tl.constexpr, tile_columns: tl.constexpr, e8m0: tl.constexpr, via: tl.constexpr,
    size: tl.constexpr,
) -> None:  # fmt: skip
    """Decode matrices of E4M3 values, one after the other; a program decodes a part of a row.

    Args:
        weight, scales, out: codes, scales and decoded values.
        num_rows, num_columns: shape of each matrix.
        grid_rows, grid_columns: shape of its scales.
        tile_rows, tile_columns: values that share a scale.
        e8m0: scales are powers of two.
        via: see `ROUNDED_TO`.
        size: columns of a program.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * size + tl.arange(0, size)
    inside = column < num_columns
    line = (row // num_rows * grid_rows + row % num_rows // tile_rows) * grid_columns
    code = tl.load(weight + row * num_columns + column, mask=inside, other=0).to(tl.int32)
    scale = tl.load(scales + line + column // tile_columns, mask=inside, other=0)
    scale = _power_of_two(scale.to(tl.int32)) if e8m0 else scale.to(tl.float32)
    tl.store(out + row * num_columns + column, _rounded(_e4m3(code) * scale, out, via), mask=inside)


@triton.jit
def decode_int4(
    pairs: tl.tensor, scales: tl.tensor, out: tl.tensor, num_columns: tl.tensor, columns_of_scale: tl.tensor,
    via: tl.constexpr, size: tl.constexpr,
) -> None:  # fmt: skip
    """Decode rows of INT4 codes, two a byte with the low four bits first; a program decodes a part of a row.

    Args:
        pairs, scales, out: codes, scales and decoded values.
        num_columns: values of a row.
        columns_of_scale: values that share a scale, of which a row has a whole number.
        via: see `ROUNDED_TO`.
        size: columns of a program.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * size + tl.arange(0, size)
    inside = column < num_columns
    pair = tl.load(pairs + row * (num_columns // 2) + column // 2, mask=inside, other=0).to(tl.int32)
    code = ((pair >> (4 * (column % 2))) & 15) - 8
    scale = tl.load(
        scales + row * (num_columns // columns_of_scale) + column // columns_of_scale, mask=inside, other=0.0
    )
    value = code.to(tl.float32) * scale.to(tl.float32)
    tl.store(out + row * num_columns + column, _rounded(value, out, via), mask=inside)
