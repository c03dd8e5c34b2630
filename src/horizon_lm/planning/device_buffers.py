"""Sizes of the engine's buffers on the device, computed from the sizes of a model's units."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from horizon_lm.constants import COLLECTIVE_BYTES
from horizon_lm.planning.model_sizes import ModelSizes
from horizon_lm.slabs import WHOLE, Shard, slab_elements
from horizon_lm.units import EMBED, HEAD, OUTER, block


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
    slots = [numel * settings.compute_bytes for numel in _block_slots(sizes, settings)]
    if (in_float32 := sizes.in_float32()) is None:
        return slots
    beside = block_bytes(in_float32, replace(settings, compute_bytes=4, expert_tile=None))
    return [sum(both) for both in zip(slots, beside, strict=True)]


def _block_slots(sizes: ModelSizes, settings: BufferSettings) -> list[int]:
    """Return the number of elements of the slot of each block, or of what is left of it beside its tiles."""
    cuts = sizes.cuts(settings.shard)
    blocks = [cuts[block(index)].slot_numel for index in range(sizes.num_blocks)]
    if settings.expert_tile is None:
        return blocks
    # The slot of a whole block has an equal part for each rank, so it may be larger than the slab; that of a core has ranges of any size.
    return [
        whole if experts is None else slab_elements(core)
        for whole, core, experts in zip(blocks, sizes.cores(), sizes.experts, strict=True)
    ]


def _packed_slots(sizes: ModelSizes, settings: BufferSettings) -> list[int]:
    """Return the bytes of the slot in which ranks gather codes and scales of each block, or of what is left of it beside its
    tiles. A single rank gathers none.
    """
    # `Shard.packed_slot` returns the places in a slot, of which the last one is its end.
    blocks = [settings.shard.packed_slot(packed.slab_bytes)[-1] for packed in sizes.packed]
    if settings.expert_tile is None or settings.shard.is_whole:
        return blocks
    experts_of = map(sizes.experts_of, range(len(blocks)))
    return [
        whole if experts is None else packed.slab_bytes - experts.packed_slot(experts.count)
        for whole, packed, experts in zip(blocks, sizes.packed, experts_of, strict=True)
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
    buffers = {
        **_unit_buffers(sizes, trained, settings, slot_grad, accumulates),
        "packed_slots": 2 * max(_packed_slots(sizes, settings), default=0),
        **_activation_buffers(sizes, trained, settings),
        # The slots of a tile are its accumulator.
        **_tile_buffers(sizes, trained, settings, tile_grad=4 if accumulates else slot_grad),
    }
    if (in_float32 := sizes.in_float32()) is not None:
        trained_in_float32 = trained.in_float32()
        assert trained_in_float32 is not None
        # Weights in float32 have buffers of their own, of the same kinds.
        own = replace(settings, compute_bytes=4, expert_tile=None)
        beside = _unit_buffers(in_float32, trained_in_float32, own, slot_grad=4, accumulates=accumulates)
        buffers |= {kind: buffers[kind] + num_bytes for kind, num_bytes in beside.items()}
    return {kind: num_bytes for kind, num_bytes in buffers.items() if num_bytes}


def _activation_buffers(sizes: ModelSizes, trained: ModelSizes, settings: BufferSettings) -> dict[str, int]:
    """Return the bytes of the rows of the embedding, and of the ring of offloaded boundaries."""
    num_rows = min(settings.tokens, sizes.vocabulary) if settings.table_rows is None else settings.table_rows
    boundary = settings.kept_each * settings.tokens * sizes.hidden * settings.compute_bytes
    return {
        "table_rows": max(num_rows, settings.forward_table_rows) * sizes.hidden * settings.compute_bytes,
        "table_row_grads": num_rows * sizes.hidden * settings.grad_bytes if trained.units[EMBED] else 0,
        "boundary_ring": 2 * boundary if settings.offloaded else 0,
    }


def _tile_buffers(sizes: ModelSizes, trained: ModelSizes, settings: BufferSettings, tile_grad: int) -> dict[str, int]:
    """Return the bytes of the slots of tiles.

    Args:
        sizes, trained, settings: as in `device_buffers`.
        tile_grad: bytes per element of a gradient in its slot, where it is summed over micro-batches.
    """
    if settings.expert_tile is None:
        return {}
    slot = sizes.tile_numel(settings.expert_tile)
    is_trained = trained.tile_numel(settings.expert_tile) > 0
    packed = max((each.packed_slot(settings.expert_tile) for each in sizes.experts if each), default=0)
    return {
        "tile_packed_slots": 0 if settings.shard.is_whole else 2 * packed,
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
    compute, cuts, slots = settings.compute_bytes, sizes.cuts(settings.shard), _block_slots(sizes, settings)
    holder = EMBED if sizes.tied else HEAD
    head, outer = cuts[holder].slot_numel, cuts[OUTER].slot_numel
    trained_blocks = trained.blocks if settings.expert_tile is None else trained.cores()
    grad_slot = max(slots) if any(map(sum, trained_blocks)) else 0
    first_resident = sizes.num_blocks - settings.resident
    return {
        # None if all blocks are resident.
        "weight_slots": 2 * max(slots) * compute if any(slots[:first_resident]) else 0,
        "resident_weights": sum(slots[first_resident:]) * compute,
        "grad_slots": (1 if accumulates else 2) * grad_slot * slot_grad,
        "grad_accumulator": grad_slot * 4 if accumulates else 0,
        "head_weights": head * compute,
        "head_grads": head * (4 if settings.chunked_head else compute) if trained.units[holder] else 0,
        "outer_weights": outer * compute,
        "outer_grads": outer * slot_grad if trained.units[OUTER] else 0,
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
