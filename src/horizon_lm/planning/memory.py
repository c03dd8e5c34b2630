"""Sizes of the engine's device buffers and of the store's host memory, computed from the sizes of a model's units."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from horizon_lm.constants import COLLECTIVE_BYTES, PACKED_ALIGNMENT
from horizon_lm.planning.experts import ExpertSizes
from horizon_lm.slabs import WHOLE, Shard, UnitCuts, scale_at, slab_elements, used_bytes


@dataclass(frozen=True, slots=True)
class PackedSizes:
    """The quantized tensors of a block in host memory.

    Attributes:
        tensors: elements of each tensor.
        num_bytes: bytes of their codes and scales, which cross the link.
        slab_bytes: bytes of their slab.
    """

    tensors: Sequence[int]
    num_bytes: int
    slab_bytes: int


_NOT_PACKED = PackedSizes((), 0, 0)


MatrixShape = tuple[int, int, int]  # number, rows and columns of equal matrices


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Numbers of elements of a model's parameters, or of its trainable parameters.

    Attributes:
        blocks: elements of each tensor, for each decoder block.
        table: elements of the embedding table.
        own_head: elements of the output projection; empty if it is tied to the table.
        outer: elements of each tensor outside of blocks, head and table.
        vocabulary, hidden: rows and columns of the embedding table, V and H.
        tied: the head uses the embedding table.
        idle: elements of embedding tables of which only rows are read, beside the one that is trained.
        packed: the quantized tensors of each block, which ``blocks`` has, too; empty if no block has any.
        matrices: for each tensor in ``blocks``, its trained matrices; None for other tensors. A block without any may have an empty
            list.
        experts: the routed experts of each block that can be cut into tiles, None for other blocks; empty if no block has any.
        in_float32: the weights that are kept in float32 whatever the precision, which are in none of the others; None if there are
            none.
    """

    blocks: Sequence[Sequence[int]]
    table: Sequence[int]
    own_head: Sequence[int]
    outer: Sequence[int]
    vocabulary: int
    hidden: int
    tied: bool
    idle: Sequence[int] = ()
    packed: Sequence[PackedSizes] = ()
    matrices: Sequence[Sequence[MatrixShape | None]] = ()
    experts: Sequence[ExpertSizes | None] = ()
    in_float32: "ModelSizes | None" = None

    @property
    def head(self) -> Sequence[int]:
        """The tensors by which the head multiplies."""
        if self.tied:
            return self.table
        return self.own_head if self.in_float32 is None else [*self.own_head, *self.in_float32.own_head]

    @property
    def units(self) -> Sequence[Sequence[int]]:
        """The tensors of each unit that has its own slabs, without those in float32."""
        return [self.table, *self.blocks, self.own_head, self.outer, self.idle]

    @property
    def num_parameters(self) -> int:
        in_float32 = 0 if self.in_float32 is None else self.in_float32.num_parameters
        return sum(map(sum, self.units)) + in_float32

    def file_bytes(self, itemsize: float) -> int:
        """Return the bytes of all weights in a checkpoint, of which quantized tensors keep their codes and scales."""
        packed, decoded = sum(each.num_bytes for each in self.packed), sum(sum(each.tensors) for each in self.packed)
        return round((self.num_parameters - decoded) * itemsize) + packed

    def matrices_of(self, index: int) -> list[MatrixShape]:
        """Return the trained matrices of a block."""
        return [each for each in self.matrices[index] if each is not None] if self.matrices else []

    def only_matrices(self) -> "ModelSizes":
        """Return the sizes with 0 for all weights but these matrices."""
        blocks = [
            [prod(shape or (0,)) for shape in self.matrices[index]] if self.matrices_of(index) else []
            for index in range(len(self.blocks))
        ]
        return replace(self, blocks=blocks, table=(), own_head=(), outer=(), idle=())

    def without_matrices(self) -> "ModelSizes":
        """Return the sizes with 0 for these matrices."""
        blocks = [
            [0 if shape else numel for numel, shape in zip(tensors, self.matrices[index], strict=True)]
            if self.matrices_of(index)
            else tensors
            for index, tensors in enumerate(self.blocks)
        ]
        return replace(self, blocks=blocks)

    def experts_of(self, index: int) -> ExpertSizes | None:
        """Return the routed experts of a block; None if it has none that can be cut into tiles."""
        return self.experts[index] if self.experts else None

    def without_experts(self) -> "ModelSizes":
        """Return the sizes of what one rank streams of the model beside tiles: blocks with 0 for their experts."""
        blocks = [
            tensors if experts is None else experts.others(tensors)
            for tensors, experts in zip(self.blocks, self.experts, strict=True)
        ]
        return replace(self, blocks=blocks, packed=(), matrices=())

    def tile_numel(self, size: int) -> int:
        """Return the elements of a slot for tiles of at most this many experts."""
        found = zip(self.blocks, self.experts, strict=True)
        return max((slab_elements(each.tile(tensors, size)) for tensors, each in found if each), default=0)

    def packed_of(self, index: int) -> PackedSizes:
        """Return the quantized tensors of a block; none in a model without them."""
        return self.packed[index] if self.packed else _NOT_PACKED


@dataclass(frozen=True, slots=True)
class BufferSettings:
    """The settings that determine the engine's device buffers.

    Attributes:
        tokens: sequences of a step times the longest length.
        compute_bytes, grad_bytes: bytes per element on the device, and in the gradient store.
        micro_batches: a device micro-batch is set, so gradients are accumulated in fp32.
        chunked_head: the head runs in chunks, with an fp32 gradient buffer.
        offloaded: number of blocks whose boundaries pass through a ring on the device.
        resident: number of last blocks with resident weights.
        expert_tile: number of experts in a tile; None if no block is cut into tiles.
        table_rows, forward_table_rows: maximum number of distinct table rows read by a step, and by a batch without
            gradients, on all ranks; None for one per token.
        shard: the range of each slab that this rank owns.
    """

    tokens: int
    compute_bytes: int = 4
    grad_bytes: int = 2
    micro_batches: bool = False
    chunked_head: bool = True
    offloaded: int = 0
    resident: int = 0
    expert_tile: int | None = None
    table_rows: int | None = None
    forward_table_rows: int = 0
    shard: Shard = WHOLE

    @property
    def kept_each(self) -> int:
        """The hidden states that a block keeps for the backward pass: its input, and with tiles what its experts return."""
        return 1 if self.expert_tile is None else 2


def block_bytes(sizes: ModelSizes, settings: BufferSettings) -> list[int]:
    """Return the bytes of each block's weights in its slot on the device."""
    moved = sizes if settings.expert_tile is None else sizes.without_experts()
    slots = [numel * settings.compute_bytes for numel in _block_slots(moved, settings.shard)]
    if sizes.in_float32 is None:
        return slots
    others = block_bytes(sizes.in_float32, replace(settings, compute_bytes=4, expert_tile=None))
    return [sum(both) for both in zip(slots, others, strict=True)]


def _block_slots(sizes: ModelSizes, shard: Shard) -> list[int]:
    """Return the number of elements of each block's slot."""
    return [cuts.slot_numel for cuts in _cuts(sizes, shard)[1 : 1 + len(sizes.blocks)]]


def _cuts(sizes: ModelSizes, shard: Shard) -> list[UnitCuts]:
    """Return the places at which the slabs of each unit are cut."""
    packed = {1 + index: each.tensors for index, each in enumerate(sizes.packed)}
    return [
        UnitCuts(tensors, packed.get(number, ()), None if number else sizes.hidden, shard)
        for number, tensors in enumerate(sizes.units)
    ]


def device_buffers(sizes: ModelSizes, settings: BufferSettings, trained: ModelSizes | None = None) -> Mapping[str, int]:
    """Return the bytes of each kind of buffer in a training step, for the worst case of the tokens in a batch.

    Args:
        sizes: sizes of the model.
        settings: settings of the step.
        trained: sizes of the trainable parameters; None if all parameters are trainable.
    """
    trained = trained or sizes
    accumulates, slot_grad = settings.shard.grad_slots(settings.micro_batches, settings.grad_bytes)
    moved, moved_grads = sizes, trained
    if settings.expert_tile is not None:
        moved, moved_grads = sizes.without_experts(), trained.without_experts()
    buffers = _unit_buffers(moved, moved_grads, settings, slot_grad, accumulates)
    if sizes.in_float32 is not None:
        assert trained.in_float32 is not None
        own = replace(settings, compute_bytes=4)
        for kind, num_bytes in _unit_buffers(sizes.in_float32, trained.in_float32, own, 4, accumulates).items():
            buffers[kind] += num_bytes
    num_rows = min(settings.tokens, sizes.vocabulary) if settings.table_rows is None else settings.table_rows
    rows, forward_rows = num_rows * sizes.hidden, settings.forward_table_rows * sizes.hidden
    compute = settings.compute_bytes
    buffers |= {
        "packed_slots": 2 * max((settings.shard.packed_slot(each.slab_bytes)[-1] for each in sizes.packed), default=0),
        "table_rows": max(rows, forward_rows) * compute,
        "table_row_grads": rows * settings.grad_bytes if trained.table else 0,
        "boundary_ring": 2 * settings.kept_each * settings.tokens * sizes.hidden * compute if settings.offloaded else 0,
        **_tile_buffers(sizes, trained, settings, 4 if accumulates else slot_grad),
    }
    return {kind: num_bytes for kind, num_bytes in buffers.items() if num_bytes}


def _tile_buffers(sizes: ModelSizes, trained: ModelSizes, settings: BufferSettings, tile_grad: int) -> dict[str, int]:
    """Return the bytes of the slots of tiles.

    Args:
        sizes, trained, settings: as in `device_buffers`.
        tile_grad: bytes per element of a gradient, which is summed over micro-batches in its slot.
    """
    if settings.expert_tile is None:
        return {}
    slot = sizes.tile_numel(settings.expert_tile)
    is_trained = trained.tile_numel(settings.expert_tile) > 0
    return {
        "tile_slots": 2 * slot * settings.compute_bytes,
        "tile_grad_slots": 2 * slot * tile_grad if is_trained else 0,
    }


def _unit_buffers(
    sizes: ModelSizes, trained: ModelSizes, settings: BufferSettings, slot_grad: int, accumulates: bool
) -> dict[str, int]:
    """Return the bytes of the buffers of blocks, head and outer parameters, without those of weights in float32.

    Args:
        sizes, trained, settings: as in `device_buffers`.
        slot_grad: bytes per element of a gradient on the device.
        accumulates: gradients are summed in an accumulator.
    """
    shard, compute = settings.shard, settings.compute_bytes
    slots = _block_slots(sizes, shard)
    own_head, trained_head = ([each.table, each.own_head][not each.tied] for each in (sizes, trained))
    head = UnitCuts(own_head, row=sizes.hidden if sizes.tied else None, shard=shard).slot_numel
    outer = UnitCuts(sizes.outer, shard=shard).slot_numel
    grad_slots = max(slots) if any(map(sum, trained.blocks)) else 0
    first_resident = len(sizes.blocks) - settings.resident
    return {
        "weight_slots": 2 * max(slots) * compute if first_resident else 0,
        "resident_weights": sum(slots[first_resident:]) * compute,
        "grad_slots": (1 if accumulates else 2) * grad_slots * slot_grad,
        "grad_accumulator": grad_slots * 4 if accumulates else 0,
        "head_weights": head * compute,
        "head_grads": head * (4 if settings.chunked_head else compute) if trained_head else 0,
        "outer_weights": outer * compute,
        "outer_grads": outer * slot_grad if trained.outer else 0,
    }


def sum_buffers(size: int, of_machine: int, at_once: int = COLLECTIVE_BYTES) -> Mapping[str, int]:
    """Return the bytes in which a rank sums gradients on its device, by their use.

    Args:
        size: number of ranks.
        of_machine: number of ranks of each machine.
        at_once: bytes of the gradients that it receives at once.
    """
    if size == 1:
        return {}
    # Each of the machine's ranks sends an equal share of what is received. Their total has the length of one share, and is float32: twice
    # the share's bytes for gradients in bfloat16, and more than enough for those in float32.
    return {"received": at_once, "total": 2 * at_once // of_machine}


WEIGHT_BYTES = {"fp32_master": 2, "bf16": 2, "float32": 4}  # bytes of the streamed half
LOW_HALF_BYTES = {"fp32_master": 2, "bf16": 0, "float32": 0}
MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "8bit": 1}  # bytes of each moment


@dataclass(frozen=True, slots=True)
class PlannedOptimizer:
    """The figures of an optimizer that a plan needs. An update reads and writes its moments once.

    Attributes:
        name: as in reports.
        num_moments: moments of each parameter.
        orthogonalizes: matrices of blocks have one moment, which is orthogonalized on the device.
    """

    name: str
    num_moments: int
    orthogonalizes: bool = False

    def moment_bytes(self, moments: str) -> int:
        """Return the bytes of a parameter's moments, without the scales of 8-bit moments: of one in a matrix, where these differ."""
        return (1 if self.orthogonalizes else self.num_moments) * MOMENT_BYTES[moments]

    def moments_of(self, trained: ModelSizes) -> list[ModelSizes]:
        """Return the sizes of the parameters that have each moment."""
        if not self.orthogonalizes:
            return [trained] * self.num_moments
        return [trained.only_matrices(), *[trained.without_matrices()] * self.num_moments]


ADAMW = PlannedOptimizer("AdamW", 2)
"""The optimizer that runs have by default, and that the seconds of an update are measured with."""


@dataclass(frozen=True, slots=True)
class HostSettings:
    """The settings that determine the host memory of a run.

    Attributes:
        precision, moments: as in a run's settings.
        optimizer: the optimizer of the run.
        grad_bytes: bytes per element of the gradient store.
        update_in_backward: there is no gradient store.
        rows: maximum number of distinct table rows read by a step.
        boundary: bytes of one block's input for the whole batch.
        offloaded: number of boundaries in host memory.
        frozen_base: only units with trainable parameters have low halves, and are in checkpoints.
        shard: the range of each slab that this rank owns.
    """

    precision: str
    moments: str = "float32"
    optimizer: PlannedOptimizer = ADAMW
    grad_bytes: int = 2
    update_in_backward: bool = False
    rows: int = 0
    boundary: int = 0
    offloaded: int = 0
    frozen_base: bool = False
    shard: Shard = WHOLE


def host_bytes(sizes: ModelSizes, trained: ModelSizes, settings: HostSettings) -> Mapping[str, int]:
    """Return the host memory of a run in bytes, by kind.

    Args:
        sizes: sizes of the model.
        trained: sizes of the trainable parameters.
        settings: settings of the run.
    """
    kinds = _slab_bytes(sizes, trained, settings, _has_masters(trained, settings))
    kinds["boundaries"] = settings.offloaded * settings.boundary
    return {kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes}


def _slab_bytes(
    sizes: ModelSizes, trained: ModelSizes, settings: HostSettings, has_masters: Sequence[bool]
) -> dict[str, int]:
    """Return the bytes of all slabs by kind, and of those in which gradients land."""
    cuts = _cuts(sizes, settings.shard)
    ranges = _trained_ranges(cuts, trained)
    kept = ranges
    if settings.update_in_backward:
        kept = ranges[:1] if trained.tied else []
    masters = [each for each, saved in zip(cuts, has_masters, strict=True) if saved]
    packed = [settings.shard.own(settings.shard.cuts(each.slab_bytes, PACKED_ALIGNMENT)) for each in sizes.packed]
    kinds = {
        "weights": _own_bytes(cuts, WEIGHT_BYTES[settings.precision]),
        "packed_weights": used_bytes(packed, 1),
        "low_halves": _own_bytes(masters, LOW_HALF_BYTES[settings.precision]),
        "grads": used_bytes(kept, settings.grad_bytes),
        "moments": _moments(cuts, trained, settings),
        "landing": _landing_slot_bytes(trained, ranges, settings) if settings.update_in_backward else 0,
    }
    if sizes.in_float32 is not None:
        assert trained.in_float32 is not None
        for kind, num_bytes in _slab_bytes(
            sizes.in_float32, trained.in_float32, in_float32(settings), has_masters
        ).items():
            kinds[kind] += num_bytes
    return kinds


def in_float32(settings: HostSettings) -> HostSettings:
    """Return the settings by which weights in float32 are stored in a run with these."""
    return replace(settings, precision="float32", grad_bytes=4)


def checkpoint_bytes(sizes: ModelSizes, trained: ModelSizes, settings: HostSettings) -> int:
    """Return the bytes of the slabs in a checkpoint. The arguments are those of `host_bytes`."""
    settings = replace(settings, shard=WHOLE)  # of all ranks
    return _saved_bytes(sizes, trained, settings, _has_masters(trained, settings))


def _saved_bytes(sizes: ModelSizes, trained: ModelSizes, settings: HostSettings, has_masters: Sequence[bool]) -> int:
    per_weight = (WEIGHT_BYTES[settings.precision], LOW_HALF_BYTES[settings.precision])
    units = zip(sizes.units, has_masters, strict=True)
    saved = [UnitCuts(tensors) for tensors, is_saved in units if is_saved]
    slabs = sum(_own_bytes(saved, itemsize) for itemsize in per_weight)
    slabs += _moments(_cuts(sizes, WHOLE), trained, settings)
    if sizes.in_float32 is not None:
        assert trained.in_float32 is not None
        slabs += _saved_bytes(sizes.in_float32, trained.in_float32, in_float32(settings), has_masters)
    return slabs


def largest_file_bytes(sizes: ModelSizes, trained: ModelSizes, settings: HostSettings) -> int:
    """Return the bytes of the largest file of a checkpoint, which holds a rank's range of a unit. The arguments are those of
    `host_bytes`.
    """
    return max(_file_bytes(sizes, trained, settings, _has_masters(trained, settings))) // settings.shard.count


def _file_bytes(
    sizes: ModelSizes, trained: ModelSizes, settings: HostSettings, has_masters: Sequence[bool]
) -> list[int]:
    """Return the bytes of each unit's weights and moments in a checkpoint."""
    per_weight = WEIGHT_BYTES[settings.precision] + LOW_HALF_BYTES[settings.precision]
    moments = zip(*(held.units for held in settings.optimizer.moments_of(trained)), strict=True)
    units = zip(sizes.units, has_masters, moments, strict=True)
    found = [
        per_weight * slab_elements(tensors) * is_saved + MOMENT_BYTES[settings.moments] * sum(map(slab_elements, held))
        for tensors, is_saved, held in units
    ]
    if sizes.in_float32 is not None:
        assert trained.in_float32 is not None
        found += _file_bytes(sizes.in_float32, trained.in_float32, in_float32(settings), has_masters)
    return found


def _has_masters(trained: ModelSizes, settings: HostSettings) -> list[bool]:
    """Return whether each unit has low halves and is in checkpoints: all but those of a frozen base."""
    others = trained.units if trained.in_float32 is None else trained.in_float32.units
    return [
        bool(sum(part) + sum(other)) or not settings.frozen_base
        for part, other in zip(trained.units, others, strict=True)
    ]


def _moments(cuts: Sequence[UnitCuts], trained: ModelSizes, settings: HostSettings) -> int:
    """Return the bytes of this rank's range of all moments."""
    total = 0
    for held in settings.optimizer.moments_of(trained):
        ranges = _trained_ranges(cuts, held)
        scales = _scales(held, ranges) if settings.moments == "8bit" else []
        total += used_bytes(ranges, MOMENT_BYTES[settings.moments]) + used_bytes(scales, 4)
    return total


def _own_bytes(cuts: Iterable[UnitCuts], itemsize: int) -> int:
    """Return the bytes of the pages that hold this rank's ranges of the weights of these units."""
    return used_bytes((each.own for each in cuts), itemsize)


def _trained_ranges(cuts: Sequence[UnitCuts], trained: ModelSizes) -> list[slice]:
    """Return this rank's range of the gradients of each unit."""
    return [
        each.shard.own(each.restricted(part)) if any(part) else slice(0, 0)
        for each, part in zip(cuts, trained.units, strict=True)
    ]


def _scales(trained: ModelSizes, ranges: Sequence[slice]) -> list[slice]:
    """Return this rank's range of the scales of one 8-bit moment, for each unit."""
    rows = [trained.hidden] + [None] * (len(trained.units) - 1)
    return [
        slice(scale_at(tensors, own.start, row), scale_at(tensors, own.stop, row))
        for tensors, own, row in zip(trained.units, ranges, rows, strict=True)
    ]


def _landing_slot_bytes(trained: ModelSizes, ranges: Sequence[slice], settings: HostSettings) -> int:
    """Return the bytes of the landing slots: two for blocks, one for each other unit. A tied table has a gradient slab
    instead.
    """
    lengths = [own.stop - own.start for own in ranges]
    num_blocks = len(trained.blocks)
    elements = 2 * max(lengths[1 : 1 + num_blocks]) + lengths[2 + num_blocks]  # of blocks, and outer parameters
    if not trained.tied:
        elements += lengths[1 + num_blocks]  # of the head
        elements += (settings.rows + 1) * trained.hidden if trained.table else 0
    return elements * settings.grad_bytes
