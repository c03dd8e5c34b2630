"""Where gradients arrive when none are kept: a few slots in host memory, from which an update reads them."""

import torch

from horizon_lm.device.base import Device
from horizon_lm.engine.memory import block_index
from horizon_lm.engine.updates import TableGrads
from horizon_lm.model.parts import ModelParts
from horizon_lm.schedule.ops import EMBED, HEAD, OUTER, block
from horizon_lm.store.store import Store


class LandingSlots:
    """Two slots of the largest block, and one each for the head, the outer parameters, and the table's rows.

    A tied table is the exception: gradients of the head and of the rows add up there, in a slab of its own.
    """

    def __init__(self, store: Store, device: Device, parts: ModelParts) -> None:
        self._store, self._device, self._tied = store, device, parts.tied
        self._dtype = store.precision.grad_dtype
        blocks = max(store.units[block(u)].grad_layout.numel for u in range(parts.num_blocks))
        self._blocks = [self._new(blocks) for _ in range(2)]
        self._head = None if parts.tied else self._new(store.units[HEAD].grad_layout.numel)
        self._outer = self._new(store.units[OUTER].grad_layout.numel)
        (table,) = store.units[EMBED].layout.entries.values()
        self._width = table.shape[1]
        self._rows = self._new(0)
        self._landed_rows: torch.Tensor | None = None

    def _new(self, numel: int) -> torch.Tensor:
        num_bytes = numel * self._dtype.itemsize
        self._store.num_bytes["landing"] = self._store.num_bytes.get("landing", 0) + num_bytes
        return self._device.host_buffer(num_bytes).view(self._dtype) if numel else torch.empty(0, dtype=self._dtype)

    def keeps(self, unit: str) -> bool:
        """Whether a unit has a gradient slab in the store all the same."""
        return self._tied and unit == EMBED

    def of(self, unit: str) -> torch.Tensor:
        """The slot of a unit other than the table, as long as its gradient slab would be."""
        if unit == HEAD:
            assert self._head is not None
            return self._head
        slot = self._outer if unit == OUTER else self._blocks[block_index(unit) % 2]
        return slot[: self._store.units[unit].grad_layout.numel]

    def rows(self, rows: torch.Tensor, room: int) -> torch.Tensor:
        """The slot of an untied table's rows (R, H), made for ``room`` rows. No update may be reading it any more."""
        width = self._width
        numel = (rows.numel() + 1) * width
        if numel > self._rows.numel():
            self._release_rows()
            self._rows = self._new(max(numel, (room + 1) * width))
        self._landed_rows = rows
        self._rows[rows.numel() * width : numel].zero_()  # for all rows that are not there
        return self._rows[: rows.numel() * width].view(rows.numel(), width)

    def _release_rows(self) -> None:
        """Free the slot of rows: a larger one takes its place."""
        old, self._rows = self._rows, torch.empty(0, dtype=self._dtype)
        if old.numel():
            self._device.synchronize()  # gradients of an earlier backward may still be landing in it
            self._store.num_bytes["landing"] -= old.numel() * self._dtype.itemsize
            self._device.free_host(old)

    def table_grads(self) -> TableGrads:
        """What has landed for the table."""
        width = self._width
        if self._tied:
            return TableGrads(self._store.grad(*self._store.units[EMBED].layout), None)
        assert self._landed_rows is not None
        count = self._landed_rows.numel() + 1
        return TableGrads(self._rows[: count * width].view(count, width), self._landed_rows)
