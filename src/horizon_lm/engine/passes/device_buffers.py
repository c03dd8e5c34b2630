"""The engine's buffers on the device: slots of fixed size, and buffers that grow with the batch.

Two slots of the largest block are enough for a model of any depth: while a block computes in one, the next block's weights
are copied into the other (double buffering).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from horizon_lm.device.base import Device
from horizon_lm.engine.passes.expert_tiles import ExpertTiles
from horizon_lm.model.parts import ModelParts
from horizon_lm.planning.outline import Linear
from horizon_lm.planning.residency import Residency
from horizon_lm.store.store import Store
from horizon_lm.streaming_options import StreamingOptions, chosen
from horizon_lm.units import EMBED, HEAD, OUTER, Unit, block


class Slots:
    """A few equal buffers, allocated together on first use."""

    def __init__(self, device: Device, kind: str, count: int, numel: int, dtype: torch.dtype) -> None:
        self._device, self._kind, self._count, self._numel, self._dtype = device, kind, count, numel, dtype
        self._buffers: list[torch.Tensor] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        """Return a buffer. The first use allocates all of them."""
        if not self._buffers:
            self._buffers = [
                self._device.allocate(self._numel, self._dtype, self._kind) for _ in range(self._count)
            ]  # fmt: skip
        return self._buffers[index]

    def release(self) -> None:
        """Free the buffers; the next use allocates them again."""
        for buffer in self._buffers:
            self._device.free(buffer, self._kind)
        self._buffers = []


class GrowingBuffers:
    """Equal buffers that are replaced by larger ones when a batch needs more memory.

    To replace them, the host waits until the device is idle, including running updates. Callers therefore also pass the
    size that the largest batch can need. All of them are replaced at once, and what they held is lost. After a release, buffers
    are allocated with their previous size.
    """

    def __init__(self, device: Device, kind: str, count: int = 1) -> None:
        self._device, self._kind, self._count = device, kind, count
        self._slots: Slots | None = None
        # Of each buffer; kept after a release.
        self._numel, self._dtype = 0, torch.float32

    def get(self, numel: int, dtype: torch.dtype, index: int = 0, room: int = 0) -> torch.Tensor:
        """Return the first ``numel`` elements of a buffer.

        Args:
            numel: number of elements needed now.
            dtype: their dtype.
            index: the buffer.
            room: minimum number of elements if a buffer must be allocated.
        """
        if self._slots is None or numel > self._numel or dtype != self._dtype:
            if self._slots is not None:
                self._device.synchronize()
                self.release()
            previous = self._numel if dtype == self._dtype else 0
            self._numel, self._dtype = max(numel, room, previous), dtype
            self._slots = Slots(self._device, self._kind, self._count, self._numel, dtype)
        return self._slots[index][:numel]

    def release(self) -> None:
        """Free the buffers."""
        if self._slots is not None:
            self._slots.release()
            self._slots = None


@dataclass(frozen=True, kw_only=True)
class EngineOptions(StreamingOptions):
    """The options of a streamed model, of which those that are left open are chosen. Except for the dtype, none of them
    changes a result beyond the order of summation.

    Attributes:
        head_chunk_tokens: tokens per chunk of logits with ``head="chunked"``.
        expert_tile: number of experts in a tile; None for whole blocks.
        compile: compile blocks, once per block structure, and the loss of a chunk of logits.
        compute_dtype: dtype of weights on the device and of hidden states.
        head_peak: peak bytes of norm, head and loss, as a function of tokens; None if memory is not planned.
        check_recompute: compare every recomputed output with that of the forward pass; slow, for tests.
    """

    head_chunk_tokens: int = 64
    expert_tile: int | None = chosen(None)
    compile: bool = False
    compute_dtype: torch.dtype
    head_peak: Linear[int] | None = None
    check_recompute: bool = False

    @property
    def residency(self) -> Residency | None:
        """The weights and graphs that stay on the device between passes; None to plan them for the first batch."""
        return None if self.activation_checkpoints == "auto" else Residency.of(self)


CHANGEABLE = (
    "device_micro_batch_size", "head_chunk_tokens", "activation_checkpoints", "resident_blocks", "resident_graphs",
)  # fmt: skip
"""The options that a streamed model may be given anew. Host memory, blocks, their tiles and the head are opened with the others."""


class UnitBuffers:
    """The buffers for the weights and gradients of blocks, head and outer parameters, all of one storage mode.

    Args:
        device: the device.
        blocks, head, outer: elements of the slots of each block, of the head and of the outer parameters.
        dtype: dtype of the weights.
        grad_dtype, head_grad_dtype: dtypes of the gradients of blocks and outer parameters, and of the head.
        accumulates: as in `DeviceBuffers`.

    Attributes:
        weight_slots: two slots of the size of the largest block, which blocks use alternately.
        resident_weights: one buffer for each resident block.
        grad_slots: slots from which the gradients of blocks are landed; two, or one with an accumulator.
        accumulator: the sum of a block's gradients over micro-batches.
    """

    def __init__(
        self, device: Device, blocks: Sequence[int], head: int, outer: int, dtype: torch.dtype, grad_dtype: torch.dtype,
        head_grad_dtype: torch.dtype, accumulates: bool,
    ) -> None:  # fmt: skip
        largest, self._accumulates = max(blocks), accumulates
        self._device, self._blocks, self._dtype = device, blocks, dtype
        self.weight_slots = Slots(device, "weight_slots", 2, largest, dtype)
        self.resident_weights: dict[int, Slots] = {}
        # Summing in the accumulator overlaps with copying the last block's gradients from the only slot.
        self.grad_slots = Slots(device, "grad_slots", 1 if accumulates else 2, largest, grad_dtype)
        self.accumulator = Slots(device, "grad_accumulator", 1, largest, torch.float32)
        self._head_weights = Slots(device, "head_weights", 1, head, dtype)
        self._head_grads = Slots(device, "head_grads", 1, head, head_grad_dtype)
        self._outer_weights = Slots(device, "outer_weights", 1, outer, dtype)
        self._outer_grads = Slots(device, "outer_grads", 1, outer, grad_dtype)

    def release(self) -> None:
        """Free all buffers. Nothing may be using them."""
        for each in (
            self.weight_slots, *self.resident_weights.values(), self.grad_slots, self.accumulator, self._head_weights,
            self._head_grads, self._outer_weights, self._outer_grads,
        ):  # fmt: skip
            each.release()

    def set_resident(self, blocks: Iterable[int]) -> None:
        """Keep these blocks' weights, and no others, on the device from now on. No copy may be running."""
        for slots in (*self.resident_weights.values(), self.weight_slots):
            slots.release()
        self.resident_weights = {
            index: Slots(self._device, "resident_weights", 1, self._blocks[index], self._dtype) for index in blocks
        }

    def weights_of(self, unit: Unit) -> torch.Tensor:
        """Return the buffer that a unit's weights are streamed into."""
        if unit == HEAD:
            return self._head_weights[0]
        if unit == OUTER:
            return self._outer_weights[0]
        # The buffers that the schedule names (`build.Layout.weights`), whose waits protect them.
        index = unit.block_index
        return self.resident_weights[index][0] if index in self.resident_weights else self.weight_slots[index % 2]

    def grads_of(self, unit: Unit) -> torch.Tensor:
        """Return the buffer from which a unit's gradients are landed, after those of several ranks are summed in it."""
        if unit == HEAD:
            return self._head_grads[0]
        if unit == OUTER:
            return self._outer_grads[0]
        return self.grad_slots[0 if self._accumulates else unit.block_index % 2]


class DeviceBuffers:
    """All buffers of the engine on the device.

    Attributes:
        packed_slots: two slots in which several ranks gather the codes and scales of a quantized block.
        tile_packed_slots: two slots in which they gather those of a tile.
        gathers_packed: these slots are used, because there are several ranks and quantized weights.
        accumulates: gradients are summed in float32 in the accumulator, then rounded into a slot. A store with float32
            gradients needs no accumulator: they are summed in the slot. Those of weights in float32 go the same way as the
            others of their block.
        table_rows, table_row_grads: rows of the embedding (R, H) for the tokens of a batch, and their gradients.
        tile_slots, tile_grad_slots: two slots for tiles of experts, and for their gradients.
        ring: two buffers that boundaries pass through on their way to host memory and back.
    """

    def __init__(
        self, parts: ModelParts, store: Store, device: Device, options: EngineOptions, tiles: ExpertTiles
    ) -> None:
        dtype, grad_dtype = options.compute_dtype, store.precision.grad_dtype
        self.accumulates, grad_bytes = store.shard.grad_slots(options.in_micro_batches, grad_dtype.itemsize)
        grad_dtype = torch.float32 if grad_bytes == torch.float32.itemsize else grad_dtype
        # The head's gradients are float32 if they are summed over chunks.
        head_grad_dtype = torch.float32 if options.chunked_head else dtype
        blocks = [block(u) for u in range(parts.num_blocks)]
        head = EMBED if parts.tied else HEAD

        slot = tiles.slot_numel
        self._units = UnitBuffers(
            device, [slot(unit) for unit in blocks], slot(head), slot(OUTER),
            dtype=dtype, grad_dtype=grad_dtype, head_grad_dtype=head_grad_dtype, accumulates=self.accumulates,
        )  # fmt: skip
        self._in_float32 = UnitBuffers(
            device, [slot(unit.float32) for unit in blocks], slot(head.float32), slot(OUTER.float32),
            dtype=torch.float32, grad_dtype=torch.float32, head_grad_dtype=torch.float32, accumulates=self.accumulates,
        )  # fmt: skip
        # Gradients of a tile are summed over micro-batches in its slot, and rounded there.
        tile_dtype = torch.float32 if self.accumulates else grad_dtype
        self._tiles = tiles
        self.tile_slots = Slots(device, "tile_slots", 2, tiles.largest, dtype)
        self.tile_grad_slots = Slots(device, "tile_grad_slots", 2, tiles.largest, tile_dtype)
        packed, tile_packed = tiles.packed_bytes(blocks), tiles.packed_bytes(tiles.units)
        self.gathers_packed = packed + tile_packed > 0
        self.packed_slots = Slots(device, "packed_slots", 2, packed, torch.uint8)
        self.tile_packed_slots = Slots(device, "tile_packed_slots", 2, tile_packed, torch.uint8)
        self.table_rows = GrowingBuffers(device, "table_rows")
        self.table_row_grads = GrowingBuffers(device, "table_row_grads")
        self.ring = GrowingBuffers(device, "boundary_ring", count=2)

    def _of(self, unit: Unit) -> UnitBuffers:
        return self._in_float32 if unit.is_float32 else self._units

    def release(self) -> None:
        """Free all buffers. Nothing may be using them."""
        for each in (
            self._units, self._in_float32, self.tile_slots, self.tile_grad_slots, self.packed_slots,
            self.tile_packed_slots, self.table_rows, self.table_row_grads, self.ring,
        ):  # fmt: skip
            each.release()

    def weights_of(self, unit: Unit) -> torch.Tensor:
        """Return the buffer that the weights of these slabs, or of a tile, are streamed into."""
        if unit.is_tile:
            return self.tile_slots[self._tiles.slots.slot(unit)]
        return self._of(unit).weights_of(unit.home)

    def packed_of(self, unit: Unit) -> torch.Tensor:
        """Return the slot in which the codes and scales of a block or tile are gathered."""
        if unit.is_tile:
            return self.tile_packed_slots[self._tiles.slots.slot(unit)]
        return self.packed_slots[unit.block_index % 2]

    def set_resident(self, blocks: Iterable[int]) -> None:
        """Keep these blocks' weights, and no others, on the device from now on. No copy may be running."""
        resident = list(blocks)
        self._units.set_resident(resident)
        self._in_float32.set_resident(resident)
        # A later pass allocates it again, unless all boundaries stay on the device now.
        self.ring.release()

    def grads_of(self, unit: Unit) -> torch.Tensor:
        """Return the buffer from which the gradients of these slabs, or of a tile, are landed (`UnitBuffers.grads_of`)."""
        if unit.is_tile:
            return self.tile_grad_slots[self._tiles.slots.slot(unit)]
        return self._of(unit).grads_of(unit.home)

    def sums_of(self, unit: Unit) -> torch.Tensor:
        """Return the buffer in which a block's gradients are summed over micro-batches: the accumulator, or that of `grads_of`."""
        return self._of(unit).accumulator[0] if self.accumulates else self.grads_of(unit)
