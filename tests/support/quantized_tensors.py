"""Quantized tensors of every format, for tests of their decoders."""

import torch

from horizon_lm.memory.codecs.base import Codec
from horizon_lm.memory.codecs.bnb4bit import Bnb4Bit
from horizon_lm.memory.codecs.fp8 import Fp8
from horizon_lm.memory.codecs.int4 import Int4
from horizon_lm.memory.codecs.mxfp4 import Mxfp4
from horizon_lm.memory.codecs.stack import Stack

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES: dict[str, tuple[Codec, tuple[int, ...]]] = {
    "nf4": (Bnb4Bit("nf4"), (96, 160)),
    "nf4 nested": (Bnb4Bit("nf4", nested=True), (300, 257)),
    "fp4": (Bnb4Bit("fp4", blocksize=128), (33, 47)),
    "mxfp4": (Mxfp4(), (5, 64, 16)),
    "fp8": (Fp8(), (260, 132)),
    "fp8 with scales in bf16": (Fp8(scale_dtype=torch.bfloat16), (128, 136)),
    "int4": (Int4(), (37, 96)),
    "int4 in groups of 128": (Int4(128, torch.float16), (24, 1408)),
    "int4 by row": (Int4(None, torch.float32), (40, 88)),
    "stacked nf4": (Stack(Bnb4Bit("nf4", nested=True)), (4, 48, 64)),
    "stacked fp8": (Stack(Fp8((32, 32))), (3, 80, 48)),
    "stacked fp8 with powers of two": (Stack(Fp8((32, 32), torch.float8_e8m0fnu)), (2, 64, 48)),
    "stacked int4": (Stack(Int4()), (4, 48, 64)),
}


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.05


def packed(codec: Codec, weight: torch.Tensor) -> torch.Tensor:
    data = torch.zeros(codec.num_bytes(weight.shape), dtype=torch.uint8)
    codec.encode(weight, data)
    return data


def packed_case(name: str) -> tuple[Codec, tuple[int, ...], torch.Tensor]:
    """Return a codec, a shape and a tensor of this shape in its bytes."""
    codec, shape = CASES[name]
    return codec, shape, packed(codec, drawn(*shape))


def published(codec: Codec, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the components of a quantized weight in the order in which folders have them."""
    data = packed(codec, weight)
    components = {name: view.clone() for name, view in codec.views(data, weight.shape).items()}
    if isinstance(codec, Mxfp4):
        orders = {"blocks": (0, 3, 1, 2), "scales": (0, 2, 1)}
        components = {name: each.permute(orders[name]).contiguous() for name, each in components.items()}
    return components
