"""The engine's buffers on the device: slots of fixed size, and buffers that grow with the batch.

Two slots of the largest block are enough for a model of any depth: while a block computes in one, the next block's weights
are copied into the other (double buffering).
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from horizon_lm.device.base import Device
from horizon_lm.engine.passes.expert_tiles import ExpertTiles, largest
from horizon_lm.model.parts import ModelParts
from horizon_lm.planning.outline import Linear
from horizon_lm.planning.residency import Residency
from horizon_lm.store.store import Store
from horizon_lm.store.unit_slabs import Slot
from horizon_lm.streaming_options import StreamingOptions, chosen
from horizon_lm.units import EMBED, HEAD, OUTER, Unit, block

Sizes = Sequence[tuple[int, torch.dtype]]


class Slots:
    """A few equal slots, allocated together on first use. Each has a buffer for each dtype that it has elements of.

    Args:
        device: the device.
        kind: the name by which the memory is counted.
        count: number of slots.
        sizes: function that returns the number of elements and the dtype of each buffer of a slot.
    """

    def __init__(self, device: Device, kind: str, count: int, sizes: Callable[[], Sizes]) -> None:
        self._device, self._kind, self._count, self._sizes = device, kind, count, sizes
        self._slots: list[Slot] = []

    def __getitem__(self, index: int) -> Slot:
        """Return the buffers of a slot. The first use allocates all slots."""
        if not self._slots:
            self._slots = [[self._allocate(*size) for size in self._sizes()] for _ in range(self._count)]
        return self._slots[index]

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new buffer."""
        if numel == 0:
            return torch.empty(0, dtype=dtype, device=self._device.torch_device)
        return self._device.allocate(numel, dtype, self._kind)

    def release(self) -> None:
        """Free the slots; the next use allocates them again."""
        for buffer in (buffer for slot in self._slots for buffer in slot if buffer.numel()):
            self._device.free(buffer, self._kind)
        self._slots = []


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
            self._slots = Slots(self._device, self._kind, self._count, partial(list, [(self._numel, dtype)]))
        return self._slots[index][0][:numel]

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


class DeviceBuffers:
    """All buffers of the engine on the device.

    Attributes:
        gathers_packed: there are several ranks and quantized weights, so that ranks gather codes and scales in buffers of their own.
        accumulates: gradients are summed in float32 in the accumulator, then rounded into a slot. A store with float32
            gradients needs no accumulator: they are summed in the slot.
        resident_weights: one slot for each resident block.
        table_rows, table_row_grads: rows of the embedding (R, H) for the tokens of a batch, and their gradients.
        ring: two buffers that boundaries pass through on their way to host memory and back.
    """

    def __init__(
        self, parts: ModelParts, store: Store, device: Device, options: EngineOptions, tiles: ExpertTiles
    ) -> None:
        self._device, self._tiles = device, tiles
        grad_dtype = store.precision.grad_dtype
        self.accumulates, grad_bytes = store.shard.grad_slots(options.in_micro_batches, grad_dtype.itemsize)
        grad_dtype = torch.float32 if grad_bytes == torch.float32.itemsize else grad_dtype
        blocks, tied_head = [block(u) for u in range(parts.num_blocks)], EMBED if parts.tied else HEAD
        dtype = options.compute_dtype
        grads, self._sizes = partial(_sizes_of_grads, tiles), partial(_sizes_of_weights, tiles, dtype=dtype)

        # Two slots of the size of the largest block, which blocks use alternately.
        self._num_blocks = parts.num_blocks
        self._weights = self._streamed_weights(())
        self.resident_weights: dict[int, Slots] = {}
        # Slots from which the gradients of blocks are landed. Summing in the accumulator overlaps with copying the last block's
        # gradients from the only slot.
        self._grads = Slots(device, "grad_slots", 1 if self.accumulates else 2, partial(grads, blocks, grad_dtype))
        self._accumulator = Slots(device, "grad_accumulator", 1, partial(grads, blocks, torch.float32))
        self._weights_of_unit = {
            HEAD: Slots(device, "head_weights", 1, partial(self._sizes, [tied_head])),
            OUTER: Slots(device, "outer_weights", 1, partial(self._sizes, [OUTER])),
        }
        self._grads_of_unit = {
            # They are summed over chunks.
            HEAD: Slots(
                device, "head_grads", 1, partial(grads, [tied_head], torch.float32 if options.chunked_head else dtype)
            ),
            OUTER: Slots(device, "outer_grads", 1, partial(grads, [OUTER], grad_dtype)),
        }
        # Gradients of a tile are summed over micro-batches in its slot, and rounded there.
        tile_dtype = torch.float32 if self.accumulates else grad_dtype
        self._tile_weights = Slots(device, "tile_slots", 2, partial(self._sizes, tiles.units))
        self._tile_grads = Slots(device, "tile_grad_slots", 2, partial(grads, tiles.units, tile_dtype))
        packed, tile_packed = tiles.packed_bytes(blocks), tiles.packed_bytes(tiles.units)
        self.gathers_packed = packed + tile_packed > 0
        self._packed = Slots(device, "packed_slots", 2, partial(list, [(packed, torch.uint8)]))
        self._tile_packed = Slots(device, "tile_packed_slots", 2, partial(list, [(tile_packed, torch.uint8)]))
        self.table_rows = GrowingBuffers(device, "table_rows")
        self.table_row_grads = GrowingBuffers(device, "table_row_grads")
        self.ring = GrowingBuffers(device, "boundary_ring", count=2)

    def release(self) -> None:
        """Free all buffers. Nothing may be using them."""
        slots: list[Slots | GrowingBuffers] = [
            self._weights, *self.resident_weights.values(), self._grads, self._accumulator,
            *self._weights_of_unit.values(), *self._grads_of_unit.values(), self._tile_weights, self._tile_grads,
            self._packed, self._tile_packed, self.table_rows, self.table_row_grads, self.ring,
        ]  # fmt: skip
        for each in slots:
            each.release()

    def set_resident(self, blocks: Iterable[int]) -> None:
        """Keep these blocks' weights, and no others, on the device from now on. No copy may be running."""
        for slots in (*self.resident_weights.values(), self._weights):
            slots.release()
        resident = [block(index) for index in blocks]
        self._weights = self._streamed_weights(resident)
        self.resident_weights = {
            unit.block_index: Slots(self._device, "resident_weights", 1, partial(self._sizes, [unit]))
            for unit in resident
        }
        # A later pass allocates it again, unless all boundaries stay on the device now.
        self.ring.release()

    def _streamed_weights(self, resident: Collection[Unit]) -> Slots:
        """Return the two slots that all blocks but the resident ones take turns in."""
        blocks = [block(u) for u in range(self._num_blocks)]
        sizes = partial(_sizes_of_streamed, self._sizes, blocks, [unit for unit in blocks if unit not in resident])
        return Slots(self._device, "weight_slots", 2, sizes)

    def weights_of(self, unit: Unit) -> Slot:
        """Return the slot that the weights of a unit, or of a tile, are streamed into."""
        # The buffers that the schedule names (`build.Layout.weights`), whose waits protect them.
        if unit.is_tile:
            return self._tile_weights[self._tiles.slots.slot(unit)]
        if unit in self._weights_of_unit:
            return self._weights_of_unit[unit][0]
        index = unit.block_index
        return self.resident_weights[index][0] if index in self.resident_weights else self._weights[index % 2]

    def packed_of(self, unit: Unit) -> torch.Tensor:
        """Return the buffer in which the codes and scales of a block or tile are gathered."""
        if unit.is_tile:
            return self._tile_packed[self._tiles.slots.slot(unit)][0]
        return self._packed[unit.block_index % 2][0]

    def grads_of(self, unit: Unit) -> Slot:
        """Return the slot from which the gradients of a unit, or of a tile, are landed, after those of several ranks are summed in it."""
        if unit.is_tile:
            return self._tile_grads[self._tiles.slots.slot(unit)]
        if unit in self._grads_of_unit:
            return self._grads_of_unit[unit][0]
        return self._grads[0 if self.accumulates else unit.block_index % 2]

    def sums_of(self, unit: Unit) -> Slot:
        """Return the slot in which a block's gradients are summed over micro-batches: the accumulator, or that of `grads_of`."""
        return self._accumulator[0] if self.accumulates else self.grads_of(unit)


# Functions, not methods: slots that refer to the object that has them keep it until the garbage collector runs.


def _sizes_of_weights(tiles: ExpertTiles, units: Iterable[Unit], dtype: torch.dtype) -> Sizes:
    """Return the sizes of the buffers of a slot for the weights of any of these units. The first has this dtype, the other float32."""
    return list(zip(largest(map(tiles.slot_numels, units)), (dtype, torch.float32), strict=True))


def _sizes_of_grads(tiles: ExpertTiles, units: Collection[Unit], dtype: torch.dtype) -> Sizes:
    """Return the sizes of the buffers of a slot for the gradients of any of these units: as of their weights, but none for a storage
    without trained tensors.
    """
    trained = largest(map(tiles.grad_numels, units))
    sizes = _sizes_of_weights(tiles, units, dtype)
    return [(numel if of_grads else 0, dtype) for (numel, dtype), of_grads in zip(sizes, trained, strict=True)]


def _sizes_of_streamed(weights: Callable[[list[Unit]], Sizes], blocks: list[Unit], streamed: list[Unit]) -> Sizes:
    """Return the sizes of the buffers of a slot that fits any block, but none of a storage that no streamed block has."""
    pairs = zip(weights(blocks), weights(streamed), strict=True)
    return [(numel if of_streamed else 0, dtype) for (numel, dtype), (of_streamed, _) in pairs]
