"""List the engine's buffers on the device: slots, which the engine allocates, and buffers that grow with the batch."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from horizon_lm.common.constants import COLLECTIVE_BYTES
from horizon_lm.common.ranges import length
from horizon_lm.common.units import EMBED, HEAD, OUTER
from horizon_lm.memory.layout.model import TiledLayout
from horizon_lm.memory.layout.parts import PartLayout
from horizon_lm.memory.layout.units import UnitLayout

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}
"""Bytes of an element, by the name of its dtype."""


@dataclass(frozen=True, slots=True)
class BufferOptions:
    """The settings that determine the sizes of buffers.

    Attributes:
        compute_dtype, grad_dtype: names of the dtypes of weights on the device, and of gradients in host memory.
        in_micro_batches: a device micro-batch is set, so gradients are accumulated in fp32.
        chunked_head: the head runs in chunks, with an fp32 gradient buffer.
    """

    compute_dtype: str = "float32"
    grad_dtype: str = "bfloat16"
    in_micro_batches: bool = False
    chunked_head: bool = True


@dataclass(frozen=True, slots=True)
class BufferSettings:
    """The settings that determine the sizes of the engine's device buffers.

    Attributes:
        options: the settings that determine the sizes of slots.
        tokens: sequences of a step times the longest length.
        offloaded: number of blocks whose boundaries pass through a ring on the device.
        largest_boundary: bytes of the largest of these boundaries; None if all have those of the decoder's blocks.
        resident: number of last blocks with resident weights.
        table_rows, forward_table_rows: maximum number of distinct table rows read by a step, and by a batch without
            gradients, on all ranks; None for one per token.
    """

    options: BufferOptions
    tokens: int
    offloaded: int = 0
    resident: int = 0
    table_rows: int | None = None
    forward_table_rows: int = 0
    largest_boundary: int | None = None


@dataclass(frozen=True, slots=True)
class SlotSizes:
    """Equal slots that are allocated together.

    Attributes:
        count: number of slots.
        buffers: elements and name of the dtype of each buffer of a slot.
    """

    count: int
    buffers: tuple[tuple[int, str], ...]

    @property
    def num_bytes(self) -> int:
        """The bytes of all slots."""
        return self.count * sum(numel * ITEMSIZE[dtype] for numel, dtype in self.buffers)


class BufferTable:
    """The slots of the engine for weights, codes and gradients.

    Args:
        layout: the parts of the model that have slots.
        options: the settings that determine their sizes.

    Attributes:
        accumulates: gradients are summed in float32 in the accumulator, then rounded into a slot. A store with float32
            gradients needs no accumulator: they are summed in the slot.
        slots: slots by kind. Those of blocks fit the largest block.
        block_weights: the slot of each block if it is resident, and so alone in its slot.
    """

    def __init__(self, layout: TiledLayout[Any], options: BufferOptions) -> None:
        model = layout.model
        shard = next(iter(model.units.values())).shard
        self.accumulates, grad_bytes = shard.grad_slots(options.in_micro_batches, ITEMSIZE[options.grad_dtype])
        grad_dtype = "float32" if grad_bytes == ITEMSIZE["float32"] else options.grad_dtype
        # The gradients of a head are summed over chunks in its slot, and rounded as they land; those of a tile over micro-batches, and
        # rounded in place when they are complete (`GradSlot.round_to`).
        head_dtype = "float32" if options.chunked_head else options.compute_dtype
        tile_dtype = "float32" if self.accumulates else grad_dtype
        blocks, tiles = ([layout.part(unit) for unit in units] for units in (model.blocks, layout.tiles))
        head, outer, dtype = [layout.part(HEAD)], [layout.part(OUTER)], options.compute_dtype
        self.slots: Mapping[str, SlotSizes] = {
            # Two slots, which blocks use alternately.
            "weight_slots": _weight_slots(2, blocks, dtype),
            # With an accumulator one slot suffices: sums go on there while the block before is copied from the slot.
            "grad_slots": _grad_slots(1 if self.accumulates else 2, blocks, grad_dtype),
            "grad_accumulator": _grad_slots(1 if self.accumulates else 0, blocks, "float32"),
            "head_weights": _weight_slots(1, head, dtype),
            "head_grads": _grad_slots(1, head, head_dtype),
            "outer_weights": _weight_slots(1, outer, dtype),
            "outer_grads": _grad_slots(1, outer, grad_dtype),
            "packed_slots": _packed_slots(blocks),
            "tile_packed_slots": _packed_slots(tiles),
            "tile_slots": _weight_slots(2, tiles, dtype),
            "tile_grad_slots": _grad_slots(2, tiles, tile_dtype),
        }
        self.block_weights = [_weight_slots(1, [part], dtype) for part in blocks]

    def streamed_weights(self, resident: Collection[int]) -> SlotSizes:
        """Return the slots shared by all streamed blocks. A buffer is empty if no streamed block has tensors of that dtype."""
        streamed = [sizes for index, sizes in enumerate(self.block_weights) if index not in resident]
        is_needed = [any(sizes.buffers[number][0] for sizes in streamed) for number in range(2)]  # by buffer of a slot
        slots = self.slots["weight_slots"]
        pairs = zip(slots.buffers, is_needed, strict=True)
        return SlotSizes(slots.count, tuple((numel if needed else 0, dtype) for (numel, dtype), needed in pairs))

    @property
    def gathers_packed(self) -> bool:
        """True if there are several ranks and quantized weights, so that ranks gather codes and scales in buffers of their own."""
        return self.slots["packed_slots"].num_bytes + self.slots["tile_packed_slots"].num_bytes > 0


Parts = Sequence[PartLayout[Any]]


def _weight_slots(count: int, parts: Parts, dtype: str) -> SlotSizes:
    """Return slots for the weights of any of these parts."""
    return SlotSizes(count, _with_dtypes(_largest(part.slot_numels for part in parts), dtype))


def _grad_slots(count: int, parts: Parts, dtype: str) -> SlotSizes:
    """Return slots for the gradients of any of these parts. A buffer is as large as the one of the weights, or empty if none of its
    tensors is trained.
    """
    sizes, trained = _largest(part.slot_numels for part in parts), _largest(part.grad_numels for part in parts)
    numels = [numel if trained_numel else 0 for numel, trained_numel in zip(sizes, trained, strict=True)]
    return SlotSizes(count, _with_dtypes(numels, dtype))


def _packed_slots(parts: Parts) -> SlotSizes:
    """Return slots in which several ranks gather the codes and scales of any of these parts."""
    return SlotSizes(2, ((max((part.packed_cuts[-1] for part in parts), default=0), "uint8"),))


def _largest(sizes: Iterable[list[int]]) -> list[int]:
    """Return the sizes of the two buffers of a slot, given the pairs of sizes that must fit into it; zeros without pairs."""
    found = [0, 0]
    for each in sizes:
        found = [max(pair) for pair in zip(found, each, strict=True)]
    return found


def _with_dtypes(numels: list[int], dtype: str) -> tuple[tuple[int, str], ...]:
    """Return the buffers of a slot: the first has this dtype, the other float32."""
    return tuple(zip(numels, (dtype, "float32"), strict=True))


def buffer_bytes(layout: TiledLayout[Any], table: BufferTable, settings: BufferSettings) -> Mapping[str, int]:
    """Return the bytes of each kind of device buffer in a training step, for a batch whose tokens are as different as they can be.

    Args:
        layout: the parts of the model that have slots.
        table: their slots.
        settings: settings of the step.
    """
    resident = range(layout.model.num_blocks - settings.resident, layout.model.num_blocks)
    buffers = {
        "weight_slots": table.streamed_weights(resident).num_bytes,
        "resident_weights": sum(table.block_weights[index].num_bytes for index in resident),
    }
    buffers |= {kind: slots.num_bytes for kind, slots in table.slots.items() if kind not in buffers}
    buffers |= _activation_buffers(layout, settings)
    return {kind: num_bytes for kind, num_bytes in buffers.items() if num_bytes}


def _activation_buffers(layout: TiledLayout[Any], settings: BufferSettings) -> dict[str, int]:
    """Return the bytes of the buffers that grow with the batch: rows of the embedding, their gradients, and the ring of boundaries."""
    model, compute_bytes = layout.model, ITEMSIZE[settings.options.compute_dtype]
    num_rows = min(settings.tokens, model.vocabulary) if settings.table_rows is None else settings.table_rows
    of_decoder = layout.kept_each * settings.tokens * model.hidden * compute_bytes
    boundary = max(of_decoder, settings.largest_boundary or 0)
    grad_bytes = ITEMSIZE[settings.options.grad_dtype] if model.trained_numel(EMBED) else 0
    return {
        "table_rows": max(num_rows, settings.forward_table_rows) * model.hidden * compute_bytes,
        "table_row_grads": num_rows * model.hidden * grad_bytes,
        "boundary_ring": 2 * boundary if settings.offloaded else 0,
    }


def landing_numels(units: Iterable[UnitLayout[Any]]) -> list[int]:
    """Return the elements of each buffer of a landing slot in host memory, in which the gradients of any of these units land."""
    return _largest([length(slab.own_grads) for slab in slabs.of_weights] for slabs in units)


def sum_buffers(size: int, of_machine: int, at_once: int = COLLECTIVE_BYTES) -> Mapping[str, int]:
    """Return the bytes in which a rank sums gradients on its device, by their use.

    Args:
        size: number of ranks.
        of_machine: number of ranks of each machine.
        at_once: bytes of the gradients that it receives at once.
    """
    if size == 1:
        return {}
    # What is received are equal shares of all ranks of the machine. Their total has the elements of one share, in float32: twice the bytes
    # of a share in bfloat16, and more than enough for a share in float32.
    return {"received": at_once, "total": 2 * at_once // of_machine}
