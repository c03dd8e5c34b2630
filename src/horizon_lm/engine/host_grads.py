"""Gradients in host memory: which exist, which are landing, and how the next ones are added to them."""

from collections.abc import Callable, Iterable, Mapping

import torch

from horizon_lm.device.base import Device, Task
from horizon_lm.device.transfers import Land, Move, SquaredNorm
from horizon_lm.engine.parameters import landing_grad, set_landing_grad
from horizon_lm.engine.updates import TableGrads
from horizon_lm.errors import StreamingError
from horizon_lm.model.units import ModelParts, ParamRef
from horizon_lm.schedule.ops import EMBED, HEAD, OUTER, block, block_index
from horizon_lm.store.store import Store


class SquaredNorms:
    """By unit, the sum of squares of its gradient slab as it is stored; unknown where somebody else may have written."""

    def __init__(self) -> None:
        self._sums: dict[str, list[SquaredNorm]] = {}

    def landing(self, unit: str, whole: bool) -> Callable[[SquaredNorm], None]:
        """What reports of a landing go to: of the whole slab, or of a change to it."""
        if whole:
            self._sums[unit] = []
        sums = self._sums.get(unit)
        return (lambda value: None) if sums is None else sums.append

    def forget(self, unit: str) -> None:
        """The slab may be changed by others."""
        self._sums.pop(unit, None)

    def clear(self) -> None:
        self._sums.clear()

    def of(self, unit: str) -> float | None:
        """The sum, or None if it is unknown. Every landing must be finished."""
        sums = self._sums.get(unit)
        return None if sums is None else float(sum(float(value) for value in sums))


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


class HostGrads:
    """A gradient is empty while its parameter's ``grad`` is None; what lands then overwrites, and adds otherwise.

    Attributes:
        squared_norms: of what has landed, by unit.
        slots: where gradients land that are not kept; None if all are kept.
        invalid: a fault left some gradients incomplete, so that no step may use any of them.
    """

    def __init__(self, refs: Mapping[str, ParamRef], store: Store, device: Device) -> None:
        self._refs, self._store, self._device = refs, store, device
        self.squared_norms = SquaredNorms()
        self.slots: LandingSlots | None = None
        self.invalid = False
        self._landing: list[Task] = []
        self._table_rows: torch.Tensor | None = (
            None  # of the table's gradient that may hold something; None for any row
        )
        self._table_is_ours = True  # nobody else has had the table's gradient in hand, and may write to it

    def allocate(self, trainable: list[str], units: Iterable[str]) -> None:
        """Make room for the gradients of these parameters, kept for these units."""
        self._store.allocate_grads(trainable, set(units))
        self._device.register_host([s.grads for s in self._store.units.values() if s.grads.numel()])

    def is_empty(self, name: str) -> bool:
        """Whether a parameter has no gradient yet, so that the next one overwrites."""
        grad = landing_grad(self._refs[name].param)
        if grad is not None and grad.data_ptr() != self._store.grad_address(name):
            raise StreamingError(f"{name}.grad was replaced by another tensor; set it to None or change it in place")
        return grad is None

    def moves(self, unit: str, source: torch.Tensor) -> list[Move]:
        """How the gradients in ``source``, laid out as the unit's, get to the host."""
        if unit == EMBED:  # a tied head's
            self._table_rows = None
        slabs = self._store.units[unit]
        report = self.squared_norms.landing(unit, whole=True)
        if self.slots is not None and not self.slots.keeps(unit):
            target = self.slots.of(unit)
            return [Land(target, source[: target.numel()], False, report)]
        empty = {name: self.is_empty(name) for name in slabs.grad_layout}
        if len(set(empty.values())) == 1:
            return [Land(slabs.grads, source[: slabs.grads.numel()], not next(iter(empty.values())), report)]
        views = [(name, slabs.grad_layout.view(slabs.grads, name).view(-1)) for name in slabs.grad_layout]
        return [
            Land(view, slabs.grad_layout.view(source, name).view(-1), not empty[name], report) for name, view in views
        ]

    def rows_to_clear(self, rows: torch.Tensor, empty: bool) -> torch.Tensor | slice | None:
        """Return the rows of the table's gradient to clear before these land; a table is too large to clear every step.

        Args:
            rows: that land; all others shall be zero if the gradient is empty now.
            empty: see the class.
        """
        before, self._table_rows = self._table_rows, None
        if not empty:
            return None
        if self._table_is_ours:
            self._table_rows = rows
        return slice(None) if before is None else before

    def hand_out(self, unit: str) -> None:
        """Somebody may read and write the gradients of a unit, now or later."""
        self.squared_norms.forget(unit)
        if unit == EMBED:
            self._table_is_ours, self._table_rows = False, None

    def publish(self, names: Iterable[str]) -> None:
        """A backward is over: parameters whose gradients are kept have them from now on."""
        for name in names:
            param = self._refs[name].param
            if landing_grad(param) is None:
                set_landing_grad(param, self._store.grad(name))

    def land(self, tasks: list[Task]) -> None:
        """These bring the gradients of a backward that is over."""
        self._landing = tasks

    def wait(self) -> None:
        """Block until the gradients of finished backward passes are in host memory."""
        try:
            self._device.wait(self._landing)
        except Exception:  # a copy failed, so a gradient is incomplete; an interrupt only ends the waiting
            self._device.cancel(self._landing)
            self._landing = []
            self.break_off()
            raise
        self._landing = []

    def break_off(self) -> None:
        """A fault has left some gradients incomplete."""
        self.invalid, self._table_rows = True, None

    def clear(self) -> None:
        """All gradients are empty again, and a fault is forgiven. No memory is written."""
        for ref in self._refs.values():
            set_landing_grad(ref.param, None)
        self.squared_norms.clear()
        self.invalid = False

    def clear_error_if_no_grads(self) -> None:
        """A fault does not matter any more once somebody has emptied all gradients by hand."""
        if self.invalid and all(landing_grad(ref.param) is None for ref in self._refs.values()):
            self.invalid = False
