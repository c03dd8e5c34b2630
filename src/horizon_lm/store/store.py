"""The slabs of a model in host memory: weights (and low halves, or codes), and gradients once training starts."""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from horizon_lm.codecs.base import Codec
from horizon_lm.errors import StreamingError
from horizon_lm.quantities import page_aligned
from horizon_lm.slabs import WHOLE, Shard, used_bytes
from horizon_lm.store.arena import Arena
from horizon_lm.store.precision import PRECISIONS, Precision, join_master, split_master
from horizon_lm.store.unit_slabs import UnitSlabs
from horizon_lm.units import EMBED, OUTER, Unit


def _slabs_of(
    shapes: Mapping[Unit, Mapping[str, torch.Size]], in_float32: Collection[str]
) -> dict[Unit, Mapping[str, torch.Size]]:
    """Return the shapes of the tensors in each slab. Those that are kept in float32 have slabs of their own (`Unit.float32`)."""
    found: dict[Unit, Mapping[str, torch.Size]] = {}
    for unit, tensors in shapes.items():
        found[unit] = {name: shape for name, shape in tensors.items() if name not in in_float32}
        if len(found[unit]) < len(tensors):
            found[unit.float32] = {name: shape for name, shape in tensors.items() if name in in_float32}
    return found


class Store:
    """The slabs of all units.

    Args:
        shapes: shapes of each unit's tensors, by full parameter name. A tied tensor appears once.
        precision: storage mode.
        frozen: units that are never trained, and have no low halves.
        kept: slabs of units whose memory is kept, with the layout of the same tensors under other names.
        codecs: the codecs of quantized tensors, all of frozen units, by full parameter name.
        shard: the range of each slab that this rank owns.
        in_float32: full names of the tensors that are kept in float32, in slabs of their own (`Unit.float32`).

    Attributes:
        units: the slabs, by unit.
        unit_of: the unit whose slabs have a tensor, by full parameter name.
    """

    def __init__(
        self,
        shapes: Mapping[Unit, Mapping[str, torch.Size]],
        precision: Precision,
        frozen: Collection[Unit] = (),
        kept: Mapping[Unit, UnitSlabs] | None = None,
        codecs: Mapping[str, Codec] | None = None,
        shard: Shard = WHOLE,
        in_float32: Collection[str] = (),
    ) -> None:
        self.precision, self.codecs, self.shard = precision, dict(codecs or {}), shard
        self.in_float32 = frozenset(in_float32)
        self.units = {
            unit: UnitSlabs(tensors, self.codecs, shard, is_table=unit == EMBED)
            for unit, tensors in _slabs_of(shapes, self.in_float32).items()
        }
        self.unit_of = {name: unit for unit, slabs in self.units.items() for name in slabs.layout}
        self.frozen = frozenset(unit for unit in self.units if unit.home in frozen)
        self._parts = {unit: self._find_parts(unit) for unit in self.units if not unit.is_float32}  # used in every pass

        self.source_dtypes: dict[str, torch.dtype] = {}  # of the files that weights were read from
        self.source_buffers: dict[str, torch.Tensor] = {}  # buffers as they were in a file, in another dtype than now
        self.decoded_dtypes: dict[str, torch.dtype] = {}  # of weights that were read quantized
        self.fill: Callable[[Unit], None] | None = None  # fetches the ranges of a unit that other ranks own
        self.version = 0  # version of the weights, incremented by every update
        self.block_version = 0  # the same for weights of blocks, which an update of adapters leaves as they are
        self.has_grads = False

        self._allocate_weights(kept or {})
        self.num_bytes = self._bytes_of_weights()

    def _allocate_weights(self, kept: Mapping[Unit, UnitSlabs]) -> None:
        """Allocate the weights of all units but those whose memory is kept."""
        new = [unit for unit in self.units if unit not in kept]
        # The outer parameters have an arena of their own, because they alone grow when adapters are added.
        for units in self._by_precision(unit for unit in new if unit != OUTER):
            self._allocate(units)
        self._allocate([unit for unit in new if unit == OUTER])
        for unit, slabs in kept.items():
            self.units[unit].take_over(slabs)

    def _bytes_of_weights(self) -> dict[str, int]:
        """Return the bytes of the weights that this rank owns, by kind."""
        slabs = self.units.values()
        found = {"weights": sum(used_bytes([each.own], each.weights.element_size()) for each in slabs)}
        if self.codecs:
            found["packed_weights"] = used_bytes([each.packed.own for each in slabs], 1)
        found["low_halves"] = used_bytes([each.own for each in slabs if each.low is not None], torch.int16.itemsize)
        return found

    def precision_of(self, unit: Unit) -> Precision:
        """Return the storage mode of a unit's slabs."""
        return PRECISIONS["float32"] if unit.is_float32 else self.precision

    def parts_of(self, unit: Unit) -> list[Unit]:
        """Return the slabs that are moved with a unit: its own, and those of its weights in float32, if there are any."""
        return self._parts[unit]

    def _find_parts(self, unit: Unit) -> list[Unit]:
        """Return what `parts_of` returns."""
        found = [each for each in (unit, unit.float32) if each in self.units and self.units[each].layout.numel]
        return found or [unit]  # of a unit without tensors, its empty slabs

    def _by_precision(self, units: Iterable[Unit]) -> Iterator[list[Unit]]:
        """Yield two lists: the units of the store's precision, and those in float32."""
        found = list(units)
        yield [unit for unit in found if not unit.is_float32]
        yield [unit for unit in found if unit.is_float32]

    def _allocate(self, units: Sequence[Unit]) -> None:
        """Allocate the weights of these units, of one precision, and their low halves if it has them and they may be trained."""
        if not units:
            return
        precision = self.precision_of(units[0])
        dtype = precision.weight_dtype
        with_low = [unit for unit in units if precision.low_half and unit not in self.frozen]
        weights = self.new_arena([self.units[unit].plain.numel for unit in units], dtype)
        packed = self.new_arena([self.units[unit].packed.num_bytes for unit in units], torch.uint8)
        low = self.new_arena([self.units[unit].plain.numel for unit in with_low], torch.int16)
        for unit in units:
            slabs = self.units[unit]
            slabs.arena, slabs.start = weights, weights.position
            slabs.weights = weights.take(slabs.plain.numel, dtype, slabs.own)
            slabs.packed_arena, slabs.packed_start = packed, packed.position
            slabs.packed.data = packed.take(slabs.packed.num_bytes, torch.uint8, slabs.packed.own)
            slabs.low_arena, slabs.low_start = low, low.position
            slabs.low = low.take(slabs.plain.numel, torch.int16, slabs.own) if unit in with_low else None

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
        in_float32 = {name for name, old in old_names.items() if old in self.in_float32}
        kept = {
            unit: self.units[unit]
            for unit, tensors in _slabs_of(shapes, in_float32).items()
            if unit in self.units
            and [old_names.get(name) for name in UnitSlabs(tensors, codecs).layout] == list(self.units[unit].layout)
        }
        store = Store(shapes, precision, frozen, kept, codecs, self.shard, in_float32)
        for own, new in ((self.source_dtypes, store.source_dtypes), (self.decoded_dtypes, store.decoded_dtypes)):
            new.update({name: own[old] for name, old in old_names.items() if old in own})
        store.source_buffers = self.source_buffers
        return store

    def new_arena(self, sizes: Iterable[int], dtype: torch.dtype) -> Arena:
        """Return an arena that holds exactly one slab for each of these numbers of elements."""
        return Arena(sum(page_aligned(numel * dtype.itemsize) for numel in sizes), sparse=not self.shard.is_whole)

    def allocate_grads(self, trainable: Iterable[str], units: Collection[Unit]) -> None:
        """Allocate gradient slabs of these units for these parameters, given by full name.

        All units get a layout and a dtype of gradients, by which slots and moments are made, so this can be called only once.

        Raises:
            StreamingError: a parameter belongs to a frozen unit.
        """
        trainable = set(trainable)
        for unit, slabs in self.units.items():
            if self.precision_of(unit).low_half and slabs.low is None and not trainable.isdisjoint(slabs.layout):
                raise StreamingError(
                    f"{unit}: the base of a model with adapters was frozen when it was streamed, and has no fp32 master; "
                    "unfreeze its weights before stream(), or stream with precision='bf16'"
                )
        for unit, slabs in self.units.items():
            slabs.lay_out_grads(trainable)
            slabs.grads = torch.empty(0, dtype=self.precision_of(unit).grad_dtype)
        for kept in self._by_precision(unit for unit in self.units if unit in units):
            self._allocate_grads([self.units[unit] for unit in kept])
        self.num_bytes["grads"] = sum(
            used_bytes([slabs.own_grads], slabs.grads.element_size())
            for unit, slabs in self.units.items()
            if unit in units
        )
        self.has_grads = True

    def _allocate_grads(self, units: Sequence[UnitSlabs]) -> None:
        """Allocate the gradients of these units, of one dtype."""
        if units:
            dtype = units[0].grads.dtype
            arena = self.new_arena([slabs.grad_layout.numel for slabs in units], dtype)
            for slabs in units:
                slabs.grads = arena.take(slabs.grad_layout.numel, dtype, slabs.own_grads)

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
        return self.units[self.unit_of[name]].packed.bytes_of(name)

    def owns(self, name: str) -> bool:
        """Return whether this rank owns any part of a parameter."""
        slabs = self.units[self.unit_of[name]]
        part = slabs.packed.own_part(name) if name in self.codecs else self._own_part(slabs, name)[0]
        return part.start < part.stop

    @contextmanager
    def packing(self, name: str) -> Iterator[torch.Tensor]:
        """Context manager: yield memory for all bytes of a quantized parameter. On leaving, each of several ranks keeps its part."""
        kept = self.packed(name)
        if self.shard.is_whole:
            yield kept
            return
        packed = torch.zeros_like(kept)  # zeros, because the bytes between components are hashed, too
        yield packed
        own = self.units[self.unit_of[name]].packed.own_part(name)
        kept[own] = packed[own]

    def weight(self, name: str) -> torch.Tensor:
        """Return a parameter as it is streamed, without its low half: its part of the slab, as a tensor with a separate storage.

        safetensors, accelerate and torch.save would save parameters with a shared storage as one tensor. Of a quantized
        parameter, a placeholder without memory is returned.
        """
        if name in self.codecs:
            return torch.empty((), dtype=self.precision.weight_dtype).expand(self.shape(name))
        slabs = self.units[self.unit_of[name]]
        entry, dtype = slabs.layout.entries[name], slabs.weights.dtype
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
            source: its value, or the rows that `rows_to_read` names.
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

    def rows_to_read(self, name: str) -> slice | None:
        """Return the rows of a parameter in which this rank's part lies, or one, for its dtype, if it has no part; None for all rows."""
        shape = self.shape(name)
        if self.shard.is_whole or not shape:
            return None
        if name in self.codecs:  # scales may depend on all values
            return None if self.owns(name) else slice(0, 1)
        num_rows, width = shape[0], math.prod(shape[1:])
        _, own = self._own_part(self.units[self.unit_of[name]], name)
        first = min(own.start // width, num_rows - 1)
        return slice(first, max(first + 1, -(-own.stop // width)))

    def _own_part(self, slabs: UnitSlabs, name: str, first_row: int = 0) -> tuple[slice, slice]:
        """Return the elements of a parameter that this rank owns: as a range of the slab, and of the rows from ``first_row`` on."""
        entry, part = slabs.layout.entries[name], slabs.layout.part_of(name, slabs.own)
        start_of_row = entry.offset + first_row * math.prod(entry.shape[1:])
        return part, slice(part.start - start_of_row, part.stop - start_of_row)

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
