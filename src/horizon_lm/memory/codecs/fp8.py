"""Block FP8, the format of DeepSeek-V3 and of Qwen's FP8 models: E4M3 values with one float32 scale for each tile.

Sources: DeepSeek-AI, "DeepSeek-V3 Technical Report" (arXiv 2412.19437), section 3.3, and the tensors ``weight`` and
``weight_scale_inv`` of its checkpoint. With tiles of 128 x 128, a parameter costs 1 + 4 / 16384 bytes.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from horizon_lm.common.ranges import pieces
from horizon_lm.errors import ConfigError
from horizon_lm.memory.codecs.base import Codec, Component, Part

_LARGEST = 448.0  # of E4M3


@dataclass(frozen=True, slots=True)
class Fp8(Codec):
    """A matrix (O, I) in FP8.

    Attributes:
        tile: rows and columns that share a scale.
        scale_dtype: dtype of the scales.
    """

    tile: tuple[int, int] = (128, 128)
    scale_dtype: torch.dtype = torch.float32

    def components(self, shape: Sequence[int]) -> dict[str, Component]:
        if len(shape) != 2:
            raise ConfigError(f"a tensor of shape {tuple(shape)} cannot be in block FP8, which has matrices")
        tiles = torch.Size(-(-size // tile) for size, tile in zip(shape, self.tile, strict=True))
        return {
            "weight": Component(torch.Size(shape), torch.float8_e4m3fn),
            "weight_scale_inv": Component(tiles, self.scale_dtype),
        }

    def joins(self, heights: Sequence[int]) -> bool:
        """Return whether no tile would have rows of two matrices."""
        return len(heights) == 1 or all(height % self.tile[0] == 0 for height in heights)

    def parts(self, shape: Sequence[int], max_bytes: int) -> Iterator[Part]:
        """Cut a matrix between rows of tiles, each of which has its scales to itself."""
        (height, width), tile_rows = shape, self.tile[0]
        for tiles in pieces(-(-height // tile_rows), max(1, max_bytes // self.num_bytes((tile_rows, width)))):
            top, bottom = tiles.start * tile_rows, min(height, tiles.stop * tile_rows)
            rows = {"weight": slice(top, bottom), "weight_scale_inv": tiles}
            yield Part(top * width, bottom * width, torch.Size((bottom - top, width)), rows)

    def decode_components(self, components: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        scales = components["weight_scale_inv"].float()
        for top, row_of_tiles in zip(range(0, out.shape[0], self.tile[0]), scales, strict=True):
            bottom = min(out.shape[0], top + self.tile[0])
            by_column = row_of_tiles.repeat_interleave(self.tile[1])[: out.shape[1]]
            out[top:bottom].copy_(components["weight"][top:bottom].float().mul_(by_column))

    def encode_components(self, weight: torch.Tensor, components: Mapping[str, torch.Tensor]) -> None:
        codes, scales = components["weight"], components["weight_scale_inv"]
        for i, top in enumerate(range(0, weight.shape[0], self.tile[0])):
            for j, left in enumerate(range(0, weight.shape[1], self.tile[1])):
                place = (slice(top, top + self.tile[0]), slice(left, left + self.tile[1]))
                values = weight[place].float()
                largest = values.abs().amax()
                scales[i, j] = torch.where(largest > 0, largest / _LARGEST, 1.0)
                codes[place].copy_((values / scales[i, j].float()).clamp_(-_LARGEST, _LARGEST))
