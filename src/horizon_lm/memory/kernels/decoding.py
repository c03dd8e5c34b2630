"""Decode parts of quantized weights on a GPU, with Triton kernels, or with torch where Triton is not installed."""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from horizon_lm.memory.codecs.base import Codec
from horizon_lm.memory.codecs.bnb4bit import Bnb4Bit
from horizon_lm.memory.codecs.fp8 import Fp8
from horizon_lm.memory.codecs.int4 import Int4
from horizon_lm.memory.codecs.mxfp4 import Mxfp4
from horizon_lm.memory.codecs.stack import Rows, Stack

Components = Mapping[str, torch.Tensor]
_ALIGNED_ELEMENTS = 16  # so many elements of any dtype are a multiple of the 16 bytes that Triton looks at


@cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def decode(codec: Codec, components: Components, out: torch.Tensor, dtype: torch.dtype) -> None:
    """Decode components on the current stream, bit-equal to the codec's own `decode_part`.

    With Triton, no memory is allocated.

    Args:
        codec: the format.
        components: codes, scales and tables on the device.
        out: the decoded values, contiguous.
        dtype: dtype that values are rounded to before that of ``out``.
    """
    if isinstance(codec, Rows):
        decode(codec.of, components, out, dtype)
    elif not has_triton() or type(codec.of if isinstance(codec, Stack) else codec) not in _DECODERS:
        codec.decode_part(components, out, dtype)
    elif isinstance(codec, Stack) and not isinstance(codec.of, _OF_STACKS):
        for index, matrix in enumerate(out):  # the kernel of this format decodes one matrix of a stack at a time
            decode(codec.of, {name: part[index] for name, part in components.items()}, matrix, dtype)
    else:
        of_matrix = codec.of if isinstance(codec, Stack) else codec
        via = _kernels().ROUNDED_TO[None if dtype == out.dtype else dtype]
        _DECODERS[type(of_matrix)](of_matrix, components, out, via)


def warm_up(
    codec: Codec, shape: Sequence[int], out_dtype: torch.dtype, dtype: torch.dtype, max_bytes: int, device: torch.device
) -> None:
    """Compile the kernels that decode a tensor, which takes seconds: decode zeros, one part of each kind into which it is cut.

    Triton compiles a kernel once for each combination of dtypes, of sizes that are multiples of 16 or not, and of addresses that are.

    Args:
        codec: the format of the tensor.
        shape: its shape.
        out_dtype: dtype of the decoded values.
        dtype: dtype that values are rounded to first.
        max_bytes: packed bytes that are decoded at once.
        device: where to decode; memory for one part is allocated there and freed.
    """
    if not has_triton():
        return
    whole = {name: torch.empty(each.shape, device="meta") for name, each in codec.components(shape).items()}
    dtypes = {name: each.dtype for name, each in codec.components(shape).items()}
    compiled = set()
    for part in codec.parts(shape, max_bytes):
        sizes = {name: whole[name][rows].shape for name, rows in part.rows.items()}
        offset = part.start % _ALIGNED_ELEMENTS
        variant = (part.shape, offset, *sizes.values())
        if variant in compiled:
            continue
        compiled.add(variant)
        components = {name: torch.zeros(size, dtype=dtypes[name], device=device) for name, size in sizes.items()}
        out = torch.empty(offset + part.shape.numel(), dtype=out_dtype, device=device)[offset:]
        decode(codec, components, out.view(part.shape), dtype)


def _decode_4bit(codec: Bnb4Bit, components: Components, out: torch.Tensor, via: Any) -> None:
    """Decode 4-bit codes with a kernel. Without nested scales, three unused arguments get any tensor."""
    table = components["quant_map"]
    names = ("nested_quant_map", "nested_absmax", "nested_offset")
    nested = [components[name] for name in names] if codec.nested else [table] * 3
    kernels = _kernels()
    kernels.decode_4bit[(_programs(out.numel()),)](
        components["weight"], table, components["absmax"], *nested, _target(out), out.numel(), blocksize=codec.blocksize,
        nested=codec.nested, via=via, size=kernels.BLOCK, enable_fp_fusion=False,
    )  # fmt: skip


def _decode_mxfp4(codec: Mxfp4, components: Components, out: torch.Tensor, via: Any) -> None:
    """Decode blocks (I / 32, 16, O), or a stack of them, with a kernel: a program decodes some columns of a row (O,) of bytes."""
    kernels, height = _kernels(), out.shape[-1]
    kernels.decode_mxfp4[(components["blocks"].numel() // height, _programs(height))](
        components["blocks"], components["scales"], _target(out), height, via=via, size=kernels.BLOCK,
        enable_fp_fusion=False,
    )  # fmt: skip


def _decode_fp8(codec: Fp8, components: Components, out: torch.Tensor, via: Any) -> None:
    """Decode a matrix (O, I), or a stack of them (E, O, I)."""
    kernels, (num_rows, num_columns) = _kernels(), out.shape[-2:]
    scales, e8m0 = components["weight_scale_inv"], codec.scale_dtype == torch.float8_e8m0fnu
    kernels.decode_fp8[(out.numel() // num_columns, _programs(num_columns))](
        components["weight"].view(torch.uint8), scales.view(torch.uint8) if e8m0 else scales, _target(out), num_rows,
        num_columns, *scales.shape[-2:], tile_rows=codec.tile[0], tile_columns=codec.tile[1], e8m0=e8m0,
        via=via, size=kernels.BLOCK, enable_fp_fusion=False,
    )  # fmt: skip


def _decode_int4(codec: Int4, components: Components, out: torch.Tensor, via: Any) -> None:
    """Decode a matrix (O, I), or a stack of them (E, O, I), row by row: the kernel needs to know of no matrix."""
    kernels, num_columns = _kernels(), out.shape[-1]
    kernels.decode_int4[(out.numel() // num_columns, _programs(num_columns))](
        components["weight_packed"].view(torch.uint8), components["weight_scale"], _target(out), num_columns,
        codec.columns_of_scale(num_columns), via=via, size=kernels.BLOCK, enable_fp_fusion=False,
    )  # fmt: skip


# The decoder of each format, and the formats of which it decodes a stack at once.
_DECODERS: dict[type[Codec], Callable[[Any, Components, torch.Tensor, Any], None]] = {
    Bnb4Bit: _decode_4bit, Mxfp4: _decode_mxfp4, Fp8: _decode_fp8, Int4: _decode_int4
}  # fmt: skip
_OF_STACKS = (Fp8, Int4)


def _target(out: torch.Tensor) -> torch.Tensor:
    """Return the tensor as the kernels write it: bf16 as bits."""
    return out.view(torch.int16) if out.dtype == torch.bfloat16 else out


def _programs(numel: int) -> int:
    """Return the number of programs that decode so many elements."""
    return -(-numel // int(_kernels().BLOCK))


def _kernels() -> Any:
    """Return the module of the kernels, which needs Triton."""
    from horizon_lm.memory.kernels import decoding_kernels

    return decoding_kernels
