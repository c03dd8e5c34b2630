"""MXFP4, the format of gpt-oss' experts: 4-bit floating point values, 32 of which share a power of two.

Source: Open Compute Project, "OCP Microscaling Formats (MX) Specification", version 1.0. Values have a sign, two bits of exponent
and one of mantissa (E2M1); the scale is an exponent with a bias of 127 (E8M0). The published tensors are those of
transposed matrices: of an expert with a weight (I, O), blocks (O, I / 32, 16) and scales (O, I / 32). Two codes share a
byte, the first in its lower half. A parameter costs 0.5 + 1 / 32 bytes.

They are packed as (I / 32, 16, O) and (I / 32, O), so that a device reads and writes in the order of the weight.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch

from horizon_lm.common.ranges import length, pieces
from horizon_lm.errors import ConfigError
from horizon_lm.memory.codecs.base import Codec, Component, Part

_BLOCK, _BIAS = 32, 127
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_LARGEST_EXPONENT = 2  # of 6.0, the largest value


@dataclass(frozen=True, slots=True)
class Mxfp4(Codec):
    """Stacked matrices (E, I, O) in MXFP4, each of them transposed."""

    def components(self, shape: Sequence[int]) -> dict[str, Component]:
        if len(shape) != 3 or shape[1] % _BLOCK:
            raise ConfigError(
                f"a tensor of shape {tuple(shape)} cannot be in MXFP4, which has stacked matrices of rows in blocks of {_BLOCK}"
            )
        experts, width, height = shape
        return {
            "blocks": Component(torch.Size((experts, width // _BLOCK, _BLOCK // 2, height)), torch.uint8),
            "scales": Component(torch.Size((experts, width // _BLOCK, height)), torch.uint8),
        }

    def pack(self, components: Mapping[str, torch.Tensor], packed: torch.Tensor, shape: Sequence[int]) -> None:
        """Copy components in their published order, blocks (E, O, I / 32, 16) and scales (E, O, I / 32), as `Codec.pack` does."""
        orders = {"blocks": (0, 2, 3, 1), "scales": (0, 2, 1)}
        permuted = {
            name: each.permute(orders[name]) if name in orders and each.ndim == len(orders[name]) else each
            for name, each in components.items()
        }
        # `Codec.pack` rejects missing components and other shapes. super() fails here: with slots=True, a dataclass is made as a new class.
        Codec.pack(self, permuted, packed, shape)

    def parts(self, shape: Sequence[int], max_bytes: int) -> Iterator[Part]:
        """Cut a stack into whole matrices, as many as fit into ``max_bytes``; if not even one fits, cut each into rows of its blocks."""
        experts, width, height = shape
        numel, row_numel = width * height, _BLOCK * height  # elements of a matrix, and of a row of its blocks
        matrix_bytes = self.num_bytes((1, width, height))
        if matrix_bytes <= max_bytes:
            for part in pieces(experts, max_bytes // matrix_bytes):
                shape_of_part = torch.Size((length(part), width, height))
                yield Part(part.start * numel, part.stop * numel, shape_of_part, {"blocks": part, "scales": part})
            return
        for expert in range(experts):
            for part in pieces(width // _BLOCK, max(1, max_bytes // self.num_bytes((1, _BLOCK, height)))):
                rows = (slice(expert, expert + 1), part)
                start, shape_of_part = expert * numel, torch.Size((1, length(part) * _BLOCK, height))
                first, last = start + part.start * row_numel, start + part.stop * row_numel
                yield Part(first, last, shape_of_part, {"blocks": rows, "scales": rows})

    def decode_components(self, components: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        table = _table(out.device)
        for blocks, scales, matrix in zip(components["blocks"], components["scales"], out, strict=True):
            values = table[torch.stack((blocks & 15, blocks >> 4), dim=2).int()]  # (I / 32, 16, 2, O)
            values = torch.ldexp(values, (scales.int() - _BIAS)[:, None, None])
            matrix.copy_(values.view(matrix.shape))

    def encode_components(self, weight: torch.Tensor, components: Mapping[str, torch.Tensor]) -> None:
        middles = torch.tensor([(a + b) / 2 for a, b in pairwise(VALUES)])
        for matrix, blocks, scales in zip(weight, components["blocks"], components["scales"], strict=True):
            values = matrix.float().reshape(-1, _BLOCK, matrix.shape[-1])  # (I / 32, 32, O)
            largest = values.abs().amax(dim=1)
            # The scale by which the largest value gets the exponent of the largest code; `frexp` counts from 0.5, not from 1.
            exponents = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT
            exponents = torch.where(largest > 0, exponents, 0).clamp_(-_BIAS, _BIAS)
            scales.copy_(exponents + _BIAS)
            scaled = torch.ldexp(values, -exponents[:, None])
            size = scaled.abs()
            magnitude = torch.bucketize(size, middles)  # the index of the nearest value
            # Halfway between two values, `bucketize` takes the lower one; the one with an even mantissa, and so an even index, is nearest.
            halfway = (size == middles[magnitude.clamp(max=6)]) & (magnitude < 7)
            codes = magnitude + (halfway & (magnitude % 2 == 1)) + 8 * torch.signbit(scaled)
            pairs = codes.to(torch.uint8).view(-1, _BLOCK // 2, 2, matrix.shape[-1])
            blocks.copy_(pairs[:, :, 1] << 4 | pairs[:, :, 0])


@cache
def _table(device: torch.device) -> torch.Tensor:
    """Return the values of all codes on a device, copied there once."""
    return torch.tensor([*VALUES, *(-value for value in VALUES)], device=device)
