"""The host memory of a whole model: allocate the slabs of all its units, and read and write its parameters by name."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from horizon_lm.common.quantities import page_aligned
from horizon_lm.common.ranges import length
from horizon_lm.common.units import EMBED, OUTER, Unit
from horizon_lm.errors import StreamingError
from horizon_lm.memory.arena import Arena
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.memory.layout.ranks import WHOLE, Shard
from horizon_lm.memory.layout.units import StorageLayout, UnitLayout
from horizon_lm.memory.precision import Precision, join_master, split_master
from horizon_lm.memory.unit_slabs import Slab, UnitSlabs


class Store:
    """The slabs of all units.

    Args:
        shapes: shapes of each unit's tensors, by full parameter name. A tied tensor appears once.
        precision: storage mode.
        frozen: units that are never trained, and have no low halves.
        kept: slabs of an earlier store that have the same tensors, under other names: the new slabs of these names use their memory.
        codecs: the codecs of quantized tensors, all of frozen units, by full parameter name.
        shard: the range of each slab that this rank owns.
        in_float32: full names of the tensors that are kept in float32, in slabs of their own.
        exact: further units that are not trained, whose weights are whole without low halves.

    Attributes:
        units: the slabs, by unit.
        unit_of: the unit whose slabs have a tensor, by full parameter name.
    """

    def __init__(
        self,
        shapes: Mapping[Unit, Mapping[str, torch.Size]],
        precision: Precision,
        frozen: Collection[Unit] = (),
        kept: Mapping[str, Slab] | None = None,
        codecs: Mapping[str, Codec] | None = None,
        shard: Shard = WHOLE,
        in_float32: Collection[str] = (),
        exact: Collection[Unit] = (),
    ) -> None:
        self.precision, self.codecs, self.shard = precision, dict(codecs or {}), shard
        self.in_float32 = frozenset(in_float32)
        make = partial(Slab, precision)
        self.units = {
            unit: UnitSlabs(make, unit, tensors, self.codecs, self.in_float32, shard, is_table=unit == EMBED)
            for unit, tensors in shapes.items()
        }
        self.unit_of = {name: unit for unit, slabs in self.units.items() for name in slabs.layout}
        self._slab_of = {name: slab for slabs in self.units.values() for slab in slabs.all for name in slab.layout}
        self.frozen = frozenset(unit for unit in self.units if unit in frozen)

        self.source_dtypes: dict[str, torch.dtype] = {}  # of the files that weights were read from
        self.source_buffers: dict[str, torch.Tensor] = {}  # buffers as they were in a file, in another dtype than now
        self.decoded_dtypes: dict[str, torch.dtype] = {}  # of weights that were read quantized
        self.fill: Callable[[Unit], None] | None = None  # fetches the ranges of a unit that other ranks own
        self.version = 0  # version of the weights, incremented by every update
        self.block_version = 0  # the same for weights of blocks, which an update of adapters leaves as they are
        self.has_grads = False

        self._allocate_weights(kept or {}, self.frozen.union(exact))
        self.num_bytes = self._bytes_of_weights()

    @property
    def slabs(self) -> list[Slab]:
        """The slabs of weights that are not quantized, some of them empty: those of each unit one after the other."""
        return [slab for slabs in self.units.values() for slab in slabs.of_weights]

    def _allocate_weights(self, kept: Mapping[str, Slab], without_low: Collection[Unit]) -> None:
        """Allocate the weights of all slabs, except that those in ``kept`` are taken over. The units ``without_low`` have no low halves."""
        # The outer parameters have arenas of their own, because they alone grow when adapters are added.
        for units in ([unit for unit in self.units if unit != OUTER], [unit for unit in self.units if unit == OUTER]):
            trained = {self.units[unit].plain.name for unit in units if unit not in without_low}
            # All slabs of one storage have one dtype, and share an arena.
            for of_storage in zip(*(self.units[unit].all for unit in units), strict=True):
                self._allocate([slab for slab in of_storage if slab.name not in kept], trained)
        for slabs in self.units.values():
            for slab in slabs.all:
                if slab.name in kept:
                    slab.take_over(kept[slab.name])

    def _allocate(self, slabs: Sequence[Slab], trained: Collection[str]) -> None:
        """Allocate the weights of these slabs, of one dtype, and the low halves of those that have them and may be trained.

        Args:
            slabs: the slabs.
            trained: names of slabs that may be trained.
        """
        with_low = [slab for slab in slabs if slab.has_low and slab.name in trained]
        weights = self.new_arena([slab.layout.numel for slab in slabs], slabs[0].dtype) if slabs else Arena(0)
        low = self.new_arena([slab.layout.numel for slab in with_low], torch.int16)
        for slab in slabs:
            slab.arena, slab.start = weights, weights.position
            slab.weights = weights.take(slab.layout.numel, slab.dtype, slab.own)
        for slab in with_low:
            slab.low_arena, slab.low_start = low, low.position
            slab.low = low.take(slab.layout.numel, torch.int16, slab.own)

    def _bytes_of_weights(self) -> dict[str, int]:
        """Return the bytes of the weights that this rank owns, by kind."""
        found = {"weights": sum(slab.own_bytes(slab.dtype.itemsize) for slab in self.slabs)}
        if self.codecs:
            found["packed_weights"] = sum(slabs.packed.own_bytes(1) for slabs in self.units.values())
        found["low_halves"] = sum(slab.own_bytes(torch.int16.itemsize) for slab in self.slabs if slab.low is not None)
        return found

    def extended(
        self,
        shapes: Mapping[Unit, Mapping[str, torch.Size]],
        old_names: Mapping[str, str],
        precision: Precision,
        frozen: Collection[Unit],
    ) -> "Store":
        """Return the store of the same model with more parameters. Slabs without new parameters keep their memory.

        Args:
            shapes: shapes of each unit's tensors, by full parameter name.
            old_names: names in this store of the parameters that it has.
            precision: storage mode, with the same dtype of weights.
            frozen: units that are never trained.
        """
        codecs = {name: self.codecs[old] for name, old in old_names.items() if old in self.codecs}
        in_float32 = {name for name, old in old_names.items() if old in self.in_float32}
        # The slabs of this store that have the same tensors in the other one, under their old names.
        kept = {
            old.name: old
            for unit, tensors in shapes.items()
            if unit in self.units
            for new, old in zip(
                UnitLayout(StorageLayout, unit, tensors, codecs, in_float32, self.shard).all,
                self.units[unit].all,
                strict=True,
            )
            if [old_names.get(name) for name in new.layout] == list(old.layout)
        }
        store = Store(shapes, precision, frozen, kept, codecs, self.shard, in_float32)
        for dtypes, copied in ((self.source_dtypes, store.source_dtypes), (self.decoded_dtypes, store.decoded_dtypes)):
            copied.update({name: dtypes[old] for name, old in old_names.items() if old in dtypes})
        store.source_buffers = self.source_buffers
        return store

    def new_arena(self, sizes: Iterable[int], dtype: torch.dtype) -> Arena:
        """Return an arena that holds exactly one slab for each of these numbers of elements."""
        return Arena(sum(page_aligned(numel * dtype.itemsize) for numel in sizes), sparse=not self.shard.is_whole)

    def allocate_grads(self, trainable: Iterable[str], units: Collection[Unit]) -> None:
        """Allocate gradient slabs of these units for these parameters, given by full name.

        The gradients of all units are laid out, also where they get no memory. Slots and moments are made by these layouts, so this can be
        called only once.

        Raises:
            StreamingError: a parameter belongs to a unit without low halves, which the precision needs.
        """
        trainable = set(trainable)
        for unit, slabs in self.units.items():
            if self.precision.low_half and slabs.plain.low is None and not trainable.isdisjoint(slabs.plain.layout):
                raise StreamingError(
                    f"{unit}: no weight of it was trained when the model was opened, as of the base of adapters, so it has no fp32 master; "
                    "unfreeze its weights before stream(), or stream with precision='bf16'"
                )
        for slabs in self.units.values():
            slabs.lay_out_grads(trainable)
        slabs_of_units = [slabs.of_weights for unit, slabs in self.units.items() if unit in units]
        for of_storage in zip(*slabs_of_units, strict=True):
            dtype = of_storage[0].grads.dtype
            arena = self.new_arena([slab.grad_layout.numel for slab in of_storage], dtype)
            for slab in of_storage:
                slab.grads = arena.take(slab.grad_layout.numel, dtype, slab.own_grads)
        self.num_bytes["grads"] = sum(
            slab.own_grad_bytes(slab.grads.element_size()) for slabs in slabs_of_units for slab in slabs
        )
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
        """Context manager: let the caller read a whole unit. Fetch the parts of other ranks, and release their memory at the end.

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
            self.release_others(unit)

    def release_others(self, unit: Unit) -> None:
        """Release the memory of the ranges of a unit that other ranks own, once they were read."""
        for slab in self.units[unit].all:
            slab.release_others()

    @property
    def written_dtype(self) -> torch.dtype | None:
        """The dtype in which weights are written to files by default; None to write each in the dtype of the file it was read from."""
        return torch.float32 if self.precision.weight_dtype == torch.float32 else None

    def shape(self, name: str) -> torch.Size:
        """Return the shape of a parameter."""
        return torch.Size(self.units[self.unit_of[name]].layout.entry(name).shape)

    def meta(self, name: str) -> torch.Tensor:
        """Return a meta tensor with the shape of a parameter, and with the dtype of the file that it was read from."""
        return torch.empty(self.shape(name), dtype=self.source_dtypes[name], device="meta")

    def slab_of(self, name: str) -> Slab:
        """Return the slab that has a parameter, or its codes if it is quantized."""
        return self._slab_of[name]

    def decode(self, name: str) -> torch.Tensor:
        """Return a new tensor with the decoded values of a quantized parameter, in the dtype of the weights."""
        out = torch.empty(self.shape(name), dtype=self.precision.weight_dtype)
        return self.codecs[name].decode(self.packed(name), out, self.decoded_dtype(name))

    def decoded_dtype(self, name: str) -> torch.dtype:
        """Return the dtype that decoded values are rounded to: the dtype that the weights had before they were quantized."""
        return self.decoded_dtypes.get(name, self.precision.weight_dtype)

    def packed(self, name: str) -> torch.Tensor:
        """Return the bytes of a quantized parameter, a view of its slab."""
        slab = self._slab_of[name]
        return slab.layout.view(slab.weights, name)

    def owns(self, name: str) -> bool:
        """Return whether this rank owns any part of a parameter."""
        slab = self._slab_of[name]
        return length(slab.layout.part_of(name, slab.own)) > 0

    @contextmanager
    def packing(self, name: str) -> Iterator[torch.Tensor]:
        """Context manager: yield memory in which to write all bytes of a quantized parameter. At the end, each rank keeps its part."""
        in_slab = self.packed(name)
        if self.shard.is_whole:
            yield in_slab
            return
        packed = torch.zeros_like(in_slab)  # zeros, because the bytes between components are hashed, too
        yield packed
        own_bytes = self._own_part(name)[1]
        in_slab[own_bytes] = packed[own_bytes]

    def weight(self, name: str) -> torch.Tensor:
        """Return a parameter as it is streamed, without its low half: its part of the slab, as a tensor with a separate storage.

        safetensors, accelerate and torch.save would save parameters with a shared storage as one tensor. Of a quantized
        parameter, a placeholder without memory is returned.
        """
        if name in self.codecs:
            return torch.empty((), dtype=self.precision.weight_dtype).expand(self.shape(name))
        slab = self._slab_of[name]
        entry = slab.layout.entries[name]
        start = slab.start + entry.offset * slab.dtype.itemsize
        return slab.arena.at(start, entry.numel, slab.dtype).view(entry.shape)

    def grad(self, name: str) -> torch.Tensor:
        """Return the gradient of a trainable parameter as a view into its slab."""
        slab = self._slab_of[name]
        return slab.grad_layout.view(slab.grads, name)

    def grad_address(self, name: str) -> int:
        """Return the memory address of a trainable parameter's gradient."""
        slab = self._slab_of[name]
        return slab.grads.data_ptr() + slab.grad_layout.entries[name].offset * slab.grads.element_size()

    def write(self, name: str, source: torch.Tensor, first_row: int = 0) -> None:
        """Store a parameter's value, rounding only as far as the precision requires, or quantizing it.

        Args:
            name: the parameter.
            source: its value, or the rows that `rows_to_read` names.
            first_row: the first of these rows.
        """
        if name in self.codecs:
            if self.owns(name):
                with self.packing(name) as packed:
                    self.codecs[name].encode(source, packed)
            return
        slab, (in_slab, in_source) = self._slab_of[name], self._own_part(name, first_row)
        target, source = slab.weights[in_slab], source.reshape(-1)[in_source]
        if slab.low is not None and source.dtype != target.dtype:
            split_master(source.float().contiguous(), target, slab.low[in_slab])
            return
        target.copy_(source)
        if slab.low is not None:
            slab.low[in_slab].zero_()

    def holds(self, name: str, source: torch.Tensor, first_row: int = 0) -> bool:
        """Return whether this rank's part of a parameter has these values, up to the rounding of its precision.

        Args:
            name, source, first_row: as in `write`.
        """
        slab, (in_slab, in_source) = self._slab_of[name], self._own_part(name, first_row)
        weights, source = slab.weights[in_slab], source.reshape(-1)[in_source]
        if slab.low is None:
            return torch.equal(weights, source.to(weights.dtype))
        return torch.equal(join_master(weights, slab.low[in_slab]), source.float())

    def rows_to_read(self, name: str) -> slice | None:
        """Return the rows of a parameter that this rank has to read; None for all.

        A rank that owns no part of it reads a single row, which shows the dtype.
        """
        shape = self.shape(name)
        if self.shard.is_whole or not shape:
            return None
        if name in self.codecs:  # scales may depend on all values
            return None if self.owns(name) else slice(0, 1)
        num_rows, width = shape[0], math.prod(shape[1:])
        _, own_elements = self._own_part(name)
        first = min(own_elements.start // width, num_rows - 1)
        return slice(first, max(first + 1, -(-own_elements.stop // width)))

    def _own_part(self, name: str, first_row: int = 0) -> tuple[slice, slice]:
        """Return the part of a parameter that this rank owns, in elements or in bytes of codes, as two ranges: of the slab, and of the
        flattened rows of the parameter from ``first_row`` on.
        """
        slab = self._slab_of[name]
        entry, in_slab = slab.layout.entries[name], slab.layout.part_of(name, slab.own)
        start_of_row = entry.offset + first_row * math.prod(entry.shape[1:])
        return in_slab, slice(in_slab.start - start_of_row, in_slab.stop - start_of_row)

    def weights_changed(self, blocks: bool = True) -> None:
        """Record that the weights are new, or will be once the pending updates are done.

        Args:
            blocks: weights of blocks are among them.
        """
        self.version += 1
        self.block_version += blocks

    def reset_low(self, name: str) -> None:
        """Reset the low half of a parameter, so that its fp32 master equals its bf16 half."""
        slab = self._slab_of[name]
        assert slab.low is not None
        slab.layout.view(slab.low, name).zero_()

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """Return a parameter for a file: in this dtype if it is kept in it, or else with all of its bits, to be rounded.

        If other ranks own parts of the slab, it is a copy, because the memory of these parts is released.
        """
        if name in self.codecs:
            return self.decode(name)
        weight = self.weight(name)
        if weight.dtype != dtype:
            return self.master(name)
        return weight if self.shard.is_whole else weight.clone()

    def master(self, name: str) -> torch.Tensor:
        """Return a parameter's stored value in fp32, without rounding. A new tensor, except in mode ``float32``."""
        if name in self.codecs:
            return self.decode(name).float()
        slab = self._slab_of[name]
        weight = slab.layout.view(slab.weights, name)
        return weight.float() if slab.low is None else join_master(weight, slab.layout.view(slab.low, name))
