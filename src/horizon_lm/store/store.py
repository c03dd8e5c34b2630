"""All slabs of a model: weights (and low halves) always, gradients once something is trained."""

from collections.abc import Collection, Iterable, Mapping

import torch

from horizon_lm.store.arena import Arena, page_aligned
from horizon_lm.store.layout import SlabLayout
from horizon_lm.store.precision import Precision, join_master, split_master


class UnitSlabs:
    """The slabs of one unit. ``grads`` and ``grad_layout`` cover the trainable tensors only."""

    def __init__(self, layout: SlabLayout) -> None:
        self.layout = layout
        self.weights = torch.empty(0)
        self.start = 0  # of the weights in their arena, in bytes
        self.low: torch.Tensor | None = None
        self.grad_layout = layout.restrict(())
        self.grads = torch.empty(0)


class Store:
    """Slabs by unit, cut from one arena per kind.

    Args:
        shapes: for every unit the shapes of its tensors, by full parameter name. A tied tensor appears once.
        precision: the storage mode.
    """

    def __init__(self, shapes: Mapping[str, Mapping[str, torch.Size]], precision: Precision) -> None:
        self.precision = precision
        self.units = {unit: UnitSlabs(SlabLayout(tensors)) for unit, tensors in shapes.items()}
        self.unit_of = {name: unit for unit, slabs in self.units.items() for name in slabs.layout}
        self.source_dtypes: dict[str, torch.dtype] = {}
        self.version = 0  # of the weights: counted up by every update
        self.has_grads = False

        weights = self.new_arena([s.layout for s in self.units.values()], precision.weight_dtype)
        low = self.new_arena([s.layout for s in self.units.values()], torch.int16) if precision.low_half else None
        self._weights = weights
        for slabs in self.units.values():
            slabs.start = weights.position
            slabs.weights = weights.take(slabs.layout.numel, precision.weight_dtype)
            slabs.low = low.take(slabs.layout.numel, torch.int16) if low is not None else None
        self.num_bytes = {"weights": weights.num_bytes, "low_halves": low.num_bytes if low else 0}

    @staticmethod
    def new_arena(layouts: Iterable[SlabLayout], dtype: torch.dtype) -> Arena:
        """An arena that holds exactly one slab for each layout."""
        return Arena(sum(page_aligned(layout.numel * dtype.itemsize) for layout in layouts))

    def allocate_grads(self, trainable: Iterable[str], units: Collection[str]) -> None:
        """Make gradient slabs for these parameters (full names) of these units, as far as gradients are kept at all.

        Once only: slots and moments of all units follow the layout.
        """
        trainable = set(trainable)
        for slabs in self.units.values():
            slabs.grad_layout = slabs.layout.restrict(trainable)
        dtype = self.precision.grad_dtype
        arena = self.new_arena([s.grad_layout for unit, s in self.units.items() if unit in units], dtype)
        for unit, slabs in self.units.items():
            slabs.grads = arena.take(slabs.grad_layout.numel if unit in units else 0, dtype)
        self.num_bytes["grads"] = arena.num_bytes
        self.has_grads = True

    def weight(self, name: str) -> torch.Tensor:
        """Return the streamed form of a parameter: its part of the slab, as a tensor with a storage of its own.

        Parameters that shared a storage would be saved as one by safetensors, accelerate and torch.save.
        """
        slabs = self.units[self.unit_of[name]]
        entry, dtype = slabs.layout.entries[name], self.precision.weight_dtype
        return self._weights.at(slabs.start + entry.offset * dtype.itemsize, entry.numel, dtype).view(entry.shape)

    def grad(self, name: str) -> torch.Tensor:
        """The gradient of a trainable parameter: a view into its slab."""
        slabs = self.units[self.unit_of[name]]
        return slabs.grad_layout.view(slabs.grads, name)

    def grad_address(self, name: str) -> int:
        """Where the gradient of a trainable parameter begins in memory."""
        slabs = self.units[self.unit_of[name]]
        return slabs.grads.data_ptr() + slabs.grad_layout.entries[name].offset * slabs.grads.element_size()

    def write(self, name: str, source: torch.Tensor) -> None:
        """Store a parameter's value, rounding only as the precision mode has to."""
        slabs = self.units[self.unit_of[name]]
        target = slabs.layout.view(slabs.weights, name)
        if slabs.low is not None and source.dtype != target.dtype:
            split_master(source.float().contiguous(), target, slabs.layout.view(slabs.low, name))
            return
        target.copy_(source)
        if slabs.low is not None:
            slabs.layout.view(slabs.low, name).zero_()

    def reset_low(self, name: str) -> None:
        """Make a parameter's fp32 master exactly its bfloat16 half."""
        slabs = self.units[self.unit_of[name]]
        assert slabs.low is not None
        slabs.layout.view(slabs.low, name).zero_()

    def master(self, name: str) -> torch.Tensor:
        """A parameter in fp32, as exactly as it is kept. A new tensor, except in mode ``float32``."""
        slabs = self.units[self.unit_of[name]]
        weight = slabs.layout.view(slabs.weights, name)
        return weight.float() if slabs.low is None else join_master(weight, slabs.layout.view(slabs.low, name))
