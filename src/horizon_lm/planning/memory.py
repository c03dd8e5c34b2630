"""Sizes of the engine's device buffers and of the store's host memory, computed from the sizes of a model's units."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from horizon_lm.constants import COLLECTIVE_BYTES, MOMENT_BLOCK, PACKED_ALIGNMENT, PAGE, SLAB_ALIGNMENT
from horizon_lm.quantities import page_aligned
from horizon_lm.shards import WHOLE, Shard


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

    @property
    def head(self) -> Sequence[int]:
        """The tensors by which the head multiplies."""
        return self.table if self.tied else self.own_head

    @property
    def units(self) -> Sequence[Sequence[int]]:
        """The tensors of each unit that has its own slabs."""
        return [self.table, *self.blocks, self.own_head, self.outer, self.idle]

    @property
    def num_parameters(self) -> int:
        return sum(map(sum, self.units))

    def file_bytes(self, itemsize: float) -> int:
        """Return the bytes of all weights in a checkpoint, of which quantized tensors keep their codes and scales."""
        packed, decoded = sum(each.num_bytes for each in self.packed), sum(sum(each.tensors) for each in self.packed)
        return round((self.num_parameters - decoded) * itemsize) + packed

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
    table_rows: int | None = None
    forward_table_rows: int = 0
    shard: Shard = WHOLE


def slab_elements(tensors: Sequence[int]) -> int:
    """Return the number of elements of a slab for tensors of these sizes."""
    return sum(-(-numel // SLAB_ALIGNMENT) * SLAB_ALIGNMENT for numel in tensors)


def _table_elements(tensors: Sequence[int], shard: Shard) -> int:
    """Return the number of elements of a table's slab that are cut: between rows, so without padding at its end."""
    return slab_elements(tensors) if shard.is_whole else sum(tensors)


def slot_elements(tensors: Sequence[int], shard: Shard, row: int | None = None, packed: Sequence[int] = ()) -> int:
    """Return the number of elements of a slot, which several ranks fill in equal parts, except for quantized tensors.

    Args:
        tensors: elements of each tensor.
        shard: the ranks.
        row: elements of a row, for a table.
        packed: those of the tensors that are quantized.
    """
    numel = slab_elements(tensors) - slab_elements(packed) if row is None else _table_elements(tensors, shard)
    return max(slab_elements(tensors), shard.count * shard.chunk(numel, row or SLAB_ALIGNMENT))


def block_slots(sizes: ModelSizes, shard: Shard) -> list[int]:
    """Return the number of elements of each block's slot."""
    return [
        slot_elements(tensors, shard, packed=sizes.packed_of(index).tensors)
        for index, tensors in enumerate(sizes.blocks)
    ]


def _packed_slot(sizes: ModelSizes, shard: Shard) -> int:
    """Return the bytes of a slot in which several ranks gather the codes and scales of a block."""
    if shard.is_whole:
        return 0
    return max((shard.count * shard.chunk(each.slab_bytes, PACKED_ALIGNMENT) for each in sizes.packed), default=0)


def device_buffers(sizes: ModelSizes, settings: BufferSettings, trained: ModelSizes | None = None) -> Mapping[str, int]:
    """Return the bytes of each kind of buffer in a training step, for the worst case of the tokens in a batch.

    Args:
        sizes: sizes of the model.
        settings: settings of the step.
        trained: sizes of the trainable parameters; None if all parameters are trainable.
    """
    trained = trained or sizes
    shard = settings.shard
    slots = block_slots(sizes, shard)
    largest = max(slots)
    head = slot_elements(sizes.head, shard, sizes.hidden if sizes.tied else None)
    outer = slot_elements(sizes.outer, shard)
    num_rows = min(settings.tokens, sizes.vocabulary) if settings.table_rows is None else settings.table_rows
    rows, forward_rows = num_rows * sizes.hidden, settings.forward_table_rows * sizes.hidden
    compute, grad = settings.compute_bytes, settings.grad_bytes
    sums = settings.micro_batches and grad < 4
    accumulates, slot_grad = sums and shard.is_whole, 4 if sums and not shard.is_whole else grad
    grad_slots = largest if any(map(sum, trained.blocks)) else 0
    first_resident = len(sizes.blocks) - settings.resident
    buffers = {
        "weight_slots": 2 * largest * compute if first_resident else 0,
        "resident_weights": sum(slots[first_resident:]) * compute,
        "packed_slots": 2 * _packed_slot(sizes, shard),
        "grad_slots": (1 if accumulates else 2) * grad_slots * slot_grad,
        "grad_accumulator": grad_slots * 4 if accumulates else 0,
        "head_weights": head * compute,
        "head_grads": head * (4 if settings.chunked_head else compute) if trained.head else 0,
        "outer_weights": outer * compute,
        "outer_grads": outer * slot_grad if trained.outer else 0,
        "table_rows": max(rows, forward_rows) * compute,
        "table_row_grads": rows * grad if trained.table else 0,
        "boundary_ring": 2 * settings.tokens * sizes.hidden * compute if settings.offloaded else 0,
    }
    return {kind: num_bytes for kind, num_bytes in buffers.items() if num_bytes}


def sum_buffers(size: int, of_machine: int, at_once: int = COLLECTIVE_BYTES) -> Mapping[str, int]:
    """Return the bytes in which a rank sums gradients on its device, by their use.

    Args:
        size: number of ranks.
        of_machine: number of ranks of each machine.
        at_once: bytes of the gradients that it receives at once.
    """
    if size == 1:
        return {}
    return {"received": at_once, "total": 2 * at_once // of_machine}  # in float32, of gradients in 2 bytes or 4


def smallest_device_capacity(sizes: ModelSizes, settings: BufferSettings) -> int:
    """Return the smallest ``device_memory`` that suffices for a step with these settings, for any tokens.

    Activations of one block and of one chunk of logits are not included: the framework's allocator holds them.
    """
    return sum(device_buffers(sizes, settings).values())


WEIGHT_BYTES = {"fp32_master": 2, "bf16": 2, "float32": 4}  # bytes of the streamed half
LOW_HALF_BYTES = {"fp32_master": 2, "bf16": 0, "float32": 0}
MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "8bit": 1}  # bytes of each of the two moments


@dataclass(frozen=True, slots=True)
class HostSettings:
    """The settings that determine the host memory of a run.

    Attributes:
        precision, moments: as in a run's settings.
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
    ranges = _trained_ranges(sizes, trained, settings.shard)
    kept = ranges
    if settings.update_in_backward:
        kept = ranges[:1] if trained.tied else []
    kinds = {
        "weights": _slabs(sizes.units, WEIGHT_BYTES[settings.precision], settings.shard, sizes.hidden, sizes.packed),
        "packed_weights": sum(
            _used_bytes(each.slab_bytes, 1, settings.shard, PACKED_ALIGNMENT) for each in sizes.packed
        ),
        "low_halves": _slabs(
            _with_masters(sizes, trained, settings), LOW_HALF_BYTES[settings.precision], settings.shard, sizes.hidden
        ),
        "grads": _range_bytes(kept, settings.grad_bytes),
        "moments": _moments(trained, ranges, settings),
        "landing": _landing(trained, ranges, settings) if settings.update_in_backward else 0,
        "boundaries": settings.offloaded * settings.boundary,
    }
    return {kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes}


def checkpoint_bytes(sizes: ModelSizes, trained: ModelSizes, settings: HostSettings) -> int:
    """Return the bytes of the slabs in a checkpoint. The arguments are those of `host_bytes`."""
    per_weight = (WEIGHT_BYTES[settings.precision], LOW_HALF_BYTES[settings.precision])
    saved, settings = _with_masters(sizes, trained, settings), replace(settings, shard=WHOLE)  # of all ranks
    slabs = sum(_slabs(saved, itemsize, WHOLE, sizes.hidden) for itemsize in per_weight)
    return slabs + _moments(trained, _trained_ranges(sizes, trained, WHOLE), settings)


def largest_file_bytes(sizes: ModelSizes, trained: ModelSizes, settings: HostSettings) -> int:
    """Return the bytes of the largest file of a checkpoint, which holds a rank's range of a unit. The arguments are those of
    `host_bytes`.
    """
    units = zip(_with_masters(sizes, trained, settings), trained.units, strict=True)
    per_weight = WEIGHT_BYTES[settings.precision] + LOW_HALF_BYTES[settings.precision]
    whole = [
        per_weight * slab_elements(saved) + 2 * MOMENT_BYTES[settings.moments] * slab_elements(part)
        for saved, part in units
    ]
    return max(whole) // settings.shard.count


def _with_masters(sizes: ModelSizes, trained: ModelSizes, settings: HostSettings) -> list[Sequence[int]]:
    """Return the tensors of each unit that may be trained, none of a frozen base: it has no low halves and is in no
    checkpoint.
    """
    units = zip(sizes.units, trained.units, strict=True)
    return [tensors if sum(part) or not settings.frozen_base else () for tensors, part in units]


def _moments(trained: ModelSizes, ranges: Sequence[slice], settings: HostSettings) -> int:
    scales = _scales(trained, ranges, settings.shard) if settings.moments == "8bit" else []
    return 2 * (_range_bytes(ranges, MOMENT_BYTES[settings.moments]) + _range_bytes(scales, 4))


def _slabs(
    units: Sequence[Sequence[int]], itemsize: int, shard: Shard, row: int, packed: Sequence[PackedSizes] = ()
) -> int:
    """Return the bytes of this rank's ranges of the weights of these units.

    Args:
        units: the tensors of the table, of each block, and of other units.
        itemsize: bytes of an element.
        shard: the range of each slab that this rank owns.
        row: elements of a row of the table.
        packed: quantized tensors of each block, which are not in these slabs.
    """
    elements = [
        _table_elements(tensors, shard) if not number else slab_elements(tensors)
        for number, tensors in enumerate(units)
    ]
    for index, each in enumerate(packed):
        elements[1 + index] -= slab_elements(each.tensors)
    return sum(
        _used_bytes(numel, itemsize, shard, SLAB_ALIGNMENT if number else row) for number, numel in enumerate(elements)
    )


def _used_bytes(numel: int, itemsize: int, shard: Shard, granule: int) -> int:
    """Return the bytes of the pages of a slab that hold the range which this rank owns."""
    return _range_bytes([shard.own(shard.cuts(numel, granule))], itemsize)


def _range_bytes(ranges: Sequence[slice], itemsize: int) -> int:
    """Return the bytes of the pages that hold these ranges of slabs."""
    return sum(
        page_aligned(own.stop * itemsize) - own.start * itemsize // PAGE * PAGE
        for own in ranges
        if own.start < own.stop
    )


def _trained_ranges(sizes: ModelSizes, trained: ModelSizes, shard: Shard) -> list[slice]:
    """Return this rank's range of the gradients of each unit: those of its range of the weights."""
    ranges = []
    for number, (tensors, part) in enumerate(zip(sizes.units, trained.units, strict=True)):
        if not any(part):
            ranges.append(slice(0, 0))
        elif not number:
            ranges.append(shard.own(shard.cuts(_table_elements(tensors, shard), sizes.hidden)))
        else:
            own = shard.own(shard.cuts(slab_elements(tensors), SLAB_ALIGNMENT))
            ranges.append(slice(_place(tensors, part, own.start), _place(tensors, part, own.stop)))
    return ranges


def _place(tensors: Sequence[int], trained: Sequence[int], offset: int) -> int:
    """Return the offset in a slab of the trained tensors that corresponds to one in a slab of all tensors of a unit."""
    before = place = 0
    for numel, own in zip(tensors, trained, strict=True):
        if own and offset - before < numel:
            return place + max(0, offset - before)
        before, place = before + slab_elements([numel]), place + slab_elements([own])
    return place


def _scales(trained: ModelSizes, ranges: Sequence[slice], shard: Shard) -> list[slice]:
    """Return this rank's range of the scales of one 8-bit moment, for each unit. Each table row starts a new block, as rows
    are updated separately.
    """
    of_row = -(-trained.hidden // MOMENT_BLOCK)
    rows = trained.vocabulary * of_row if trained.table else 0
    found = [shard.own(shard.cuts(rows, of_row))]
    for unit, own in zip(trained.units[1:], ranges[1:], strict=True):
        found.append(slice(_scale_at(unit, own.start), _scale_at(unit, own.stop)))
    return found


def _scale_at(tensors: Sequence[int], offset: int) -> int:
    """Return the number of scales of the blocks before an offset in a slab of these tensors."""
    before = count = 0
    for numel in tensors:
        if offset - before < numel:
            return count + max(0, offset - before) // MOMENT_BLOCK
        before, count = before + slab_elements([numel]), count + -(-numel // MOMENT_BLOCK)
    return count


def _landing(trained: ModelSizes, ranges: Sequence[slice], settings: HostSettings) -> int:
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
