"""Lay out the slabs of a unit: one for each storage, with the places at which ranks cut it.

A unit has up to three slabs: of tensors in the precision of the run, of those that are kept in float32 whatever the
precision, and of the codes and scales of quantized ones. A slot on the device has a buffer for each dtype of computation.
Quantized tensors are decoded into the first buffer, behind those that are copied.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from horizon_lm.common.constants import PACKED_ALIGNMENT
from horizon_lm.common.units import Unit
from horizon_lm.memory.layout.ranks import Shard, used_bytes
from horizon_lm.memory.layout.slabs import SlabLayout, SlotLayout

PLAIN, FLOAT32, PACKED = "", ".float32", ".packed"
"""The ends of the names of slabs, after the names of their units."""


class StorageLayout:
    """The tensors of a unit that have one storage, and the places at which ranks cut their slab.

    Args:
        unit: the unit.
        storage: the end of the slab's name, after that of the unit.
        layout: the places of its tensors.
        shard: the range of the slab that this rank owns.
        row: elements of a row of a table, which is cut between rows; None for others.

    Attributes:
        name: the name by which the slab is saved, and by which the noise of its updates is drawn.
        cuts, own: the places at which the ranks cut it, and the range of this rank.
        slot_cuts: the places at which the ranks cut the slab's buffer in a slot on the device. Its parts are equal, because one collective
            gathers them, so the last may end behind the slab. In the first buffer that place belongs to quantized tensors, which are
            decoded after the gathering. A single rank has no buffer of codes, because it decodes from host memory: all are 0.
        grad_layout, grad_cuts: the places of the gradients of its trained tensors, and those at which the ranks cut their slab.
    """

    def __init__(self, unit: Unit, storage: str, layout: SlabLayout, shard: Shard, row: int | None = None) -> None:
        self.unit, self.name, self.storage = unit, f"{unit}{storage}", storage
        self.layout, self.shard, self.row = layout, shard, row
        # Each rank owns whole rows of a table, so the padding at its end is left out.
        numel = layout.numel if row is None or shard.is_whole else layout.num_params
        granule = row or layout.alignment
        self.cuts = shard.cuts(numel, granule)
        self.own = shard.own(self.cuts)
        part_numel = 0 if storage == PACKED and shard.is_whole else shard.range_numel(numel, granule)
        self.slot_cuts = [part_numel * rank for rank in range(shard.count + 1)]
        self.lay_out_grads(())

    def lay_out_grads(self, names: Iterable[str]) -> None:
        """Lay out the gradients of these tensors, which are trained."""
        self.grad_layout = self.layout.restrict(names)
        self.grad_cuts = self._cuts_of(self.grad_layout)

    def _cuts_of(self, held: SlabLayout) -> list[int]:
        """Return the cuts of a slab that has only the ``held`` tensors, of which each rank owns the same elements as in this slab."""
        return [self.layout.offset_among(cut, held) for cut in self.cuts]

    def own_range(self, held: SlabLayout) -> slice:
        """Return the elements that this rank owns of a slab that has only the ``held`` tensors."""
        return self.shard.own(self._cuts_of(held))

    @property
    def own_grads(self) -> slice:
        """The range of the gradients' slab that this rank owns, in elements."""
        return self.shard.own(self.grad_cuts)

    def own_bytes(self, itemsize: int) -> int:
        """Return the bytes of host memory of this rank's range of the slab, given the bytes of an element."""
        return used_bytes([self.own], itemsize)

    def own_grad_bytes(self, itemsize: int) -> int:
        """Return the bytes of host memory of this rank's range of the gradients, given the bytes of an element."""
        return used_bytes([self.own_grads], itemsize)


StorageT = TypeVar("StorageT", bound=StorageLayout)


class UnitLayout(Generic[StorageT]):
    """The slabs of one unit.

    Args:
        make: makes the slab of each storage, with or without memory; called with the arguments of `StorageLayout`.
        unit: the unit.
        shapes: shapes of its tensors, by full parameter name.
        codecs: the codecs of quantized tensors, also of other units, by full name.
        in_float32: full names of tensors, also of other units, that are kept in float32.
        shard: the range of the slabs that this rank owns.
        is_table: the unit is a table, of which whole rows are owned and updated.

    Attributes:
        plain: the tensors in the precision of the run.
        float32: the tensors that are kept in float32.
        packed: the codes and scales of the quantized tensors, whose codecs are ``codecs``.
        layout, grad_layout: the layouts of a slot of weights on the device, and of one of gradients.
    """

    def __init__(
        self, make: Callable[[Unit, str, SlabLayout, Shard, int | None], StorageT], unit: Unit,
        shapes: Mapping[str, Sequence[int]], codecs: Mapping[str, Any], in_float32: Iterable[str], shard: Shard,
        is_table: bool = False,
    ) -> None:  # fmt: skip
        in_float32 = set(in_float32)
        shapes_in_float32 = {name: shape for name, shape in shapes.items() if name in in_float32}
        others = {name: shape for name, shape in shapes.items() if name not in in_float32}
        self.unit, self.shard = unit, shard
        self.codecs = {name: codecs[name] for name in others if name in codecs}
        plain = {name: shape for name, shape in others.items() if name not in self.codecs}
        quantized = {name: others[name] for name in self.codecs}
        packed_shapes = {name: (codec.num_bytes(others[name]),) for name, codec in self.codecs.items()}
        row = next(iter(shapes.values()))[1] if is_table else None  # the width of the unit's only tensor
        self.plain = make(unit, PLAIN, SlabLayout(plain), shard, row)
        self.float32 = make(unit, FLOAT32, SlabLayout(shapes_in_float32), shard, None)
        self.packed = make(unit, PACKED, SlabLayout(packed_shapes, PACKED_ALIGNMENT), shard, None)
        self.layout = SlotLayout(SlabLayout(plain | quantized), self.float32.layout)
        self.lay_out_grads(())  # nothing is trained, until the caller names the trained tensors

    def on(self, shard: Shard, trained: Iterable[str] | None = None) -> "UnitLayout[StorageLayout]":
        """Return the layout of the same slabs for another rank, without memory.

        Args:
            shard: the range of the slabs that the rank owns.
            trained: full names of the trained tensors; None for those that are trained here.
        """
        shapes = {name: self.layout.entry(name).shape for name in self.layout}
        is_table = self.plain.row is not None
        layout = UnitLayout(StorageLayout, self.unit, shapes, self.codecs, self.float32.layout, shard, is_table)
        layout.lay_out_grads(self.grad_layout if trained is None else trained)
        return layout

    def lay_out_grads(self, names: Iterable[str]) -> None:
        """Lay out the gradients of these tensors, which are trained."""
        names = set(names)
        for slab in self.of_weights:
            slab.lay_out_grads(names)
        self.grad_layout = SlotLayout(*(slab.grad_layout for slab in self.of_weights))

    @property
    def of_weights(self) -> tuple[StorageT, StorageT]:
        """The slabs of weights that are not quantized, in the order of the buffers of a slot. Either may be empty."""
        return self.plain, self.float32

    @property
    def all(self) -> tuple[StorageT, StorageT, StorageT]:
        """All slabs. Each may be empty."""
        return self.plain, self.float32, self.packed

    @property
    def saved(self) -> list[StorageT]:
        """The slabs that are saved, each in a file of its own: the plain one, and the one in float32 if it has tensors."""
        return [self.plain, self.float32] if self.float32.layout.numel else [self.plain]

    @property
    def hashed(self) -> list[tuple[StorageT, ...]]:
        """The groups of slabs with a common hash, under the name of the first. Codes and scales are hashed with the plain slab."""
        return [(slab, self.packed) if slab is self.plain else (slab,) for slab in self.saved]

    @property
    def slot_numels(self) -> list[int]:
        """The elements of each buffer of a slot on the device, into which the equal parts of all ranks fit."""
        pairs = zip(self.layout.buffers, self.of_weights, strict=True)
        return [max(layout.numel, slab.slot_cuts[-1]) for layout, slab in pairs]
