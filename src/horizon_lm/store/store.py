"""The slabs of a model in host memory: weights (and low halves, or codes), and gradients once training starts."""

import math
import mmap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from horizon_lm.codecs.base import Codec
from horizon_lm.codecs.slab import PackedSlab
from horizon_lm.constants import PAGE, SLAB_ALIGNMENT
from horizon_lm.errors import StreamingError
from horizon_lm.quantities import page_aligned
from horizon_lm.schedule.ops import OUTER
from horizon_lm.store.precision import Precision, join_master, split_master


class Arena:
    """A memory mapping of exactly the requested size, whose pages are allocated when first written.

    torch's own allocators round up (pinned memory to powers of two), which would break the byte budget.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map = mmap.mmap(-1, max(num_bytes, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # absent on macOS
            if hasattr(mmap, advice):
                try:
                    self._map.madvise(getattr(mmap, advice))
                except OSError:  # a kernel without huge pages, which is only slower
                    continue
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the next ``numel`` elements, page-aligned, as a 1-D tensor that keeps the mapping alive."""
        num_bytes = numel * dtype.itemsize
        if self._used + num_bytes > self.num_bytes:
            raise AssertionError(f"arena of {self.num_bytes} bytes: {self._used} used, {num_bytes} more asked for")
        start, self._used = self._used, page_aligned(self._used + num_bytes)
        return self.at(start, numel, dtype)

    @property
    def position(self) -> int:
        """Offset of the next slab in bytes."""
        return self._used

    def at(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``numel`` elements from byte ``start`` on, as a 1-D tensor with a separate storage."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=start)


def as_array(tensor: torch.Tensor) -> Any:
    """Return the same memory as a numpy array; numpy has no bf16, so bf16 appears as uint16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(np.uint16)
    return tensor.detach().numpy()


@dataclass(frozen=True, slots=True)
class Entry:
    """The position of a tensor in a slab. ``offset`` and ``numel`` count elements."""

    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    numel: int


class SlabLayout:
    """Offsets of named tensors in one flat slab. Weights, gradients, moments and device slots share a layout."""

    def __init__(self, shapes: Mapping[str, torch.Size]) -> None:
        self.entries: dict[str, Entry] = {}
        offset = 0
        for name, shape in shapes.items():
            strides = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
            entry = Entry(offset, torch.Size(shape), strides, math.prod(shape))
            self.entries[name] = entry
            offset += -(-entry.numel // SLAB_ALIGNMENT) * SLAB_ALIGNMENT
        self.numel = offset

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    @property
    def num_params(self) -> int:
        """The number of elements without the padding between tensors."""
        return sum(entry.numel for entry in self.entries.values())

    def restrict(self, names: Iterable[str]) -> "SlabLayout":
        """Return the layout of a slab that holds only the given tensors, in the order of this layout."""
        names = set(names)
        return SlabLayout({name: entry.shape for name, entry in self.entries.items() if name in names})

    def view(self, slab: torch.Tensor, name: str) -> torch.Tensor:
        """Return the named tensor as a view of a flat slab (or of a device buffer with this layout)."""
        entry = self.entries[name]
        return slab.as_strided(entry.shape, entry.strides, slab.storage_offset() + entry.offset)

    def gaps(self, slab: torch.Tensor) -> list[torch.Tensor]:
        """Return the padding between tensors, which must be zero if a whole slab is reduced."""
        ends = [entry.offset + entry.numel for entry in self.entries.values()]
        starts = [*[entry.offset for entry in self.entries.values()][1:], self.numel]
        return [slab[end:start] for end, start in zip(ends, starts, strict=True) if end < start]


class UnitSlabs:
    """The slabs of one unit.

    Args:
        shapes: shapes of its tensors, by full parameter name.
        codecs: the codecs of those that are quantized.

    Attributes:
        layout: the layout of a slot on the device, with the quantized tensors at its end.
        weights: the tensors that are not quantized, in this layout.
        packed: the quantized tensors.
        low: the low halves of ``weights``, if the unit has them.
        grads, grad_layout: the gradients of its trainable tensors.
    """

    def __init__(self, shapes: Mapping[str, torch.Size], codecs: Mapping[str, Codec] | None = None) -> None:
        codecs = codecs or {}
        plain = {name: shape for name, shape in shapes.items() if name not in codecs}
        quantized = {name: shape for name, shape in shapes.items() if name in codecs}
        self.layout = SlabLayout(plain | quantized)
        self.plain = SlabLayout(plain)
        self.packed = PackedSlab(quantized, codecs)
        self.arena = Arena(0)  # of the weights, which start at this byte in it
        self.start = 0
        self.weights = torch.empty(0)
        self.low: torch.Tensor | None = None
        self.grad_layout = self.layout.restrict(())
        self.grads = torch.empty(0)


def _arena_bytes(layouts: Iterable[SlabLayout], dtype: torch.dtype) -> int:
    """Return the bytes of slabs with these layouts, each in whole pages."""
    return sum(page_aligned(layout.numel * dtype.itemsize) for layout in layouts)


class Store:
    """The slabs of all units.

    Args:
        shapes: shapes of each unit's tensors, by full parameter name. A tied tensor appears once.
        precision: storage mode.
        frozen: units that are never trained, and have no low halves.
        kept: slabs of units whose memory is kept, with the layout of the same tensors under other names.
        codecs: the codecs of quantized tensors, all of frozen units, by full parameter name.
    """

    def __init__(
        self,
        shapes: Mapping[str, Mapping[str, torch.Size]],
        precision: Precision,
        frozen: Collection[str] = (),
        kept: Mapping[str, UnitSlabs] | None = None,
        codecs: Mapping[str, Codec] | None = None,
    ) -> None:
        self.precision, self.frozen, self.codecs = precision, frozenset(frozen), dict(codecs or {})
        self.units = {unit: UnitSlabs(tensors, self._codecs_of(tensors)) for unit, tensors in shapes.items()}
        self.unit_of = {name: unit for unit, slabs in self.units.items() for name in slabs.layout}
        self.source_dtypes: dict[str, torch.dtype] = {}
        self.decoded_dtypes: dict[str, torch.dtype] = {}  # of weights that were read quantized
        self.version = 0  # version of the weights, incremented by every update
        self.block_version = 0  # the same for weights of blocks, which an update of adapters leaves as they are
        self.has_grads = False

        kept = kept or {}
        # The outer parameters have an arena of their own, because they alone grow when adapters are added.
        for group in ([unit for unit in self.units if unit != OUTER], [OUTER] if OUTER in self.units else []):
            self._allocate([unit for unit in group if unit not in kept])
        for unit, slabs in kept.items():
            own = self.units[unit]
            own.arena, own.start, own.weights, own.low = slabs.arena, slabs.start, slabs.weights, slabs.low
            own.packed.data = slabs.packed.data
        dtype, with_low = precision.weight_dtype, [s.plain for s in self.units.values() if s.low is not None]
        self.num_bytes = {
            "weights": _arena_bytes([slabs.plain for slabs in self.units.values()], dtype),
            "packed_weights": sum(page_aligned(slabs.packed.num_bytes) for slabs in self.units.values()),
            "low_halves": _arena_bytes(with_low, torch.int16),
        }
        if not self.codecs:
            del self.num_bytes["packed_weights"]

    def _codecs_of(self, names: Iterable[str]) -> dict[str, Codec]:
        return {name: self.codecs[name] for name in names if name in self.codecs}

    def _allocate(self, units: Sequence[str]) -> None:
        """Allocate the weights of these units, and their low halves if the precision has them and they may be trained."""
        dtype = self.precision.weight_dtype
        split = [unit for unit in units if self.precision.low_half and unit not in self.frozen]
        weights = self.new_arena([self.units[unit].plain for unit in units], dtype)
        packed = Arena(sum(page_aligned(self.units[unit].packed.num_bytes) for unit in units))
        low = self.new_arena([self.units[unit].plain for unit in split], torch.int16)
        for unit in units:
            slabs = self.units[unit]
            slabs.arena, slabs.start = weights, weights.position
            slabs.weights = weights.take(slabs.plain.numel, dtype)
            slabs.packed.data = packed.take(slabs.packed.num_bytes, torch.uint8)
            slabs.low = low.take(slabs.plain.numel, torch.int16) if unit in split else None

    def extended(
        self,
        shapes: Mapping[str, Mapping[str, torch.Size]],
        old_names: Mapping[str, str],
        precision: Precision,
        frozen: Collection[str],
    ) -> "Store":
        """Return the store of the same model with more parameters. Units without new parameters keep their memory.

        Args:
            shapes: shapes of each unit's tensors, by full parameter name.
            old_names: names in this store of the parameters that it has.
            precision: storage mode, with the same dtype of weights.
            frozen: units that are never trained.
        """
        codecs = {name: self.codecs[old] for name, old in old_names.items() if old in self.codecs}
        kept = {
            unit: self.units[unit]
            for unit, tensors in shapes.items()
            if unit in self.units
            and [old_names.get(name) for name in UnitSlabs(tensors, codecs).layout] == list(self.units[unit].layout)
        }
        store = Store(shapes, precision, frozen, kept, codecs)
        store.source_dtypes = {
            name: self.source_dtypes[old] for name, old in old_names.items() if old in self.source_dtypes
        }
        store.decoded_dtypes = {
            name: self.decoded_dtypes[old] for name, old in old_names.items() if old in self.decoded_dtypes
        }
        return store

    @staticmethod
    def new_arena(layouts: Iterable[SlabLayout], dtype: torch.dtype) -> Arena:
        """Return an arena that holds exactly one slab for each layout."""
        return Arena(_arena_bytes(layouts, dtype))

    def allocate_grads(self, trainable: Iterable[str], units: Collection[str]) -> None:
        """Allocate gradient slabs of these units for these parameters, given by full name.

        Gradients can be allocated only once, because the slots and moments of all units have the same layout.

        Raises:
            StreamingError: a parameter belongs to a frozen unit.
        """
        trainable = set(trainable)
        for unit, slabs in self.units.items():
            if self.precision.low_half and slabs.low is None and not trainable.isdisjoint(slabs.layout):
                raise StreamingError(
                    f"{unit}: the base of a model with adapters was frozen when it was streamed, and has no fp32 master; "
                    "unfreeze its weights before stream(), or stream with precision='bf16'"
                )
        for slabs in self.units.values():
            slabs.grad_layout = slabs.layout.restrict(trainable)
        dtype = self.precision.grad_dtype
        arena = self.new_arena([s.grad_layout for unit, s in self.units.items() if unit in units], dtype)
        for unit, slabs in self.units.items():
            slabs.grads = arena.take(slabs.grad_layout.numel if unit in units else 0, dtype)
        self.num_bytes["grads"] = arena.num_bytes
        self.has_grads = True

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a parameter."""
        return self.units[self.unit_of[name]].layout.entries[name].shape

    def decode(self, name: str) -> torch.Tensor:
        """Return a new tensor with the decoded values of a quantized parameter, in the dtype of the weights."""
        out = torch.empty(self.shape(name), dtype=self.precision.weight_dtype)
        return self.codecs[name].decode(self.packed(name), out, self.decoded_dtype(name))

    def decoded_dtype(self, name: str) -> torch.dtype:
        """Return the dtype that decoded values are rounded to: that of the weights that were quantized."""
        return self.decoded_dtypes.get(name, self.precision.weight_dtype)

    def packed(self, name: str) -> torch.Tensor:
        """Return the bytes of a quantized parameter, a view of its slab."""
        return self.units[self.unit_of[name]].packed.packed(name)

    def weight(self, name: str) -> torch.Tensor:
        """Return the streamed half of a parameter: its part of the slab, as a tensor with a separate storage.

        safetensors, accelerate and torch.save would save parameters with a shared storage as one tensor. Of a quantized
        parameter, a placeholder without memory is returned.
        """
        if name in self.codecs:
            return torch.empty((), dtype=self.precision.weight_dtype).expand(self.shape(name))
        slabs = self.units[self.unit_of[name]]
        entry, dtype = slabs.layout.entries[name], self.precision.weight_dtype
        return slabs.arena.at(slabs.start + entry.offset * dtype.itemsize, entry.numel, dtype).view(entry.shape)

    def grad(self, name: str) -> torch.Tensor:
        """Return the gradient of a trainable parameter as a view into its slab."""
        slabs = self.units[self.unit_of[name]]
        return slabs.grad_layout.view(slabs.grads, name)

    def grad_address(self, name: str) -> int:
        """Return the memory address of a trainable parameter's gradient."""
        slabs = self.units[self.unit_of[name]]
        return slabs.grads.data_ptr() + slabs.grad_layout.entries[name].offset * slabs.grads.element_size()

    def write(self, name: str, source: torch.Tensor) -> None:
        """Store a parameter's value, rounding only as far as the precision requires, or quantizing it."""
        slabs = self.units[self.unit_of[name]]
        if name in self.codecs:
            self.codecs[name].encode(source, slabs.packed.packed(name))
            return
        target = slabs.layout.view(slabs.weights, name)
        if slabs.low is not None and source.dtype != target.dtype:
            split_master(source.float().contiguous(), target, slabs.layout.view(slabs.low, name))
            return
        target.copy_(source)
        if slabs.low is not None:
            slabs.layout.view(slabs.low, name).zero_()

    def weights_changed(self, blocks: bool = True) -> None:
        """Record that the weights are new, or will be once the pending updates are done.

        Args:
            blocks: weights of blocks are among them.
        """
        self.version += 1
        self.block_version += blocks

    def reset_low(self, name: str) -> None:
        """Reset the low half of a parameter, so that its fp32 master equals its bf16 half."""
        slabs = self.units[self.unit_of[name]]
        assert slabs.low is not None
        slabs.layout.view(slabs.low, name).zero_()

    def master(self, name: str) -> torch.Tensor:
        """Return a parameter's stored value in fp32, without rounding. A new tensor, except in mode ``float32``."""
        slabs = self.units[self.unit_of[name]]
        if name in self.codecs:
            return self.decode(name).float()
        weight = slabs.layout.view(slabs.weights, name)
        return weight.float() if slabs.low is None else join_master(weight, slabs.layout.view(slabs.low, name))
