"""The engine's buffers on the device: slots of fixed size, and buffers that grow with the batch."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from horizon_lm.device.base import Device
from horizon_lm.model.units import ModelParts
from horizon_lm.plan.outline import Linear
from horizon_lm.plan.residency import Residency
from horizon_lm.schedule.ops import EMBED, HEAD, OUTER, Op, block, block_index
from horizon_lm.store.store import Store


class Slots:
    """A few equal buffers, allocated together on first use."""

    def __init__(self, device: Device, kind: str, count: int, numel: int, dtype: torch.dtype) -> None:
        self._device, self._kind, self._count, self._numel, self._dtype = device, kind, count, numel, dtype
        self._buffers: list[torch.Tensor] = []

    def __getitem__(self, index: int) -> torch.Tensor:
        while not self._buffers:
            self._buffers = [
                self._device.allocate(self._numel, self._dtype, self._kind) for _ in range(self._count)
            ]  # fmt: skip
        return self._buffers[index]

    def release(self) -> None:
        for buffer in self._buffers:
            self._device.free(buffer, self._kind)
        self._buffers = []


class GrowingBuffers:
    """Equal buffers that are replaced by larger ones when a batch needs more, once nothing uses them any more.

    Replacing them waits for everything that runs, the optimizer's pass included, so whoever asks says how much room a batch
    of such a shape can need. What is made anew after a release is as large as before.
    """

    def __init__(self, device: Device, kind: str, count: int = 1) -> None:
        self._device, self._kind, self._count = device, kind, count
        self._slots: Slots | None = None
        self._size: tuple[int, torch.dtype] = (0, torch.float32)

    def get(self, numel: int, dtype: torch.dtype, index: int = 0, room: int = 0) -> torch.Tensor:
        """The first ``numel`` elements of buffer ``index``, which is made for ``room`` elements at least."""
        if self._slots is None or numel > self._size[0] or dtype != self._size[1]:
            if self._slots is not None:
                self._device.synchronize()
                self.release()
            largest = max(numel, room, self._size[0] if dtype == self._size[1] else 0)
            self._slots, self._size = Slots(self._device, self._kind, self._count, largest, dtype), (largest, dtype)
        return self._slots[index][:numel]

    def release(self) -> None:
        if self._slots is not None:
            self._slots.release()
            self._slots = None


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How a model is streamed. None of these changes the result beyond the order of summation.

    Attributes:
        compute_dtype: of weights on the device and of hidden states.
        device_micro_batch_size: rows on the device at once inside a block; None for the whole batch.
        head: ``whole`` (Hugging Face's own loss over all logits) or ``chunked`` (logits never exist as a whole).
        head_chunk_tokens: tokens whose logits exist at once in mode ``chunked``.
        head_peak: bytes that norm, head and loss hold at once, by tokens, where that is planned.
        residency: what stays on the device; None to plan it when the first batch is there.
        mlp_chunk_tokens: tokens whose feed-forward activations exist at once; None for all.
        compile: compile blocks, each structure once.
        check_recompute: compare every recomputed output with the forward's (slow; for tests).
    """

    compute_dtype: torch.dtype
    residency: Residency | None
    device_micro_batch_size: int | None = None
    head: str = "chunked"
    head_chunk_tokens: int = 64
    head_peak: Linear[int] | None = None
    mlp_chunk_tokens: int | None = None
    compile: bool = False
    check_recompute: bool = False


class DeviceBuffers:
    """Slots of the largest block; buffers of the head and of the outer parameters; and what grows with the batch.

    ``accumulates``: gradients of several micro-batches are summed in fp32 and staged in the dtype of the store. A store
    in fp32 needs no accumulator: its slots are one.
    """

    def __init__(self, parts: ModelParts, store: Store, device: Device, options: EngineOptions) -> None:
        dtype, grad_dtype = options.compute_dtype, store.precision.grad_dtype
        largest = max(store.units[block(u)].layout.numel for u in range(parts.num_blocks))
        head = store.units[EMBED if parts.tied else HEAD].layout.numel
        outer = store.units[OUTER].layout.numel
        self.accumulates = options.device_micro_batch_size is not None and grad_dtype != torch.float32
        self.weight_slots = Slots(device, "weight_slots", 2, largest, dtype)
        self.held_weights: dict[int, Slots] = {}
        self._new_held = lambda u: Slots(device, "held_weights", 1, store.units[block(u)].layout.numel, dtype)
        self.grad_slots = Slots(device, "grad_slots", 1 if self.accumulates else 2, largest, grad_dtype)
        self.accumulator = Slots(device, "grad_accumulator", 1, largest, torch.float32)
        self.head_weights = Slots(device, "head_weights", 1, head, dtype)
        head_grad_dtype = torch.float32 if options.head == "chunked" else dtype  # chunks are summed
        self.head_grads = Slots(device, "head_grads", 1, head, head_grad_dtype)
        self.outer_weights = Slots(device, "outer_weights", 1, outer, dtype)
        self.outer_grads = Slots(device, "outer_grads", 1, outer, grad_dtype)
        self.table_rows = GrowingBuffers(device, "table_rows")
        self.table_row_grads = GrowingBuffers(device, "table_row_grads")
        self.ring = GrowingBuffers(device, "boundary_ring", count=2)

    def weights_of(self, unit: str) -> torch.Tensor:
        """The buffer that a unit's weights are streamed into."""
        if unit == HEAD:
            return self.head_weights[0]
        if unit == OUTER:
            return self.outer_weights[0]
        index = block_index(unit)
        return self.held_weights[index][0] if self.holds(index) else self.weight_slots[index % 2]

    def holds(self, index: int) -> bool:
        """Whether a block's weights stay on the device."""
        return index in self.held_weights

    def hold(self, blocks: Iterable[int]) -> None:
        """From now on, these blocks' weights stay on the device. Nothing may be on its way."""
        for slots in (*self.held_weights.values(), self.weight_slots):
            slots.release()
        self.ring.release()  # as the slots, it may not be needed any more
        self.held_weights = {index: self._new_held(index) for index in blocks}

    def grads_of(self, op: Op) -> torch.Tensor:
        """The buffer that a unit's gradients leave from."""
        if op.unit == HEAD:
            return self.head_grads[0]
        return self.outer_grads[0] if op.unit == OUTER else self.outgoing_grads(block_index(op.unit))

    def outgoing_grads(self, index: int) -> torch.Tensor:
        """The slot from which a block's gradients leave."""
        return self.grad_slots[0 if self.accumulates else index % 2]
