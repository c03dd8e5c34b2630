"""Gradients in host memory: which of them exist, which are still landing, and how the next gradients are added.

To land a gradient is to copy it from the device into host memory. Its squares are summed on the way for the gradient
norm, so that clipping does not read all gradients again.

Shapes: R distinct rows of the embedding, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from horizon_lm.common.ranges import length
from horizon_lm.common.units import EMBED, HEAD, OUTER, Unit, block
from horizon_lm.device.base import Device, Task
from horizon_lm.device.transfers import Land, Move, SquaredNorm
from horizon_lm.engine.host.parameters import landing_grad, set_landing_grad
from horizon_lm.engine.host.slab_parts import SlabPart
from horizon_lm.engine.host.updates import TableGrads
from horizon_lm.errors import StreamingError
from horizon_lm.memory.layout.buffers import landing_numels
from horizon_lm.memory.store import Store
from horizon_lm.memory.unit_slabs import Slab, Slot, UnitSlabs
from horizon_lm.model.parts import ModelParts, ParamRef


class SquaredNorms:
    """The sum of squares of the gradients of each slab as stored; unknown if other code may have written to them."""

    def __init__(self) -> None:
        self._sums: dict[Slab, list[SquaredNorm]] = {}

    def begin(self, slab: Slab) -> None:
        """Begin the sum of a slab anew: it is the sum of all values that are reported from now on."""
        self._sums[slab] = []

    def reporter_of(self, slab: Slab) -> Callable[[SquaredNorm], None]:
        """Return a function that adds the sum of squares of a landing to the sum of its slab."""
        sums = self._sums.get(slab)
        return (lambda value: None) if sums is None else sums.append  # an unknown sum stays unknown

    def forget(self, slab: Slab) -> None:
        """Forget the sum of a slab whose gradients other code may change from now on."""
        self._sums.pop(slab, None)

    def clear(self) -> None:
        """Forget all sums."""
        self._sums.clear()

    def of(self, slab: Slab) -> float | None:
        """Return the sum of squares of a slab, or None if it is unknown. All landings must be finished."""
        sums = self._sums.get(slab)
        # Read only now: a value may be a tensor that the device was still computing, for which `float` waits. Added as
        # doubles, so that the order of pieces does not show in the clip factor.
        return None if sums is None else float(sum(float(value) for value in sums))


class LandingSlots:
    """The host buffers in which gradients land with ``update_in_backward``, which keeps no gradient slabs.

    Blocks alternate between two slots of the size of the largest block; the head, the outer parameters and the
    embedding's rows have one slot each. A tied embedding keeps its slab, in which the gradients of the head and of the
    rows are added.
    """

    def __init__(self, store: Store, device: Device, parts: ModelParts) -> None:
        self._store, self._device, self._tied = store, device, parts.tied
        self._dtype = store.precision.grad_dtype
        blocks = [store.units[block(u)] for u in range(parts.num_blocks)]
        # Two slots for blocks and one for each other unit. A slot is a list: one buffer for each storage (`UnitSlabs.of_weights`).
        self._slots = {block(number): self._new_slot(blocks) for number in range(2)}
        for unit in (OUTER,) if parts.tied else (HEAD, OUTER):
            self._slots[unit] = self._new_slot([store.units[unit]] if unit in store.units else [])
        (table,) = store.units[EMBED].plain.layout.entries.values()
        self._row_width = table.shape[1]
        self._row_buffer = self._allocate(0, self._dtype)
        self._landed_rows: torch.Tensor | None = None  # (R,)

    def _new_slot(self, units: Sequence[UnitSlabs]) -> list[torch.Tensor]:
        """Return a slot for the gradients of any of these units: a buffer for each storage."""
        dtypes = [slab.grads.dtype for slab in self._store.units[OUTER].of_weights]
        return [self._allocate(numel, dtype) for numel, dtype in zip(landing_numels(units), dtypes, strict=True)]

    def _allocate(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a new buffer in host memory, and count its bytes in the store."""
        num_bytes = numel * dtype.itemsize
        self._store.num_bytes["landing"] = self._store.num_bytes.get("landing", 0) + num_bytes
        return self._device.host_buffer(num_bytes).view(dtype) if numel else torch.empty(0, dtype=dtype)

    def keeps_slab(self, unit: Unit) -> bool:
        """Return whether a unit keeps its gradient slab in the store nevertheless."""
        return self._tied and unit == EMBED

    def slot_of(self, unit: Unit) -> list[torch.Tensor]:
        """Return the slot of a unit other than the embedding: for each storage, a buffer with the length of the gradients that this
        rank owns.
        """
        # Blocks by parity, as in the schedule (`build._landing_buffer`), whose waits keep a landing from an update that
        # still reads the slot.
        buffers = self._slots[block(unit.block_index % 2) if unit.is_block else unit]
        slabs = self._store.units[unit].of_weights
        return [buffer[: length(slab.own_grads)] for buffer, slab in zip(buffers, slabs, strict=True)]

    def slot_of_rows(self, rows: torch.Tensor, room: int) -> torch.Tensor:
        """Return the slot (R, H) for the row gradients of an untied embedding, and remember its rows for `table_grads`. No update may
        still be reading it.

        Args:
            rows: the rows, shape (R,).
            room: rows for which a new slot has room, if one must be allocated.
        """
        width = self._row_width
        numel = (rows.numel() + 1) * width  # and a row of zeros, the gradient of all other rows
        if numel > self._row_buffer.numel():
            self._release_rows()
            self._row_buffer = self._allocate(max(numel, (room + 1) * width), self._dtype)
        self._landed_rows = rows
        self._row_buffer[rows.numel() * width : numel].zero_()
        return self._row_buffer[: rows.numel() * width].view(rows.numel(), width)

    def _release_rows(self) -> None:
        """Free the buffer of row gradients, which a larger one replaces."""
        old, self._row_buffer = self._row_buffer, torch.empty(0, dtype=self._dtype)
        if old.numel():
            self._device.synchronize()  # gradients of an earlier backward pass may still be landing in it
            self._store.num_bytes["landing"] -= old.numel() * self._dtype.itemsize
            self._device.free_host(old)

    def table_grads(self) -> TableGrads:
        """Return the landed gradients of the embedding: of the whole table if it is tied, else of the landed rows."""
        width = self._row_width
        if self._tied:
            (table,) = self._store.units[EMBED].layout
            return TableGrads(self._store.grad(table), None)
        assert self._landed_rows is not None
        count = self._landed_rows.numel() + 1  # with the row of zeros that `slot_of_rows` has added
        return TableGrads(self._row_buffer[: count * width].view(count, width), self._landed_rows)


class HostGrads:
    """The gradients of a model in host memory.

    A gradient is empty while its parameter's ``grad`` is None. The next landing overwrites an empty gradient, and is
    added to any other. Clearing gradients thus writes no memory. From `publish` on a gradient is not empty, also while it
    is still landing: the next landing comes after it in the same stream.

    Attributes:
        squared_norms: sums of squares of the landed gradients, by slab.
        slots: the buffers for gradients that are not kept; None if all are kept.
        invalid: a fault left some gradients incomplete, so no step may use any of them.
    """

    def __init__(self, refs: Mapping[str, ParamRef], store: Store, device: Device) -> None:
        self._refs, self._store, self._device = refs, store, device
        self.squared_norms = SquaredNorms()
        self.slots: LandingSlots | None = None
        self.invalid = False
        self._running_landings: list[Task] = []
        # The rows of the embedding's gradient that may be nonzero; None if any may be.
        self._table_rows: torch.Tensor | None = None
        self._table_is_exclusive = True  # no other code has access to the embedding's gradient

    def allocate(self, trainable: list[str], units: Iterable[Unit]) -> None:
        """Allocate host memory for gradients.

        Args:
            trainable: full names of the trainable parameters.
            units: the units whose gradients are kept.
        """
        self._store.allocate_grads(trainable, set(units))
        # Only the own range: the rest of a slab has addresses, but no memory.
        self._device.register_host([slab.grads[slab.own_grads] for slab in self._store.slabs])

    def is_empty(self, name: str) -> bool:
        """Return whether a parameter has no gradient, so that the next landing overwrites its memory.

        Raises:
            StreamingError: other code has replaced the gradient by a tensor of its own.
        """
        grad = landing_grad(self._refs[name].param)
        if grad is not None and grad.data_ptr() != self._store.grad_address(name):
            raise StreamingError(
                f"{name}.grad was replaced by another tensor; set it to None or change it in place. Call the backward of a loss on the "
                "weights themselves, such as a penalty, on its own and after that of the model"
            )
        return grad is None

    def begin_landings(self, unit: Unit) -> None:
        """Begin the sums of squares of a unit, before the first of its parts lands in a backward pass."""
        # Only a tied head lands the whole table by `moves`, after which any row may be nonzero; rows of tokens land by `LandRows`.
        if unit == EMBED:
            self._table_rows = None
        for slab in self._store.units[unit].of_weights:
            if slab.grad_layout.numel:
                self.squared_norms.begin(slab)

    def moves(self, unit: Unit, source: Slot, part: SlabPart) -> list[Move]:
        """Return the moves that land gradients of a unit, whose landings have begun (`begin_landings`).

        All of the source lands, also the zeros of parameters that got no gradient (`GradSlot.zero_the_rest`); only `publish` is
        given the names of those that got one.

        Args:
            unit: the unit.
            source: the gradients on the device, in the layout of the part.
            part: the part of the unit's slabs.
        """
        if self.slots is not None and not self.slots.keeps_slab(unit):
            targets = self.slots.slot_of(unit)  # a slot has one landing, so nothing is added
            is_added = dict.fromkeys(part.grad_layout, False)
        else:
            targets = [slab.grads[slab.own_grads] for slab in part.slabs.of_weights]
            # By parameter. Usually all gradients of a unit are empty, or none are: then a slab is landed as a whole.
            is_added = {name: not self.is_empty(name) for name in part.grad_layout}
        moves: list[Move] = []
        for number, slab in enumerate(part.slabs.of_weights):
            # A target has this rank's range alone, and spans count from the beginning of the slab.
            report, own_start = self.squared_norms.reporter_of(slab), slab.own_grads.start
            for is_sum, span in part.grad_spans(number, is_added):
                target = targets[number][span.start - own_start :][: span.numel]
                moves.append(Land(target, source[number][span.in_slot], report, add=is_sum))
        return moves

    def take_rows_to_clear(self, rows: torch.Tensor, is_empty: bool) -> torch.Tensor | slice | None:
        """Return the rows of the embedding's gradient to zero before a landing: their numbers, or a slice of all of them; None if the
        landing is added to the gradient. Remember the landing's rows for the next call.

        The whole gradient (V, H) is too large to zero in every step. So only rows of the last landing are zeroed, without those that this
        landing overwrites: at the end of a step, no computation hides the time that this takes on the host.

        Args:
            rows: the rows to land, shape (R,).
            is_empty: the gradient is empty, so all other rows must become zero.
        """
        last_rows, self._table_rows = self._table_rows, None  # unknown, unless set below
        if not is_empty:
            return None
        if self._table_is_exclusive:
            self._table_rows = rows
        if last_rows is None:  # it is not known which rows are nonzero, so all are zeroed
            return slice(None)
        return last_rows[~torch.isin(last_rows, rows, assume_unique=True)]

    def hand_out(self, unit: Unit) -> None:
        """Record that other code may read and write a unit's gradients from now on."""
        for slab in self._store.units[unit].of_weights:
            self.squared_norms.forget(slab)
        if unit == EMBED:
            # For good: code that has got the tensor once may write to any row of it later.
            self._table_is_exclusive, self._table_rows = False, None

    def publish(self, names: Iterable[str]) -> None:
        """Set ``grad`` of these parameters to their gradients in host memory, which may still be landing."""
        for name in names:
            # A gradient that is set is this memory already, and other code may hold the tensor, so it stays. `is_empty` rejects one that
            # autograd has set during the pass.
            if self.is_empty(name):
                set_landing_grad(self._refs[name].param, self._store.grad(name))

    def track_landings(self, tasks: list[Task]) -> None:
        """Remember the landing tasks of a backward pass, for `wait`."""
        self._running_landings = tasks

    def wait(self) -> None:
        """Block until the gradients of finished backward passes are in host memory."""
        try:
            self._device.wait(self._running_landings)
        except Exception:  # a copy failed, so a gradient is incomplete; after an interrupt, gradients still land
            self._device.cancel(self._running_landings)
            self._running_landings = []
            self.invalidate()
            raise
        self._running_landings = []

    def invalidate(self) -> None:
        """Mark the gradients invalid, because a fault has left some of them incomplete."""
        # A landing that was cut off may have written any rows.
        self.invalid, self._table_rows = True, None

    def clear(self) -> None:
        """Mark all gradients empty, and valid again. No memory is written."""
        for ref in self._refs.values():
            set_landing_grad(ref.param, None)
        self.squared_norms.clear()
        self.invalid = False

    def clear_error_if_no_grads(self) -> None:
        """Mark the gradients valid again if other code has emptied all of them (``param.grad = None``) after a fault."""
        if self.invalid and all(landing_grad(ref.param) is None for ref in self._refs.values()):
            self.invalid = False
