"""AdamW's moments in host memory, in fp32 or fewer bits."""

from dataclasses import dataclass
from typing import Any

import torch

from horizon_lm.constants import MOMENT_BLOCK as BLOCK
from horizon_lm.errors import ConfigError
from horizon_lm.schedule.ops import EMBED
from horizon_lm.store.store import Arena, SlabLayout, Store, page_aligned

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}


@dataclass(frozen=True, slots=True)
class UnitMoments:
    """Of one unit: both moments, laid out as its gradients; with 8 bits also the scales of their blocks.

    Attributes:
        scale_starts: index of the first scale of each parameter.
    """

    first: torch.Tensor
    second: torch.Tensor
    scale1: torch.Tensor
    scale2: torch.Tensor
    scale_starts: dict[str, int]


class Moments:
    """All moments of a model, zero at first.

    Args:
        store: with its gradient layouts.
        kind: ``float32`` (8 bytes per parameter), ``bfloat16`` (4, stochastically rounded) or ``8bit`` (2 and two fp32
            scales for each block of 256).
    """

    def __init__(self, store: Store, kind: str) -> None:
        if kind not in _DTYPES:
            raise ConfigError(f"moments is {kind!r}; choose one of {', '.join(_DTYPES)}")
        self.kind = kind
        dtype = _DTYPES[kind]
        layouts = {unit: slabs.grad_layout for unit, slabs in store.units.items()}
        scales = {unit: self._scales(unit, layout) for unit, layout in layouts.items()}
        arenas = [Store.new_arena(layouts.values(), dtype) for _ in range(2)]
        scale_arenas = [Arena(sum(page_aligned(4 * count) for _, count in scales.values())) for _ in range(2)]
        store.num_bytes["moments"] = sum(arena.num_bytes for arena in (*arenas, *scale_arenas))
        self.units: dict[str, UnitMoments] = {}
        for unit, (starts, count) in scales.items():
            first, second = (arena.take(layouts[unit].numel, dtype) for arena in arenas)
            scale1, scale2 = (arena.take(count, torch.float32) for arena in scale_arenas)
            self.units[unit] = UnitMoments(first, second, scale1, scale2, starts)

    def _scales(self, unit: str, layout: SlabLayout) -> tuple[dict[str, int], int]:
        """Where each parameter's scales begin, and how many there are."""
        starts: dict[str, int] = {}
        count = 0
        for name in layout if self.kind == "8bit" else ():
            starts[name] = count
            count += self.num_blocks(unit, layout, name)
        return starts, count

    @staticmethod
    def num_blocks(unit: str, layout: SlabLayout, name: str) -> int:
        """Blocks of a parameter. Rows of the table, which are updated one by one, begin new ones."""
        entry = layout.entries[name]
        if unit == EMBED:
            return entry.shape[0] * -(-entry.shape[1] // BLOCK)
        return -(-entry.numel // BLOCK)

    def state(self, unit: str, layout: SlabLayout, name: str) -> dict[str, Any]:
        """A parameter's moments as views, under torch's names; 8-bit ones as codes with their scales."""
        moments = self.units[unit]
        views: dict[str, Any] = {
            "exp_avg": layout.view(moments.first, name),
            "exp_avg_sq": layout.view(moments.second, name),
        }
        if self.kind == "8bit":
            start = moments.scale_starts[name]
            stop = start + self.num_blocks(unit, layout, name)
            views["exp_avg_scale"] = moments.scale1[start:stop]
            views["exp_avg_sq_scale"] = moments.scale2[start:stop]
        return views
