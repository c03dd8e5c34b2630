"""An optimizer's moments in host memory, in fp32 or fewer bits, and the slabs of a unit as passed to the kernels."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from horizon_lm.device.cpu import dtype_name
from horizon_lm.errors import ConfigError
from horizon_lm.kernels.updates import Rule
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
        values, scales: a slab for each moment.
        scale_starts: index of the first scale of each parameter.
        own_scales: the range of the scales that belongs to this rank.
    """

    values: tuple[torch.Tensor, ...]
    scales: tuple[torch.Tensor, ...]
    scale_starts: dict[str, int]
    own_scales: slice


class Moments:
    """The moments of a model, initially zero.

    Args:
        store: the store of the model, with gradient layouts.
        kind: ``float32`` (4 bytes per parameter and moment), ``bfloat16`` (2, stochastically rounded) or ``8bit`` (1, and an
            fp32 scale per block of 256).
        rule: the optimizer's, with the names of the moments.
    """

    def __init__(self, store: Store, kind: str, rule: Rule) -> None:
        if kind not in _DTYPES:
            raise ConfigError(f"moments is {kind!r}; choose one of {', '.join(_DTYPES)}")
        self.kind, self.rule = kind, rule
        dtype = _DTYPES[kind]
        layouts = {unit: slabs.grad_layout for unit, slabs in store.units.items()}
        scales = {unit: self._place_scales(slabs) for unit, slabs in store.units.items()}
        own = {unit: slabs.own_grads for unit, slabs in store.units.items()}
        own_scales = {unit: self._own_scales(slabs) for unit, slabs in store.units.items()}
        arenas = [store.new_arena([layout.numel for layout in layouts.values()], dtype) for _ in rule.moments]
        scale_arenas = [store.new_arena([count for _, count in scales.values()], torch.float32) for _ in rule.moments]
        store.num_bytes["moments"] = len(rule.moments) * (
            used_bytes(own.values(), dtype.itemsize) + used_bytes(own_scales.values(), torch.float32.itemsize)
        )
        self.units: dict[Unit, UnitMoments] = {}
        for unit, (starts, count) in scales.items():
            self.units[unit] = UnitMoments(
                tuple(arena.take(layouts[unit].numel, dtype, own[unit]) for arena in arenas),
                tuple(arena.take(count, torch.float32, own_scales[unit]) for arena in scale_arenas),
                starts,
                own_scales[unit],
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the moments, and of their scales, in a saved state."""
        scales = [f"{name}_scale" for name in self.rule.moments] if self.kind == "8bit" else []
        return (*self.rule.moments, *scales)

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
        views = [layout.view(values, name) for values in moments.values]
        if self.kind == "8bit":
            start = moments.scale_starts[name]
            stop = start + num_scales(layout.entries[name].numel, slabs.row)
            views += [scales[start:stop] for scales in moments.scales]
        return dict(zip(self.names, views, strict=True))


class UnitArrays:
    """The slabs of a unit as numpy arrays, except for gradients, whose memory may differ from update to update.

    Attributes:
        own, own_grads: the ranges of weights and gradients that this rank owns, and updates.
        mergeable: whether one kernel call may span several parameters.
        moments, scales: two arrays each, as the kernels take them; empty if there is no second moment.
        rule: the optimizer's.
        grad_format: the name of the gradients' format.
        modes: the rule and the names of the formats of weights, moments and gradients, which select the kernel.
    """

    def __init__(self, store: Store, unit: Unit, moments: Moments) -> None:
        slabs, own = store.units[unit], moments.units[unit]
        self.layout, self.grad_layout = slabs.layout, slabs.grad_layout
        self.own, self.own_grads = slabs.own, slabs.own_grads
        self.weights = as_array(slabs.weights)
        self.low = np.empty(0, np.int16) if slabs.low is None else as_array(slabs.low)
        self.moments, self.scales = _pair(own.values), _pair(own.scales)
        self.scale_starts = own.scale_starts
        self.mergeable = moments.kind != "8bit"  # 8-bit blocks start at the beginning of each parameter
        precision = store.precision_of(unit)
        self.grad_format = dtype_name(torch.empty(0, dtype=precision.grad_dtype))
        self.rule = moments.rule
        self.modes = (self.rule, precision.name, moments.kind, self.grad_format)


def _pair(slabs: tuple[torch.Tensor, ...]) -> list[Any]:
    return [as_array(slab) for slab in (*slabs, slabs[0][:0])[:2]]
