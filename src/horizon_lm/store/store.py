"""The slabs of a model in host memory: weights (and low halves, or codes), and gradients once training starts."""

import math
import mmap
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from horizon_lm.codecs.base import Codec
from horizon_lm.codecs.slab import PackedSlab
from horizon_lm.constants import PAGE, SLAB_ALIGNMENT
from horizon_lm.errors import StreamingError
from horizon_lm.quantities import page_aligned
from horizon_lm.shards import WHOLE, Shard
from horizon_lm.store.precision import Precision, join_master, split_master
from horizon_lm.units import EMBED, OUTER, Unit

_MAP_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)
_HUGE_PAGE = 2 * 2**20


class Arena:
    """A memory mapping of exactly the requested size, whose pages are allocated when first written.

    torch's own allocators round up (pinned memory to powers of two), which would break the byte budget.

    Args:
        num_bytes: the size.
        sparse: only parts of it will ever be used, so none is promised, and no huge page may reach beyond such a part.
    """

    def __init__(self, num_bytes: int, sparse: bool = False) -> None:
        self.num_bytes, self._is_sparse = num_bytes, sparse
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (_MAP_NORESERVE if sparse else 0)
        self._map = mmap.mmap(-1, max(num_bytes, PAGE), flags=flags)
        for advice in ("MADV_NOHUGEPAGE" if sparse else "MADV_HUGEPAGE", "MADV_DONTFORK"):  # absent on macOS
            if hasattr(mmap, advice):
                try:
                    self._map.madvise(getattr(mmap, advice))
                except OSError:  # a kernel without huge pages, which is only slower
                    continue
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype, used: slice | None = None) -> torch.Tensor:
        """Return the next ``numel`` elements, page-aligned, as a 1-D tensor that keeps the mapping alive.

        ``used``: the elements of a sparse arena's slab that will be used.
        """
        num_bytes = numel * dtype.itemsize
        if self._used + num_bytes > self.num_bytes:
            raise AssertionError(f"arena of {self.num_bytes} bytes: {self._used} used, {num_bytes} more asked for")
        start, self._used = self._used, page_aligned(self._used + num_bytes)
        if self._is_sparse and used is not None:
            self._use_huge_pages(start + used.start * dtype.itemsize, start + used.stop * dtype.itemsize)
        return self.at(start, numel, dtype)

    def _use_huge_pages(self, start: int, stop: int) -> None:
        """Allow huge pages in these bytes of a sparse arena."""
        start, stop = -(-start // _HUGE_PAGE) * _HUGE_PAGE, stop // _HUGE_PAGE * _HUGE_PAGE
        if hasattr(mmap, "MADV_HUGEPAGE") and start < stop:
            with suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE, start, stop - start)

    def forget(self, start: int, stop: int) -> None:
        """Give the memory of the whole pages among these bytes back to the system. They become zero."""
        start, stop = page_aligned(start), stop // PAGE * PAGE
        if start < stop and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED, start, stop - start)

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

    def place_in(self, part: "SlabLayout", offset: int) -> int:
        """Return the offset in a layout of some of these tensors that corresponds to an offset in this one.

        It is the number of elements of that layout that lie before the offset here.
        """
        for name, entry in part.entries.items():
            before = offset - self.entries[name].offset
            if before < entry.numel:
                return entry.offset + max(0, before)
        return part.numel

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
        shard: the range of the slabs that this rank owns. The others have addresses, but no memory.
        is_table: the unit is a table, of which whole rows are owned.

    Attributes:
        layout: the layout of a slot on the device, with the quantized tensors at its end.
        slot_numel, slot_cuts: elements of such a slot, and the places between the equal parts of ``weights`` that the ranks fill. The
            last may reach into the place of quantized tensors, which are decoded afterwards.
        cuts, grad_cuts: the places at which the ranks cut weights and gradients.
        weights: the tensors that are not quantized, in this layout.
        packed: the quantized tensors.
        is_table: see above.
        low: the low halves of ``weights``, if the unit has them.
        grads, grad_layout: the gradients of its trainable tensors.
    """

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        codecs: Mapping[str, Codec] | None = None,
        shard: Shard = WHOLE,
        is_table: bool = False,
    ) -> None:
        codecs, self.shard = codecs or {}, shard
        plain = {name: shape for name, shape in shapes.items() if name not in codecs}
        quantized = {name: shape for name, shape in shapes.items() if name in codecs}
        self.layout = SlabLayout(plain | quantized)
        self.plain = SlabLayout(plain)
        self.packed = PackedSlab(quantized, codecs, shard)
        self.is_table = is_table
        numel, self._granule = self.plain.numel, SLAB_ALIGNMENT
        if is_table:
            (table,) = self.layout.entries.values()
            self._granule = table.shape[1]
            numel = numel if shard.is_whole else table.numel
        self.cuts = shard.cuts(numel, self._granule)
        chunk = shard.chunk(numel, self._granule)
        self.slot_cuts = [chunk * rank for rank in range(shard.count + 1)]
        self.slot_numel = max(self.layout.numel, self.slot_cuts[-1])
        self.arena = self.packed_arena = Arena(0)  # of the weights, which start at this byte in it
        self.start = self.packed_start = 0
        self.weights = torch.empty(0)
        self.low: torch.Tensor | None = None
        self.low_arena, self.low_start = self.arena, 0
        self.grads = torch.empty(0)
        self.train(())

    def train(self, names: Iterable[str]) -> None:
        """Lay out the gradients of these tensors."""
        self.grad_layout = self.layout.restrict(names)
        self.grad_cuts = [self.layout.place_in(self.grad_layout, cut) for cut in self.cuts]

    @property
    def own(self) -> slice:
        """The range of the weights' slab that this rank owns, in elements."""
        return self.shard.own(self.cuts)

    @property
    def own_grads(self) -> slice:
        """The range of the gradients' slab that this rank owns, in elements."""
        return self.shard.own(self.grad_cuts)

    def slabs(self) -> list[tuple[torch.Tensor, list[int]]]:
        """Return the slabs of the weights, and the places at which the ranks cut them."""
        low = [] if self.low is None else [(self.low, self.cuts)]
        return [(self.weights, self.cuts), *low, (self.packed.data, self.packed.cuts)]

    def forget_others(self) -> None:
        """Give back the memory of the ranges of other ranks, which were read."""
        for slab, own, arena, start in (
            (self.weights, self.own, self.arena, self.start),
            (self.low, self.own, self.low_arena, self.low_start),
            (self.packed.data, self.packed.own, self.packed_arena, self.packed_start),
        ):
            if slab is not None:
                size = slab.element_size()
                arena.forget(start, start + own.start * size)
                arena.forget(start + own.stop * size, start + slab.numel() * size)

    def own_grads_of(self, name: str) -> slice:
        """The part of a parameter's gradient that this rank owns, as a range of the slab."""
        entry, own = self.grad_layout.entries[name], self.own_grads
        start = max(entry.offset, own.start)
        return slice(start, max(start, min(entry.offset + entry.numel, own.stop)))

    def row_cuts(self, rows: torch.Tensor) -> list[int]:
        """Return the places at which sorted rows (R,) of a table are cut between the ranks."""
        bounds = torch.tensor([cut // self._granule for cut in self.cuts])
        return [int(place) for place in torch.searchsorted(rows, bounds)]


def used_bytes(parts: Iterable[slice], dtype: torch.dtype) -> int:
    """Return the bytes of the pages that hold these ranges of slabs, each of which begins at a page."""
    return sum(
        page_aligned(part.stop * dtype.itemsize) - part.start * dtype.itemsize // PAGE * PAGE
        for part in parts
        if part.start < part.stop
    )


class Store:
    """The slabs of all units.

    Args:
        shapes: shapes of each unit's tensors, by full parameter name. A tied tensor appears once.
        precision: storage mode.
        frozen: units that are never trained, and have no low halves.
        kept: slabs of units whose memory is kept, with the layout of the same tensors under other names.
        codecs: the codecs of quantized tensors, all of frozen units, by full parameter name.
        shard: the range of each slab that this rank owns.
    """

    def __init__(
        self,
        shapes: Mapping[Unit, Mapping[str, torch.Size]],
        precision: Precision,
        frozen: Collection[Unit] = (),
        kept: Mapping[Unit, UnitSlabs] | None = None,
        codecs: Mapping[str, Codec] | None = None,
        shard: Shard = WHOLE,
    ) -> None:
        self.precision, self.frozen, self.codecs = precision, frozenset(frozen), dict(codecs or {})
        self.shard = shard
        self.units = {
            unit: UnitSlabs(tensors, self._codecs_of(tensors), shard, unit == EMBED) for unit, tensors in shapes.items()
        }
        self.unit_of = {name: unit for unit, slabs in self.units.items() for name in slabs.layout}
        self.source_dtypes: dict[str, torch.dtype] = {}
        self.source_buffers: dict[str, torch.Tensor] = {}
        self.decoded_dtypes: dict[str, torch.dtype] = {}  # of weights that were read quantized
        self.fill: Callable[[Unit], None] | None = None  # fetches the ranges of a unit that other ranks own
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
            own.low_arena, own.low_start = slabs.low_arena, slabs.low_start
            own.packed.data = slabs.packed.data
            own.packed_arena, own.packed_start = slabs.packed_arena, slabs.packed_start
        with_low = [slabs.own for slabs in self.units.values() if slabs.low is not None]
        self.num_bytes = {
            "weights": used_bytes([slabs.own for slabs in self.units.values()], precision.weight_dtype),
            "packed_weights": used_bytes([slabs.packed.own for slabs in self.units.values()], torch.uint8),
            "low_halves": used_bytes(with_low, torch.int16),
        }
        if not self.codecs:
            del self.num_bytes["packed_weights"]

    def _codecs_of(self, names: Iterable[str]) -> dict[str, Codec]:
        return {name: self.codecs[name] for name in names if name in self.codecs}

    def _allocate(self, units: Sequence[Unit]) -> None:
        """Allocate the weights of these units, and their low halves if the precision has them and they may be trained."""
        dtype = self.precision.weight_dtype
        split = [unit for unit in units if self.precision.low_half and unit not in self.frozen]
        weights = self.new_arena([self.units[unit].plain.numel for unit in units], dtype)
        packed = self.new_arena([self.units[unit].packed.num_bytes for unit in units], torch.uint8)
        low = self.new_arena([self.units[unit].plain.numel for unit in split], torch.int16)
        for unit in units:
            slabs = self.units[unit]
            slabs.arena, slabs.start = weights, weights.position
            slabs.weights = weights.take(slabs.plain.numel, dtype, slabs.own)
            slabs.packed_arena, slabs.packed_start = packed, packed.position
            slabs.packed.data = packed.take(slabs.packed.num_bytes, torch.uint8, slabs.packed.own)
            slabs.low_arena, slabs.low_start = low, low.position
            slabs.low = low.take(slabs.plain.numel, torch.int16, slabs.own) if unit in split else None

    def extended(
        self,
        shapes: Mapping[Unit, Mapping[str, torch.Size]],
        old_names: Mapping[str, str],
        precision: Precision,
        frozen: Collection[Unit],
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
        store = Store(shapes, precision, frozen, kept, codecs, self.shard)
        store.source_dtypes = {
            name: self.source_dtypes[old] for name, old in old_names.items() if old in self.source_dtypes
        }
        store.decoded_dtypes = {
            name: self.decoded_dtypes[old] for name, old in old_names.items() if old in self.decoded_dtypes
        }
        store.source_buffers = self.source_buffers
        return store

    def new_arena(self, sizes: Iterable[int], dtype: torch.dtype) -> Arena:
        """Return an arena that holds exactly one slab for each of these numbers of elements."""
        return Arena(sum(page_aligned(numel * dtype.itemsize) for numel in sizes), sparse=not self.shard.is_whole)

    def allocate_grads(self, trainable: Iterable[str], units: Collection[Unit]) -> None:
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
            slabs.train(trainable)
        dtype, kept = self.precision.grad_dtype, [slabs for unit, slabs in self.units.items() if unit in units]
        arena = self.new_arena([slabs.grad_layout.numel for slabs in kept], dtype)
        for slabs in kept:
            slabs.grads = arena.take(slabs.grad_layout.numel, dtype, slabs.own_grads)
        for slabs in self.units.values():
            slabs.grads = slabs.grads if slabs in kept else torch.empty(0, dtype=dtype)
        self.num_bytes["grads"] = used_bytes([slabs.own_grads for slabs in kept], dtype)
        self.has_grads = True

    def require_whole(self) -> None:
        """Raise StreamingError if other ranks have parts of the weights and gradients."""
        if not self.shard.is_whole:
            raise StreamingError(
                f"each of {self.shard.count} ranks keeps a part of every weight and gradient in host memory, so other code "
                "cannot read or write them; use model.save_pretrained(), which all ranks call, and horizon_lm.AdamW with "
                "max_grad_norm"
            )

    @contextmanager
    def whole(self, unit: Unit) -> Iterator[None]:
        """Context manager: read a whole unit, of which other ranks own parts. Afterwards their memory is given back.

        Raises:
            StreamingError: other ranks own parts, and nobody fetches them.
        """
        if self.shard.is_whole:
            yield
            return
        if self.fill is None:
            raise StreamingError(
                "each rank has a part of the weights; read them with model.save_pretrained() on all ranks"
            )
        self.fill(unit)
        try:
            yield
        finally:
            self.units[unit].forget_others()

    @property
    def written_dtype(self) -> torch.dtype | None:
        """The dtype in which all weights are written unless another one is chosen; None for that of each source."""
        return torch.float32 if self.precision.weight_dtype == torch.float32 else None

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

    def owns(self, name: str) -> bool:
        """Return whether this rank owns any part of a parameter."""
        slabs = self.units[self.unit_of[name]]
        part = slabs.packed.own_part(name) if name in self.codecs else self._own_part(slabs, name)[0]
        return part.start < part.stop

    @contextmanager
    def packing(self, name: str) -> Iterator[torch.Tensor]:
        """Context manager: yield memory for the bytes of a quantized parameter, of which this rank's part is stored."""
        slabs = self.units[self.unit_of[name]]
        if self.shard.is_whole:
            yield slabs.packed.packed(name)
            return
        # Zeros, because the bytes between components are hashed, too.
        packed, part = torch.zeros_like(slabs.packed.packed(name)), slabs.packed.own_part(name)
        yield packed
        slabs.packed.packed(name)[part] = packed[part]

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

    def write(self, name: str, source: torch.Tensor, first_row: int = 0) -> None:
        """Store a parameter's value, rounding only as far as the precision requires, or quantizing it.

        Args:
            name: the parameter.
            source: its value, or the rows that `own_rows` names.
            first_row: the first of these rows.
        """
        slabs = self.units[self.unit_of[name]]
        if name in self.codecs:
            if self.owns(name):
                with self.packing(name) as packed:
                    self.codecs[name].encode(source, packed)
            return
        part, own = self._own_part(slabs, name, first_row)
        target, source = slabs.weights[part], source.reshape(-1)[own]
        if slabs.low is not None and source.dtype != target.dtype:
            split_master(source.float().contiguous(), target, slabs.low[part])
            return
        target.copy_(source)
        if slabs.low is not None:
            slabs.low[part].zero_()

    def holds(self, name: str, source: torch.Tensor, first_row: int = 0) -> bool:
        """Return whether this rank's part of a parameter has these values, up to the rounding of its precision.

        Args:
            name, source, first_row: as in `write`.
        """
        slabs = self.units[self.unit_of[name]]
        part, own = self._own_part(slabs, name, first_row)
        weights, source = slabs.weights[part], source.reshape(-1)[own]
        if slabs.low is None:
            return torch.equal(weights, source.to(weights.dtype))
        return torch.equal(join_master(weights, slabs.low[part]), source.float())

    def own_rows(self, name: str) -> slice:
        """Return the rows of a parameter, at least one, in which this rank's part lies; one of a quantized parameter."""
        slabs = self.units[self.unit_of[name]]
        shape = slabs.layout.entries[name].shape
        if name in self.codecs:
            return slice(0, 1)
        num_rows, width = (shape[0], math.prod(shape[1:])) if shape else (1, 1)
        _, own = self._own_part(slabs, name)
        first = min(own.start // width, num_rows - 1)
        return slice(first, max(first + 1, -(-own.stop // width)))

    def _own_part(self, slabs: UnitSlabs, name: str, first_row: int = 0) -> tuple[slice, slice]:
        """Return the part of a parameter that this rank owns, as a range of its slab and of the elements from a row on."""
        entry, own = slabs.layout.entries[name], slabs.own
        start = max(entry.offset, own.start)
        stop = max(start, min(entry.offset + entry.numel, own.stop))
        skipped = entry.offset + first_row * math.prod(entry.shape[1:])
        return slice(start, stop), slice(start - skipped, stop - skipped)

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
