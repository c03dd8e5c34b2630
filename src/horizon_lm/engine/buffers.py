"""Device buffers of the engine: slots of fixed size, and buffers that grow with the batch."""

import torch

from horizon_lm.device.base import Device


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


class Growing:
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
