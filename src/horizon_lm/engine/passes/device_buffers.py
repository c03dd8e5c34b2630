"""The engine's buffers on the device: slots of fixed size, and buffers that grow with the batch.

Two slots of the largest block are enough for a model of any depth: while a block computes in one, the next block's weights
are copied into the other (double buffering).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch

from horizon_lm.common.streaming_options import StreamingOptions, chosen
from horizon_lm.common.units import HEAD, OUTER, Unit
from horizon_lm.device.base import Device
from horizon_lm.engine.passes.expert_tiles import ExpertTiles
from horizon_lm.memory.layout.buffers import BufferOptions, BufferTable, SlotSizes
from horizon_lm.memory.store import Store
from horizon_lm.memory.unit_slabs import Slot
from horizon_lm.planning.arithmetic.outline import Linear
from horizon_lm.planning.arithmetic.residency import Residency


class Slots:
    """A few equal slots, allocated together on first use.

    Args:
        device: the device.
        kind: the name by which the memory is counted.
        sizes: function that returns their number and sizes. It is called when they are allocated, because those of gradients are
            known only then.
    """

    def __init__(self, device: Device, kind: str, sizes: Callable[[], SlotSizes]) -> None:
        self._device, self._kind, self._sizes = device, kind, sizes
        self._slots: list[Slot] = []

    def __getitem__(self, index: int) -> Slot:
        """Return the buffers of a slot. The first use allocates all slots."""
        if not self._slots:
            sizes = self._sizes()
            self._slots = [[self._allocate(*each) for each in sizes.buffers] for _ in range(sizes.count)]
        return self._slots[index]

    def _allocate(self, numel: int, dtype: str) -> torch.Tensor:
        """Return a new buffer."""
        if numel == 0:
            return torch.empty(0, dtype=getattr(torch, dtype), device=self._device.torch_device)
        return self._device.allocate(numel, getattr(torch, dtype), self._kind)

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
            sizes = SlotSizes(self._count, ((self._numel, _name_of(dtype)),))
            self._slots = Slots(self._device, self._kind, lambda: sizes)
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
        accumulates, gathers_packed: as in `BufferTable`.
        resident_weights: one slot for each resident block.
        table_rows, table_row_grads: rows of the embedding (R, H) for the tokens of a batch, and their gradients.
        ring: two buffers that boundaries pass through on their way to host memory and back.
    """

    def __init__(self, store: Store, device: Device, options: EngineOptions, tiles: ExpertTiles) -> None:
        # Functions of the layout, not methods of this object: it owns the slots, and slots that referred back to it would keep it
        # until the garbage collector runs.
        self._table = table = partial(BufferTable, tiles, buffer_options(options, store))
        self._device, self._tiles = device, tiles
        sizes_now = table()
        self.accumulates, self.gathers_packed = sizes_now.accumulates, sizes_now.gathers_packed
        self._slots = {kind: Slots(device, kind, partial(_sizes_of, table, kind)) for kind in sizes_now.slots}
        self.resident_weights: dict[int, Slots] = {}
        self.table_rows = GrowingBuffers(device, "table_rows")
        self.table_row_grads = GrowingBuffers(device, "table_row_grads")
        self.ring = GrowingBuffers(device, "boundary_ring", count=2)

    def release(self) -> None:
        """Free all buffers. Nothing may be using them."""
        for slots in (*self._slots.values(), *self.resident_weights.values()):
            slots.release()
        for growing in (self.table_rows, self.table_row_grads, self.ring):
            growing.release()

    def set_resident(self, blocks: Iterable[int]) -> None:
        """Keep these blocks' weights, and no others, on the device from now on. No copy may be running."""
        for slots in (*self.resident_weights.values(), self._slots["weight_slots"]):
            slots.release()
        blocks, table = list(blocks), self._table()
        streamed = partial(table.streamed_weights, blocks)
        self._slots["weight_slots"] = Slots(self._device, "weight_slots", streamed)
        self.resident_weights = {
            index: Slots(self._device, "resident_weights", partial(table.block_weights.__getitem__, index))
            for index in blocks
        }
        # A later pass allocates it again, unless all boundaries stay on the device now.
        self.ring.release()

    def weights_of(self, unit: Unit) -> Slot:
        """Return the slot that the weights of a unit, or of a tile, are streamed into."""
        # The buffers that the schedule names (`build.Layout.weights`), whose waits protect them.
        if unit.is_tile and self._tiles.is_cut(unit.block_index):
            return self._slots["tile_slots"][self._tiles.slots.slot(unit)]
        if unit in (HEAD, OUTER):
            return self._slots[f"{unit}_weights"][0]
        index = unit.block_index
        return (
            self.resident_weights[index][0]
            if index in self.resident_weights
            else self._slots["weight_slots"][index % 2]
        )

    def packed_of(self, unit: Unit) -> torch.Tensor:
        """Return the buffer in which the codes and scales of a block or tile are gathered."""
        if unit.is_tile:
            return self._slots["tile_packed_slots"][self._tiles.slots.slot(unit)][0]
        return self._slots["packed_slots"][unit.block_index % 2][0]

    def grads_of(self, unit: Unit) -> Slot:
        """Return the slot from which the gradients of a unit, or of a tile, are landed, after those of several ranks are summed in it."""
        if unit.is_tile:
            return self._slots["tile_grad_slots"][self._tiles.slots.slot(unit)]
        if unit in (HEAD, OUTER):
            return self._slots[f"{unit}_grads"][0]
        return self._slots["grad_slots"][0 if self.accumulates else unit.block_index % 2]

    def sums_of(self, unit: Unit) -> Slot:
        """Return the slot in which a block's gradients are summed over micro-batches: the accumulator, or that of `grads_of`."""
        return self._slots["grad_accumulator"][0] if self.accumulates else self.grads_of(unit)


def buffer_options(options: EngineOptions, store: Store) -> BufferOptions:
    """Return the settings that determine the sizes of the slots."""
    return BufferOptions(
        compute_dtype=_name_of(options.compute_dtype),
        grad_dtype=_name_of(store.precision.grad_dtype),
        in_micro_batches=options.in_micro_batches,
        chunked_head=options.chunked_head,
    )


def _sizes_of(table: Callable[[], BufferTable], kind: str) -> SlotSizes:
    """Return the number and sizes of the slots of a kind."""
    return table().slots[kind]


def _name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype, as in `memory.layout.buffers.ITEMSIZE`."""
    return str(dtype).removeprefix("torch.")
