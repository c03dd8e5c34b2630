"""INT4 of compressed-tensors, the format of Kimi-K2-Thinking's experts: signed integers of 4 bits, of which a group shares a scale.

Source: ``compressors/pack_quantized`` and ``quantization/lifecycle/forward.py`` of compressed-tensors 0.20. A code is an integer
from -8 to 7 plus 8. Eight codes share an int32, the first in its lowest bits; a group lies in a row, and its scale has the
dtype of the weight that was quantized. With groups of 32 and scales in 16 bits, a parameter costs 0.5 + 2 / 32 bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from horizon_lm.common.ranges import length, pieces
from horizon_lm.errors import ConfigError
from horizon_lm.memory.codecs.base import Codec, Component, Part

CODES_OF_WORD = 8
_OFFSET = 8
_LARGEST = 7.5  # half of the range from -8 to 7


@dataclass(frozen=True, slots=True)
class Int4(Codec):
    """A matrix (O, I) in INT4.

    Attributes:
        group_size: columns that share a scale, a multiple of 8; None for all columns of a row.
        scale_dtype: dtype of the scales.
    """

    group_size: int | None = 32
    scale_dtype: torch.dtype = torch.bfloat16

    def components(self, shape: Sequence[int]) -> dict[str, Component]:
        if len(shape) != 2 or shape[1] % (self.group_size or CODES_OF_WORD):
            raise ConfigError(
                f"a tensor of shape {tuple(shape)} cannot be in INT4, which has matrices of rows in groups of "
                f"{self.group_size or CODES_OF_WORD}"
            )
        height, width = shape
        return {
            "weight_packed": Component(torch.Size((height, width // CODES_OF_WORD)), torch.int32),
            "weight_scale": Component(torch.Size((height, width // self.columns_of_scale(width))), self.scale_dtype),
        }

    def columns_of_scale(self, width: int) -> int:
        """Return the number of columns that share a scale, in a matrix of this width."""
        return self.group_size or width

    def joins(self, heights: Sequence[int]) -> bool:
        """Return True: no row shares anything with another."""
        return True

    def parts(self, shape: Sequence[int], max_bytes: int) -> Iterator[Part]:
        height, width = shape
        for part in pieces(height, max(1, max_bytes // self.num_bytes((1, width)))):
            rows = dict.fromkeys(("weight_packed", "weight_scale"), part)
            yield Part(part.start * width, part.stop * width, torch.Size((length(part), width)), rows)

    def decode_components(self, components: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        pairs = components["weight_packed"].contiguous().view(torch.uint8)  # (O, I / 2)
        values = torch.stack((pairs & 15, pairs >> 4), dim=-1).view(out.shape).float().sub_(_OFFSET)
        scales = components["weight_scale"].float()[:, :, None]  # (O, groups, 1)
        out.copy_(values.view(*scales.shape[:2], -1).mul_(scales).view(out.shape))

    def encode_components(self, weight: torch.Tensor, components: Mapping[str, torch.Tensor]) -> None:
        """Quantize a weight, the largest magnitude of a group to 7.5 and all values to the nearest code, ties to the even one."""
        scales = components["weight_scale"]
        groups = weight.to(self.scale_dtype).reshape(*scales.shape, -1)  # (O, groups, columns of a scale)
        largest = groups.abs().amax(dim=-1)
        scales.copy_(torch.where(largest > 0, largest / _LARGEST, torch.finfo(self.scale_dtype).eps))
        codes = (groups / scales[:, :, None]).clamp_(-_OFFSET, _OFFSET - 1).round_().add_(_OFFSET)
        pairs = codes.to(torch.uint8).view(weight.shape[0], -1, 2)
        components["weight_packed"].view(torch.uint8).copy_(pairs[:, :, 1] << 4 | pairs[:, :, 0])
