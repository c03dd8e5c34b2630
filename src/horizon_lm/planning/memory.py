"""Sizes of the engine's device buffers and of the store's host memory, computed from the sizes of a model's units."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from horizon_lm.constants import MOMENT_BLOCK, PAGE, SLAB_ALIGNMENT
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

    def host_slabs(self, itemsize: int) -> int:
        """Return the bytes of the weights' slabs in host memory, without those of quantized tensors."""
        elements = [slab_elements(unit) for unit in self.units]
        for index, each in enumerate(self.packed):
            elements[1 + index] -= slab_elements(each.tensors)
        return sum(page_aligned(numel * itemsize) for numel in elements)


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


def slot_elements(tensors: Sequence[int], shard: Shard, row: int | None = None) -> int:
    """Return the number of elements of a slot, which several ranks fill in equal parts.

    ``row``: elements of a row, for a table.
    """
    numel = slab_elements(tensors) if row is None else _table_elements(tensors, shard)
    return max(slab_elements(tensors), shard.count * shard.chunk(numel, row or SLAB_ALIGNMENT))


def device_buffers(sizes: ModelSizes, settings: BufferSettings, trained: ModelSizes | None = None) -> Mapping[str, int]:
    """Return the bytes of each kind of buffer in a training step, for the worst case of the tokens in a batch.

    Args:
        sizes: sizes of the model.
        settings: settings of the step.
        trained: sizes of the trainable parameters; None if all parameters are trainable.
    """
    trained = trained or sizes
    shard = settings.shard
    largest = max(slot_elements(block, shard) for block in sizes.blocks)
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
        "resident_weights": sum(slot_elements(each, shard) for each in sizes.blocks[first_resident:]) * compute,
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
    kept = trained.units
    if settings.update_in_backward:
        kept = [trained.table] if trained.tied else []
    kinds = {
        "weights": sizes.host_slabs(WEIGHT_BYTES[settings.precision])
        if settings.shard.is_whole
        else _slabs(sizes.units, WEIGHT_BYTES[settings.precision], settings.shard, sizes.hidden),
        "packed_weights": sum(page_aligned(each.slab_bytes) for each in sizes.packed),
        "low_halves": _slabs(
            _with_masters(sizes, trained, settings), LOW_HALF_BYTES[settings.precision], settings.shard, sizes.hidden
        ),
        "grads": _slabs(kept, settings.grad_bytes, settings.shard, sizes.hidden),
        "moments": _moments(trained, settings),
        "landing": _landing(trained, settings) if settings.update_in_backward else 0,
        "boundaries": settings.offloaded * settings.boundary,
    }
    return {kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes}


def checkpoint_bytes(sizes: ModelSizes, trained: ModelSizes, settings: HostSettings) -> int:
    """Return the bytes of the slabs in a checkpoint. The arguments are those of `host_bytes`."""
    per_weight = (WEIGHT_BYTES[settings.precision], LOW_HALF_BYTES[settings.precision])
    saved, settings = _with_masters(sizes, trained, settings), replace(settings, shard=WHOLE)  # of all ranks
    slabs = sum(_slabs(saved, itemsize, WHOLE, sizes.hidden) for itemsize in per_weight)
    return slabs + _moments(trained, settings)


def _with_masters(sizes: ModelSizes, trained: ModelSizes, settings: HostSettings) -> list[Sequence[int]]:
    """Return the tensors of each unit that may be trained, none of a frozen base: it has no low halves and is in no
    checkpoint.
    """
    units = zip(sizes.units, trained.units, strict=True)
    return [tensors if sum(part) or not settings.frozen_base else () for tensors, part in units]


def _moments(trained: ModelSizes, settings: HostSettings) -> int:
    scales = _scales(trained, settings.shard) if settings.moments == "8bit" else 0
    return 2 * (_slabs(trained.units, MOMENT_BYTES[settings.moments], settings.shard, trained.hidden) + scales)


def _slabs(units: Sequence[Sequence[int]], itemsize: int, shard: Shard, row: int) -> int:
    """Return the bytes of the slabs of these units, of which the first is the table, with rows of ``row`` elements."""
    elements = [
        _table_elements(tensors, shard) if not number else slab_elements(tensors)
        for number, tensors in enumerate(units)
    ]
    return sum(
        _used_bytes(numel, itemsize, shard, SLAB_ALIGNMENT if number else row) for number, numel in enumerate(elements)
    )


def _used_bytes(numel: int, itemsize: int, shard: Shard, granule: int) -> int:
    """Return the bytes of the pages of a slab that hold the range which this rank owns."""
    own = shard.own(shard.cuts(numel, granule))
    if own.start >= own.stop:
        return 0
    return page_aligned(own.stop * itemsize) - own.start * itemsize // PAGE * PAGE


def _scales(trained: ModelSizes, shard: Shard) -> int:
    """Return the bytes of the scales of one 8-bit moment. Each table row starts a new block, as rows are updated
    separately.
    """
    of_row = -(-trained.hidden // MOMENT_BLOCK)
    of_table = trained.vocabulary * of_row if trained.table else 0
    others = [sum(-(-numel // MOMENT_BLOCK) for numel in unit) for unit in trained.units[1:]]
    return _used_bytes(of_table, 4, shard, of_row) + sum(_used_bytes(count, 4, shard, 1) for count in others)


def _landing(trained: ModelSizes, settings: HostSettings) -> int:
    """Return the bytes of the landing slots: two for blocks, one for each other unit. A tied table has a gradient slab
    instead.
    """
    shard = settings.shard

    def length(tensors: Sequence[int]) -> int:
        own = shard.own(shard.cuts(slab_elements(tensors), SLAB_ALIGNMENT))
        return own.stop - own.start

    elements = 2 * max(map(length, trained.blocks)) + length(trained.outer)
    if not trained.tied:
        elements += length(trained.own_head)
        elements += (settings.rows + 1) * trained.hidden if trained.table else 0
    return elements * settings.grad_bytes
