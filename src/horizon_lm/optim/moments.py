"""AdamW's moments in host memory, in fp32 or fewer bits, and the slabs of a unit as passed to the kernels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from horizon_lm.device.cpu import dtype_name
from horizon_lm.errors import ConfigError
from horizon_lm.slabs import num_scales, scale_at, used_bytes
from horizon_lm.store.arena import as_array
from horizon_lm.store.store import Store
from horizon_lm.store.unit_slabs import UnitSlabs
from horizon_lm.units import Unit

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}


@dataclass(frozen=True, slots=True)
class UnitMoments:
    """The moments of a unit, laid out like its gradients; 8-bit moments also have the scales of their blocks.

    Attributes:
        scale_starts: index of the first scale of each parameter.
        own_scales: the range of the scales that belongs to this rank.
    """

    first: torch.Tensor
    second: torch.Tensor
    scale1: torch.Tensor
    scale2: torch.Tensor
    scale_starts: dict[str, int]
    own_scales: slice


class Moments:
    """The AdamW moments of a model, initially zero.

    Args:
        store: the store of the model, with gradient layouts.
        kind: ``float32`` (8 bytes per parameter), ``bfloat16`` (4, stochastically rounded) or ``8bit`` (2, and two fp32
            scales per block of 256).
    """

    def __init__(self, store: Store, kind: str) -> None:
        if kind not in _DTYPES:
            raise ConfigError(f"moments is {kind!r}; choose one of {', '.join(_DTYPES)}")
        self.kind = kind
        dtype = _DTYPES[kind]
        layouts = {unit: slabs.grad_layout for unit, slabs in store.units.items()}
        scales = {unit: self._place_scales(slabs) for unit, slabs in store.units.items()}
        own = {unit: slabs.own_grads for unit, slabs in store.units.items()}
        own_scales = {unit: self._own_scales(slabs) for unit, slabs in store.units.items()}
        arenas = [store.new_arena([layout.numel for layout in layouts.values()], dtype) for _ in range(2)]
        scale_arenas = [store.new_arena([count for _, count in scales.values()], torch.float32) for _ in range(2)]
        store.num_bytes["moments"] = 2 * (
            used_bytes(own.values(), dtype.itemsize) + used_bytes(own_scales.values(), torch.float32.itemsize)
        )
        self.units: dict[Unit, UnitMoments] = {}
        for unit, (starts, count) in scales.items():
            first, second = (arena.take(layouts[unit].numel, dtype, own[unit]) for arena in arenas)
            scale1, scale2 = (arena.take(count, torch.float32, own_scales[unit]) for arena in scale_arenas)
            self.units[unit] = UnitMoments(first, second, scale1, scale2, starts, own_scales[unit])

    def _own_scales(self, slabs: UnitSlabs) -> slice:
        """Return the range of a unit's scales that belongs to this rank's range of its moments."""
        if self.kind != "8bit":
            return slice(0, 0)
        tensors, own = slabs.grad_layout.numels, slabs.own_grads
        return slice(scale_at(tensors, own.start, slabs.row), scale_at(tensors, own.stop, slabs.row))

    def _place_scales(self, slabs: UnitSlabs) -> tuple[dict[str, int], int]:
        """Return the index of each parameter's first scale, and the number of scales."""
        starts: dict[str, int] = {}
        count = 0
        for name, entry in slabs.grad_layout.entries.items() if self.kind == "8bit" else ():
            starts[name] = count
            count += num_scales(entry.numel, slabs.row)
        return starts, count

    def state(self, unit: Unit, slabs: UnitSlabs, name: str) -> dict[str, Any]:
        """Return views of a parameter's moments under torch's names; 8-bit moments as codes and scales."""
        moments, layout = self.units[unit], slabs.grad_layout
        views: dict[str, Any] = {
            "exp_avg": layout.view(moments.first, name),
            "exp_avg_sq": layout.view(moments.second, name),
        }
        if self.kind == "8bit":
            start = moments.scale_starts[name]
            stop = start + num_scales(layout.entries[name].numel, slabs.row)
            views["exp_avg_scale"] = moments.scale1[start:stop]
            views["exp_avg_sq_scale"] = moments.scale2[start:stop]
        return views


class UnitArrays:
    """The slabs of a unit as numpy arrays, except for gradients, whose memory may differ from update to update.

    Attributes:
        own, own_grads: the ranges of weights and gradients that this rank owns, and updates.
        mergeable: whether one kernel call may span several parameters.
        modes: names of the weight, moment and gradient formats, which select the kernel.
    """

    def __init__(self, store: Store, unit: Unit, moments: Moments) -> None:
        slabs, own = store.units[unit], moments.units[unit]
        self.layout, self.grad_layout = slabs.layout, slabs.grad_layout
        self.own, self.own_grads = slabs.own, slabs.own_grads
        self.weights = as_array(slabs.weights)
        self.low = np.empty(0, np.int16) if slabs.low is None else as_array(slabs.low)
        self.first, self.second = as_array(own.first), as_array(own.second)
        self.scale1, self.scale2 = as_array(own.scale1), as_array(own.scale2)
        self.scale_starts = own.scale_starts
        self.mergeable = moments.kind != "8bit"  # 8-bit blocks start at the beginning of each parameter
        self.modes = (store.precision.name, moments.kind, dtype_name(torch.empty(0, dtype=store.precision.grad_dtype)))
