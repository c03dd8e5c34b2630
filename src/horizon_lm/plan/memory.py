"""Bytes of the engine's device buffers and of the store's host memory, from the sizes of a model's units."""

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horizon_lm.constants import MOMENT_BLOCK, SLAB_ALIGNMENT


@dataclass(frozen=True, slots=True)
class ModelSizes:
    """Elements of a model's parameters, or of those that are trained.

    Attributes:
        blocks: for each decoder block the elements of each of its tensors.
        table: the same for the embedding table.
        own_head: the same for the output projection; nothing when it is tied to the table.
        outer: the same for everything that is neither block, head nor table.
        vocabulary, hidden: rows and columns of the embedding table.
        tied: the head is the table.
    """

    blocks: Sequence[Sequence[int]]
    table: Sequence[int]
    own_head: Sequence[int]
    outer: Sequence[int]
    vocabulary: int
    hidden: int
    tied: bool

    @property
    def head(self) -> Sequence[int]:
        """What the head multiplies by."""
        return self.table if self.tied else self.own_head

    @property
    def units(self) -> Sequence[Sequence[int]]:
        """Every unit with slabs of its own."""
        return [self.table, *self.blocks, self.own_head, self.outer]

    @property
    def num_parameters(self) -> int:
        return sum(map(sum, self.units))


@dataclass(frozen=True, slots=True)
class BufferSettings:
    """Settings that decide which buffers there are.

    Attributes:
        tokens: rows of a step times their longest length.
        table_rows, forward_table_rows: distinct rows of the table that a step reads at most, and a batch that only goes
            forward; None for as many as there are tokens.
        compute_bytes, grad_bytes: per element on the device, and in the gradient store.
        micro_batches: a device micro-batch is set, so that gradients are accumulated in fp32.
        chunked_head: the head runs in chunks, with an fp32 gradient buffer.
        offloaded: so many blocks' boundaries pass through a ring on the device.
        held: so many of the last blocks keep their weights on the device.
    """

    tokens: int
    compute_bytes: int = 4
    grad_bytes: int = 2
    micro_batches: bool = False
    chunked_head: bool = True
    offloaded: int = 0
    held: int = 0
    table_rows: int | None = None
    forward_table_rows: int = 0


def slab_elements(tensors: Sequence[int]) -> int:
    """Elements of a slab that holds tensors of these sizes."""
    return sum(-(-numel // SLAB_ALIGNMENT) * SLAB_ALIGNMENT for numel in tensors)


def device_buffers(sizes: ModelSizes, settings: BufferSettings, trained: ModelSizes | None = None) -> Mapping[str, int]:
    """Bytes of each kind of buffer that a training step allocates, in the worst case over the tokens of a batch.

    Args:
        sizes: of the model.
        trained: of those of its parameters that are trained; None for all.
    """
    trained = trained or sizes
    largest = max(slab_elements(block) for block in sizes.blocks)
    head, outer = slab_elements(sizes.head), slab_elements(sizes.outer)
    num_rows = min(settings.tokens, sizes.vocabulary) if settings.table_rows is None else settings.table_rows
    rows, forward_rows = num_rows * sizes.hidden, settings.forward_table_rows * sizes.hidden
    compute, grad = settings.compute_bytes, settings.grad_bytes
    accumulates = settings.micro_batches and grad < 4
    grad_slots = largest if any(map(sum, trained.blocks)) else 0
    first_held = len(sizes.blocks) - settings.held
    buffers = {
        "weight_slots": 2 * largest * compute if first_held else 0,
        "held_weights": sum(map(slab_elements, sizes.blocks[first_held:])) * compute,
        "grad_slots": (1 if accumulates else 2) * grad_slots * grad,
        "grad_accumulator": grad_slots * 4 if accumulates else 0,
        "head_weights": head * compute,
        "head_grads": head * (4 if settings.chunked_head else compute) if trained.head else 0,
        "outer_weights": outer * compute,
        "outer_grads": outer * grad if trained.outer else 0,
        "table_rows": max(rows, forward_rows) * compute,
        "table_row_grads": rows * grad if trained.table else 0,
        "boundary_ring": 2 * settings.tokens * sizes.hidden * compute if settings.offloaded else 0,
    }
    return {kind: num_bytes for kind, num_bytes in buffers.items() if num_bytes}


def smallest_device_capacity(sizes: ModelSizes, settings: BufferSettings) -> int:
    """The smallest device capacity with which a step of these settings runs, whatever its tokens are.

    Activations of one block and of one chunk of logits come on top; the framework's allocator holds those.
    """
    return sum(device_buffers(sizes, settings).values())


WEIGHT_BYTES = {"fp32_master": 2, "bf16": 2, "float32": 4}  # of the form that is streamed
LOW_HALF_BYTES = {"fp32_master": 2, "bf16": 0, "float32": 0}
MOMENT_BYTES = {"float32": 4, "bfloat16": 2, "8bit": 1}  # each of two


@dataclass(frozen=True, slots=True)
class HostSettings:
    """Settings that decide what is kept in host memory.

    Attributes:
        precision, moments: as in a run's settings.
        grad_bytes: per element of the gradient store.
        update_in_backward: gradients are not kept.
        rows: distinct rows of the table that a step reads, at most.
        boundary: bytes of one block's input, for the whole batch.
        offloaded: so many blocks' boundaries wait in host memory.
    """

    precision: str
    moments: str = "float32"
    grad_bytes: int = 2
    update_in_backward: bool = False
    rows: int = 0
    boundary: int = 0
    offloaded: int = 0


def host_bytes(sizes: ModelSizes, trained: ModelSizes, settings: HostSettings) -> Mapping[str, int]:
    """Bytes by kind.

    Args:
        sizes: of the model.
        trained: of those of its parameters that are trained.
    """
    kept = trained.units
    if settings.update_in_backward:
        kept = [trained.table] if trained.tied else []
    moment = MOMENT_BYTES[settings.moments]
    kinds = {
        "weights": _slabs(sizes.units, WEIGHT_BYTES[settings.precision]),
        "low_halves": _slabs(sizes.units, LOW_HALF_BYTES[settings.precision]),
        "grads": _slabs(kept, settings.grad_bytes),
        "moments": 2 * (_slabs(trained.units, moment) + (_scales(trained) if settings.moments == "8bit" else 0)),
        "landing": _landing(trained, settings) if settings.update_in_backward else 0,
        "boundaries": settings.offloaded * settings.boundary,
    }
    return {kind: num_bytes for kind, num_bytes in kinds.items() if num_bytes}


def _slabs(units: Sequence[Sequence[int]], itemsize: int) -> int:
    return sum(_pages(slab_elements(tensors) * itemsize) for tensors in units)


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _scales(trained: ModelSizes) -> int:
    """Of one moment. Rows of the table, which are updated one by one, begin new blocks."""
    of_table = trained.vocabulary * -(-trained.hidden // MOMENT_BLOCK) if trained.table else 0
    others = [sum(-(-numel // MOMENT_BLOCK) for numel in unit) for unit in trained.units[1:]]
    return sum(_pages(4 * count) for count in (of_table, *others))


def _landing(trained: ModelSizes, settings: HostSettings) -> int:
    """Two slots for blocks, one each for the head, the outer parameters and the table's rows; a tied table has a slab."""
    elements = 2 * max(map(slab_elements, trained.blocks)) + slab_elements(trained.outer)
    if not trained.tied:
        elements += slab_elements(trained.own_head)
        elements += (settings.rows + 1) * trained.hidden if trained.table else 0
    return elements * settings.grad_bytes
