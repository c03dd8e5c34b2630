"""Gradients in host memory: which are there, which are on their way, and how the next ones meet them."""

from collections.abc import Iterable, Mapping

import torch

from horizon_lm.device.base import Device, Task
from horizon_lm.device.moves import Land, Move
from horizon_lm.engine.landing import LandingSlots
from horizon_lm.engine.parameters import landing_grad, set_landing_grad
from horizon_lm.engine.squares import GradSquares
from horizon_lm.errors import StreamingError
from horizon_lm.model.parts import ParamRef
from horizon_lm.schedule.ops import EMBED
from horizon_lm.store.store import Store


class HostGrads:
    """A gradient is empty while its parameter's ``grad`` is None; what lands then overwrites, and adds otherwise.

    Attributes:
        squares: of what has landed, by unit.
        slots: where gradients land that are not kept; None if all are kept.
        invalid: a fault left some gradients incomplete, so that no step may use any of them.
    """

    def __init__(self, refs: Mapping[str, ParamRef], store: Store, device: Device) -> None:
        self._refs, self._store, self._device = refs, store, device
        self.squares = GradSquares()
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
        report = self.squares.landing(unit, whole=True)
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
        self.squares.forget(unit)
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
        self.squares.clear()
        self.invalid = False

    def forgive_if_empty(self) -> None:
        """A fault does not matter any more once somebody has emptied all gradients by hand."""
        if self.invalid and all(landing_grad(ref.param) is None for ref in self._refs.values()):
            self.invalid = False
