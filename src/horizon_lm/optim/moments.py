"""An optimizer's moments in host memory, in fp32 or fewer bits, and the slabs as passed to the kernels."""

from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from horizon_lm.device.cpu import dtype_name
from horizon_lm.errors import ConfigError
from horizon_lm.memory.arena import as_array
from horizon_lm.memory.kernels.updates import Rule
from horizon_lm.memory.layout.moments import MomentLayout, num_scales
from horizon_lm.memory.layout.slabs import SlabLayout
from horizon_lm.memory.store import Store
from horizon_lm.memory.unit_slabs import Slab

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "8bit": torch.uint8}


@dataclass(frozen=True, slots=True)
class MomentSlabs:
    """One moment of a slab of weights.

    Attributes:
        place: the places of each parameter's values and scales.
        values, scales: their slabs.
    """

    place: MomentLayout
    values: torch.Tensor
    scales: torch.Tensor

    @property
    def num_bytes(self) -> int:
        """The bytes of values and scales that belong to this rank."""
        return self.place.own_bytes(self.values.element_size())


class Moments:
    """The moments of a model, initially zero.

    Args:
        store: the store of the model, with gradient layouts.
        kind: ``float32`` (4 bytes per parameter and moment), ``bfloat16`` (2, stochastically rounded) or ``8bit`` (1, and an
            fp32 scale per block of 256).
        rules: the rule of each trained parameter, which names its moments.

    Attributes:
        slabs: the moments by name, in the same order for all slabs of weights.
    """

    def __init__(self, store: Store, kind: str, rules: Mapping[str, Rule]) -> None:
        if kind not in _DTYPES:
            raise ConfigError(f"moments is {kind!r}; choose one of {', '.join(_DTYPES)}")
        self.kind = kind
        moments_of = {
            name: [moment.name for moment in rules[name].moments] for slab in store.slabs for name in slab.grad_layout
        }
        self._moments = tuple(dict.fromkeys(moment for moments in moments_of.values() for moment in moments))
        self.slabs: dict[Slab, dict[str, MomentSlabs]] = {slab: {} for slab in store.slabs}
        for moment in self._moments:
            self._allocate(store, moment, {name for name, moments in moments_of.items() if moment in moments})
        store.num_bytes["moments"] = sum(each.num_bytes for moments in self.slabs.values() for each in moments.values())

    def _allocate(self, store: Store, moment: str, parameters: Set[str]) -> None:
        """Allocate one moment of these parameters: an arena of values, and one of scales."""
        dtype = _DTYPES[self.kind]
        places = {slab: MomentLayout(slab, parameters, self.kind == "8bit") for slab in store.slabs}
        arena = store.new_arena([place.layout.numel for place in places.values()], dtype)
        scale_arena = store.new_arena([place.num_scales for place in places.values()], torch.float32)
        for slab, place in places.items():
            values = arena.take(place.layout.numel, dtype, place.own)
            scales = scale_arena.take(place.num_scales, torch.float32, place.own_scales)
            self.slabs[slab][moment] = MomentSlabs(place, values, scales)

    def allocate_pages(self) -> None:
        """Write the zeros with which moments begin, so that the system allocates all pages now."""
        for moments in self.slabs.values():
            for each in moments.values():
                each.values[each.place.own].zero_()
                each.scales[each.place.own_scales].zero_()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the moments, and of their scales, in a saved state."""
        return (*self._moments, *map(scale_name, self._moments)) if self.kind == "8bit" else self._moments

    def state(self, slab: Slab, name: str) -> dict[str, torch.Tensor]:
        """Return views of a parameter's moments under torch's names; 8-bit moments as codes and scales."""
        of_parameter = {moment: each for moment, each in self.slabs[slab].items() if name in each.place.layout}
        views = {moment: each.place.layout.view(each.values, name) for moment, each in of_parameter.items()}
        if self.kind == "8bit":
            for moment, each in of_parameter.items():
                start = each.place.scale_starts[name]
                stop = start + num_scales(each.place.layout.entries[name].numel, slab.row)
                views[scale_name(moment)] = each.scales[start:stop]
        return views


def scale_name(moment: str) -> str:
    """Return the name of the scales of an 8-bit moment."""
    return f"{moment}_scale"


@dataclass(frozen=True, slots=True)
class MomentArrays:
    """One moment of a slab of weights as numpy arrays; see `MomentSlabs`."""

    layout: SlabLayout
    values: Any
    scale_starts: Mapping[str, int]
    scales: Any

    @classmethod
    def of(cls, slabs: MomentSlabs) -> "MomentArrays":
        """Return the arrays of a moment."""
        place = slabs.place
        return cls(place.layout, as_array(slabs.values), place.scale_starts, as_array(slabs.scales))


@dataclass(frozen=True, slots=True)
class SlabArrays:
    """A slab of weights as numpy arrays, except for gradients, whose memory may differ from update to update.

    Attributes:
        layout, grad_layout: the places of weights and gradients.
        own, own_grads: the ranges of weights and gradients that this rank owns, and updates.
        weights, low: the values; ``low`` is empty if the format has none.
        weight_format, moment_kind, grad_format: the names of the formats, which select the kernel.
        moments: the moments by name.
    """

    layout: SlabLayout
    grad_layout: SlabLayout
    own: slice
    own_grads: slice
    weights: Any
    low: Any
    weight_format: str
    moment_kind: str
    grad_format: str
    moments: Mapping[str, MomentArrays]

    @classmethod
    def of(cls, slab: Slab, moments: Moments) -> "SlabArrays":
        """Return the arrays of a slab."""
        return cls(
            layout=slab.layout,
            grad_layout=slab.grad_layout,
            own=slab.own,
            own_grads=slab.own_grads,
            weights=as_array(slab.weights),
            low=np.empty(0, np.int16) if slab.low is None else as_array(slab.low),
            weight_format=slab.precision.name,
            moment_kind=moments.kind,
            grad_format=dtype_name(slab.grads),
            moments={name: MomentArrays.of(each) for name, each in moments.slabs[slab].items()},
        )

    @property
    def mergeable(self) -> bool:
        """True if one kernel call may span several parameters; not with 8-bit moments, whose blocks begin anew at each parameter."""
        return self.moment_kind != "8bit"

    def of_grads(self, grads: Any) -> "SlabArrays":
        """Return arrays with which an update reads and writes this array of gradients in place of the weights."""
        return replace(
            self,
            layout=self.grad_layout,
            own=self.own_grads,
            weights=grads,
            low=np.empty(0, np.int16),
            weight_format="float32" if self.grad_format == "float32" else "bf16_nearest",
        )

    def modes(self, rule: Rule) -> tuple[Rule, str, str, str]:
        """Return the arguments that select the kernel of a rule in `update_kernel` and `rows_kernel`."""
        return rule, self.weight_format, self.moment_kind, self.grad_format

    def moments_of(self, rule: Rule) -> list[MomentArrays]:
        """Return the two moments that a kernel takes; for a moment that the rule lacks, empty arrays."""
        arrays = [self.moments[moment.name] for moment in rule.moments]
        return arrays + [self._no_moment()] * (2 - len(arrays))

    def _no_moment(self) -> MomentArrays:
        """Return empty arrays, of the dtypes for which a kernel is compiled."""
        dtype = {"float32": np.float32, "bfloat16": np.uint16, "8bit": np.uint8}[self.moment_kind]
        return MomentArrays(SlabLayout({}), np.empty(0, dtype), {}, np.empty(0, np.float32))
