"""The engine's buffers on the device: slots of fixed size, and buffers that grow with the batch.

Two slots of the largest block are enough for a model of any depth: while a block computes in one, the next block's weights
are copied into the other (double buffering).
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from horizon_lm.device.base import Device
from horizon_lm.model.parts import ModelParts
from horizon_lm.planning.outline import Linear
from horizon_lm.planning.residency import Residency
from horizon_lm.schedule.ops import Op
from horizon_lm.store.store import Store
from horizon_lm.streaming_options import StreamingOptions
from horizon_lm.units import EMBED, HEAD, OUTER, Unit, block


class Slots:
    """A few equal buffers, allocated together on first use."""

    def __init__(self, device: Device, kind: str, count: int, numel: int, dtype: torch.dtype) -> None:
        self._device, self._kind, self._count, self._numel, self._dtype = device, kind, count, numel, dtype
        self._buffers: list[torch.Tensor] = []

    def __getitem__(self, index: int) -> torch.Tensor:
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
    size that the largest batch can need. After a release, buffers are allocated with their previous size.
    """

    def __init__(self, device: Device, kind: str, count: int = 1) -> None:
        self._device, self._kind, self._count = device, kind, count
        self._slots: Slots | None = None
        self._size: tuple[int, torch.dtype] = (0, torch.float32)  # elements of each buffer, and their dtype

    def get(self, numel: int, dtype: torch.dtype, index: int = 0, room: int = 0) -> torch.Tensor:
        """Return the first ``numel`` elements of a buffer.

        Args:
            numel: number of elements needed now.
            dtype: their dtype.
            index: the buffer.
            room: minimum number of elements if a buffer must be allocated.
        """
        if self._slots is None or numel > self._size[0] or dtype != self._size[1]:
            if self._slots is not None:
                self._device.synchronize()
                self.release()
            largest = max(numel, room, self._size[0] if dtype == self._size[1] else 0)
            self._slots, self._size = Slots(self._device, self._kind, self._count, largest, dtype), (largest, dtype)
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
        compile: compile blocks, once per block structure.
        compute_dtype: dtype of weights on the device and of hidden states.
        head_peak: peak bytes of norm, head and loss, as a function of tokens; None if memory is not planned.
        check_recompute: compare every recomputed output with that of the forward pass; slow, for tests.
    """

    head_chunk_tokens: int = 64
    compile: bool = False
    compute_dtype: torch.dtype
    head_peak: Linear[int] | None = None
    check_recompute: bool = False

    @property
    def residency(self) -> Residency | None:
        """What stays on the device between passes; None to plan it for the first batch."""
        return None if self.activation_checkpoints == "auto" else Residency.of(self)


class DeviceBuffers:
    """All buffers of the engine on the device.

    Attributes:
        weight_slots: two slots of the size of the largest block, which blocks use alternately.
        resident_weights: one buffer for each resident block.
        packed_slots: two slots in which several ranks gather the codes and scales of a quantized block.
        gathers_packed: they do, because each has a part of them.
        grad_slots: slots from which the gradients of blocks are landed; two, or one with an accumulator.
        accumulator: the sum of a block's gradients over micro-batches.
        accumulates: gradients are summed in float32 in the accumulator, then rounded into a slot. A store with float32
            gradients needs no accumulator: they are summed in the slot.
        head_weights, head_grads: the head; its gradients are float32 if they are summed over chunks. Both are float32 if
            transformers keeps the head so.
        outer_weights, outer_grads: the outer parameters.
        table_rows, table_row_grads: rows of the embedding (R, H) for the tokens of a batch, and their gradients.
        ring: two buffers that boundaries pass through on their way to host memory and back.
    """

    def __init__(self, parts: ModelParts, store: Store, device: Device, options: EngineOptions) -> None:
        dtype, grad_dtype = options.compute_dtype, store.precision.grad_dtype
        largest = max(store.units[block(u)].slot_numel for u in range(parts.num_blocks))
        head = store.units[EMBED if parts.tied else HEAD].slot_numel
        outer = store.units[OUTER].slot_numel
        self.accumulates, width = store.shard.grad_slots(options.in_micro_batches, grad_dtype.itemsize)
        grad_dtype = torch.float32 if width == 4 else grad_dtype
        self.weight_slots = Slots(device, "weight_slots", 2, largest, dtype)
        packed = max(store.units[block(u)].packed.slot_numel for u in range(parts.num_blocks))
        self.gathers_packed = packed > 0
        self.packed_slots = Slots(device, "packed_slots", 2, packed, torch.uint8)
        self.resident_weights: dict[int, Slots] = {}
        self._new_resident = lambda u: Slots(device, "resident_weights", 1, store.units[block(u)].slot_numel, dtype)
        # Summing in the accumulator overlaps with copying the last block's gradients from the only slot.
        self.grad_slots = Slots(device, "grad_slots", 1 if self.accumulates else 2, largest, grad_dtype)
        self.accumulator = Slots(device, "grad_accumulator", 1, largest, torch.float32)
        head_dtype = parts.head_dtype(dtype)
        self.head_weights = Slots(device, "head_weights", 1, head, head_dtype)
        head_grad_dtype = torch.float32 if options.chunked_head else head_dtype
        self.head_grads = Slots(device, "head_grads", 1, head, head_grad_dtype)
        self.outer_weights = Slots(device, "outer_weights", 1, outer, dtype)
        self.outer_grads = Slots(device, "outer_grads", 1, outer, grad_dtype)
        self.table_rows = GrowingBuffers(device, "table_rows")
        self.table_row_grads = GrowingBuffers(device, "table_row_grads")
        self.ring = GrowingBuffers(device, "boundary_ring", count=2)

    def release(self) -> None:
        """Free all buffers. Nothing may be using them."""
        slots: list[Slots | GrowingBuffers] = [
            self.weight_slots, *self.resident_weights.values(), self.packed_slots, self.grad_slots, self.accumulator, self.head_weights,
            self.head_grads, self.outer_weights, self.outer_grads, self.table_rows, self.table_row_grads, self.ring,
        ]  # fmt: skip
        for each in slots:
            each.release()

    def weights_of(self, unit: Unit) -> torch.Tensor:
        """Return the buffer that a unit's weights are streamed into."""
        if unit == HEAD:
            return self.head_weights[0]
        if unit == OUTER:
            return self.outer_weights[0]
        # The buffers that the schedule names (`build.Layout.weights`), whose waits protect them.
        index = unit.block_index
        return self.resident_weights[index][0] if self.is_resident(index) else self.weight_slots[index % 2]

    def packed_of(self, unit: Unit) -> torch.Tensor:
        """Return the slot in which a block's codes and scales are gathered."""
        return self.packed_slots[unit.block_index % 2]

    def is_resident(self, index: int) -> bool:
        """Return whether a block's weights stay on the device."""
        return index in self.resident_weights

    def set_resident(self, blocks: Iterable[int]) -> None:
        """Keep these blocks' weights, and no others, on the device from now on. No copy may be running."""
        for slots in (*self.resident_weights.values(), self.weight_slots):
            slots.release()
        self.ring.release()  # no ring is needed if all boundaries stay on the device, and no slots if all weights do
        self.resident_weights = {index: self._new_resident(index) for index in blocks}

    def grads_of(self, op: Op) -> torch.Tensor:
        """Return the buffer from which a unit's gradients are landed, after those of several ranks are summed in it."""
        if op.unit == HEAD:
            return self.head_grads[0]
        return self.outer_grads[0] if op.unit == OUTER else self.outgoing_grads(op.unit.block_index)

    def outgoing_grads(self, index: int) -> torch.Tensor:
        """Return the slot from which a block's gradients are landed."""
        return self.grad_slots[0 if self.accumulates else index % 2]
