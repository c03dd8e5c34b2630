"""Decode parts of quantized weights in host memory, in one pass and in threads, bit-equal to the codecs' torch code.

Shapes: N elements of a flat tensor, S elements that share a scale; O rows and I columns of a matrix.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch

from horizon_lm.memory.arena import as_array
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.memory.codecs.bnb4bit import Bnb4Bit
from horizon_lm.memory.codecs.fp8 import Fp8
from horizon_lm.memory.codecs.int4 import Int4
from horizon_lm.memory.codecs.mxfp4 import VALUES, Mxfp4
from horizon_lm.memory.codecs.stack import Rows, Stack
from horizon_lm.memory.kernels.bits import F32, U32, float_of, inlined, kernel, nearest, widen

Components = Mapping[str, torch.Tensor]


def decode(codec: Codec, components: Components, out: torch.Tensor, dtype: torch.dtype) -> None:
    """Decode components into ``out``. The arguments are those of `Codec.decode_part`; any thread may call this."""
    form = _FORMS.get((dtype, out.dtype))  # None: no kernel rounds like that, only the codec's torch code
    if isinstance(codec, Rows):
        decode(codec.of, components, out, dtype)
    elif isinstance(codec, Stack):
        for index, each in enumerate(out):
            decode(codec.of, {name: part[index] for name, part in components.items()}, each, dtype)
    elif form is None or not out.is_contiguous() or type(codec) not in _DECODERS:
        codec.decode_part(components, out, dtype)
    else:
        _DECODERS[type(codec)](codec, components, out, form)


@inlined
def _same(value: Any) -> Any:
    return value


@inlined
def _rounded(value: Any) -> Any:
    return widen(nearest(value))


_FORMS = {  # how a value in fp32 is stored, by the dtype it is rounded to and that of the output
    (torch.float32, torch.float32): "float32",
    (torch.bfloat16, torch.bfloat16): "bfloat16",
    (torch.bfloat16, torch.float32): "rounded",
}
_STORE = {"float32": _same, "bfloat16": nearest, "rounded": _rounded}
_E2M1 = np.array([*VALUES, *(-value for value in VALUES)], F32)
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


def _decode_bnb4bit(codec: Bnb4Bit, components: Components, out: torch.Tensor, form: str) -> None:
    """Decode 4-bit codes."""
    tensors = components["weight"], codec.scales(components), components["quant_map"]
    codes, scales, table = (each.contiguous().numpy() for each in tensors)
    _bnb4bit_kernel(form)(codes, scales, table, codec.blocksize, as_array(out.view(-1)))


def _decode_mxfp4(codec: Mxfp4, components: Components, out: torch.Tensor, form: str) -> None:
    """Decode stacked matrices (E, I, O)."""
    for blocks, scales, matrix in zip(components["blocks"], components["scales"], out, strict=True):
        _mxfp4_kernel(form)(blocks.numpy(), scales.numpy(), _E2M1, as_array(matrix))


def _decode_fp8(codec: Fp8, components: Components, out: torch.Tensor, form: str) -> None:
    """Decode a matrix (O, I) with a scale for each tile."""
    codes, scales = components["weight"].view(torch.uint8).numpy(), components["weight_scale_inv"].float().numpy()
    _fp8_kernel(form)(codes, scales, _E4M3, *codec.tile, as_array(out))


def _decode_int4(codec: Int4, components: Components, out: torch.Tensor, form: str) -> None:
    """Decode a matrix (O, I) with a scale for each group of a row."""
    pairs, scales = components["weight_packed"].view(torch.uint8).numpy(), components["weight_scale"].float().numpy()
    _int4_kernel(form)(pairs, scales, as_array(out))


_DECODERS: dict[type[Codec], Callable[[Any, Components, torch.Tensor, str], None]] = {
    Bnb4Bit: _decode_bnb4bit, Mxfp4: _decode_mxfp4, Fp8: _decode_fp8, Int4: _decode_int4
}  # fmt: skip


@cache
def _bnb4bit_kernel(form: str) -> Any:
    """Compile a decoder of pairs of codes (N / 2,) with scales (N / blocksize,) and the value of each code (16,) to (N,)."""
    store = _STORE[form]

    @kernel
    def decode(codes: Any, scales: Any, table: Any, blocksize: int, out: Any) -> None:
        for block in range(len(scales)):
            start, stop, scale = block * blocksize, min(len(out), (block + 1) * blocksize), scales[block]
            for pair in range(start // 2, stop // 2):  # blocks have an even number of elements
                out[2 * pair] = store(F32(table[codes[pair] >> 4] * scale))
                out[2 * pair + 1] = store(F32(table[codes[pair] & 15] * scale))
            if stop % 2:
                out[stop - 1] = store(F32(table[codes[stop // 2] >> 4] * scale))

    return decode


@cache
def _mxfp4_kernel(form: str) -> Any:
    """Compile a decoder of blocks (I / 32, 16, O) and scales (I / 32, O), with the value of each code (16,), to (I, O).

    A scale is the exponent of a power of two, in the bits of a float; 0 is the subnormal 2**-127.
    """
    store = _STORE[form]

    @kernel
    def decode(blocks: Any, scales: Any, table: Any, out: Any) -> None:
        width = blocks.shape[2]
        factors = np.empty(width, F32)
        for block in range(blocks.shape[0]):
            for column in range(width):
                scale = U32(scales[block, column])
                factors[column] = float_of(scale << U32(23)) if scale else float_of(U32(1 << 22))
            for row in range(16):
                codes, top = blocks[block, row], 32 * block + 2 * row
                low, high = out[top], out[top + 1]
                for column in range(width):
                    low[column] = store(F32(table[codes[column] & 15] * factors[column]))
                    high[column] = store(F32(table[codes[column] >> 4] * factors[column]))

    return decode


@cache
def _fp8_kernel(form: str) -> Any:
    """Compile a decoder of codes (O, I) with a scale for each tile and the value of each code (256,) to (O, I)."""
    store = _STORE[form]

    @kernel
    def decode(codes: Any, scales: Any, table: Any, tile_rows: int, tile_columns: int, out: Any) -> None:
        for row in range(out.shape[0]):
            row_codes, row_out, row_scales = codes[row], out[row], scales[row // tile_rows]
            for tile in range(len(row_scales)):
                scale = row_scales[tile]
                for column in range(tile * tile_columns, min(len(row_out), (tile + 1) * tile_columns)):
                    row_out[column] = store(F32(table[row_codes[column]] * scale))

    return decode


@cache
def _int4_kernel(form: str) -> Any:
    """Compile a decoder of pairs of codes (O, I / 2) with scales (O, groups) to (O, I)."""
    store = _STORE[form]

    @kernel
    def decode(pairs: Any, scales: Any, out: Any) -> None:
        half = pairs.shape[1] // scales.shape[1]  # pairs of a group
        for row in range(out.shape[0]):
            row_pairs, row_out, row_scales = pairs[row], out[row], scales[row]
            for group in range(len(row_scales)):
                scale = row_scales[group]
                for pair in range(group * half, (group + 1) * half):
                    codes = row_pairs[pair]
                    row_out[2 * pair] = store(F32(F32(np.int32(codes & 15) - 8) * scale))
                    row_out[2 * pair + 1] = store(F32(F32(np.int32(codes >> 4) - 8) * scale))

    return decode
