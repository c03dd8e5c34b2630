"""One step's update, cut into pieces that any thread may run: spans of slabs, and rows of the embedding table."""

import zlib
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from horizon_lm.constants import MOMENT_BLOCK as BLOCK
from horizon_lm.device.cpu import dtype_name
from horizon_lm.device.transfers import Link, Move
from horizon_lm.engine.updates import TableGrads
from horizon_lm.kernels.adamw import Scalars, rows_kernel, update_kernel
from horizon_lm.optim.moments import Moments
from horizon_lm.store.store import Store, as_array

_PIECE = 1 << 19  # elements of a piece, a multiple of the blocks of 8-bit moments: about half a millisecond's work


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """Of one parameter in one step; taken when `step` is called, because schedulers change them right after."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def scalars(self, step: int, clip: float, key: int) -> Scalars:
        """What the kernels need, formed in double precision. ``step`` from 1; ``key``: of the noise."""
        return Scalars(
            clip=np.float32(clip),
            decay=np.float32(1 - self.lr * self.weight_decay),
            one_minus_beta1=np.float32(1 - self.beta1),
            beta2=np.float32(self.beta2),
            one_minus_beta2=np.float32(1 - self.beta2),
            step_size=np.float32(self.lr / (1 - self.beta1**step)),
            sqrt_correction2=np.float32((1 - self.beta2**step) ** 0.5),
            eps=np.float32(self.eps),
            key=np.uint32(key),
        )


def noise_key(seed: int, step: int, unit: str) -> int:
    """Different for every step and unit; an element's noise follows from it and from its place in the slab."""
    return zlib.crc32(f"{seed}/{step}/{unit}".encode())


class UnitArrays:
    """A unit's slabs as the kernels see them; gradients are given with each update, since they may be anywhere."""

    def __init__(self, store: Store, unit: str, moments: Moments) -> None:
        slabs, own = store.units[unit], moments.units[unit]
        self.layout, self.grad_layout = slabs.layout, slabs.grad_layout
        self.weights = as_array(slabs.weights)
        self.low = np.empty(0, np.int16) if slabs.low is None else as_array(slabs.low)
        self.first, self.second = as_array(own.first), as_array(own.second)
        self.scale1, self.scale2 = as_array(own.scale1), as_array(own.scale2)
        self.scale_starts = own.scale_starts
        self.mergeable = moments.kind != "8bit"  # whose blocks begin with each parameter
        self.modes = (store.precision.name, moments.kind, dtype_name(torch.empty(0, dtype=store.precision.grad_dtype)))


def compile_kernels(arrays: UnitArrays) -> None:
    """Compile what an update needs, so that the first step takes no longer than the others."""
    scalars = Hyperparameters(0.0, 0.9, 0.9, 1.0, 0.0).scalars(1, 1.0, 0)
    values = as_array(torch.empty(0, dtype=getattr(torch, arrays.modes[2])))
    slabs = [a[:0] for a in (arrays.weights, arrays.low, values, arrays.first, arrays.second)]
    scales = [a[:0] for a in (arrays.scale1, arrays.scale2)]
    nothing = np.empty(0, np.int64)
    update_kernel(*arrays.modes)(*slabs, *scales, np.uint32(0), scalars)
    rows_kernel(*arrays.modes)(*slabs, *scales, 1, 0, nothing, nothing, scalars)


Tear = Callable[[BaseException], None]
Guard = Callable[[], bool]


@dataclass(eq=False, slots=True)
class _Work:
    """A piece of an update. A failure inside tears the model.

    Attributes:
        number: among the pieces of ``of``, which knows what is done: an interrupted pass may issue a piece again.
    """

    of: "Pieces"
    number: int
    host_bytes: int = 0

    def run(self, link: Link) -> None:
        self.of.run(self.number)

    def split(self, parts: int) -> list[Move]:
        return [self]


class Pieces(Sequence[Move]):
    """An update in pieces. Each is made when somebody takes it: a large model has tens of thousands of them.

    Args:
        count: number of pieces.
        function: does the one of a number.
        record: called with an error inside a piece.
        guard: false if a piece must not run after all, because its gradient is not finite.
    """

    def __init__(self, count: int, function: Callable[[int], None], record: Tear, guard: Guard) -> None:
        self._function, self._tear, self._guard = function, record, guard
        self._done = bytearray(count)

    def __len__(self) -> int:
        return len(self._done)

    def __getitem__(self, number: Any) -> Any:
        return _Work(self, range(len(self))[number])

    def run(self, number: int) -> None:
        """Do a piece, once."""
        if self._done[number]:
            return
        if self._guard():
            try:
                self._function(number)
            except BaseException as error:
                self._tear(error)
                raise
        self._done[number] = True


@dataclass(frozen=True, slots=True)
class Span:
    """Parameters that are updated alike and lie one behind the other; with 8-bit moments it is one."""

    names: Sequence[str]
    scalars: Scalars


def span_pieces(arrays: UnitArrays, spans: Sequence[Span], values: Any, record: Tear, guard: Guard) -> Pieces:
    """Return the update of some spans of a unit, with its gradient slab as an array.

    The padding between parameters is updated, too: zeros stay zeros.
    """
    kernel = update_kernel(*arrays.modes)
    places = [_place(arrays, span) for span in spans]
    firsts = [0, *accumulate(-(-numel // _PIECE) for _, _, numel in places)]

    def update(number: int) -> None:
        index = bisect_right(firsts, number) - 1
        (start, grad_start, numel), span = places[index], spans[index]
        offset = (number - firsts[index]) * _PIECE
        size = min(_PIECE, numel - offset)
        w, g = start + offset, grad_start + offset
        scales = slice(0, 0)
        if arrays.scale_starts:
            first = arrays.scale_starts[span.names[0]] + offset // BLOCK
            scales = slice(first, first - (-size // BLOCK))
        kernel(
            arrays.weights[w : w + size], arrays.low[w : w + size], values[g : g + size],
            arrays.first[g : g + size], arrays.second[g : g + size], arrays.scale1[scales], arrays.scale2[scales],
            np.uint32(w & 0xFFFFFFFF), span.scalars,
        )  # fmt: skip

    return Pieces(firsts[-1], update, record, guard)


def _place(arrays: UnitArrays, span: Span) -> tuple[int, int, int]:
    """Return where a span begins among the weights and among the gradients, and its number of elements."""
    first, last = (arrays.layout.entries[span.names[i]] for i in (0, -1))
    return first.offset, arrays.grad_layout.entries[span.names[0]].offset, last.offset + last.numel - first.offset


class TableRows:
    """One step's update of the embedding table; see `engine.updates.TableUpdate`."""

    def __init__(self, arrays: UnitArrays, grads: TableGrads, scalars: Scalars, record: Tear, guard: Guard) -> None:
        (place,) = arrays.layout.entries.values()
        self._arrays, self._scalars, self._tear, self._guard = arrays, scalars, record, guard
        self._num_rows, self._width = place.shape
        self._blocks = -(-self._width // BLOCK) if arrays.scale_starts else 0
        self._kernel = rows_kernel(*arrays.modes)
        self._grads = as_array(grads.grads).reshape(-1)
        self._done = np.zeros(self._num_rows, dtype=bool)
        self._grad_rows = np.arange(self._num_rows)
        if grads.rows is not None:
            self._grad_rows[:] = grads.rows.numel()  # the row of zeros
            self._grad_rows[grads.rows.numpy()] = np.arange(grads.rows.numel())

    def rows(self, rows: torch.Tensor) -> Sequence[Move]:
        return self._pieces(rows.numpy())

    def rest(self) -> Sequence[Move]:
        return self._pieces(np.arange(self._num_rows))

    def _pieces(self, rows: Any) -> Pieces:
        count = max(1, _PIECE // self._width)
        return Pieces(
            -(-len(rows) // count),
            lambda number: self._update(rows[number * count : (number + 1) * count]),
            self._tear,
            self._guard,
        )

    def _update(self, rows: Any) -> None:
        rows = rows[~self._done[rows]]
        arrays = self._arrays
        self._kernel(
            arrays.weights, arrays.low, self._grads, arrays.first, arrays.second, arrays.scale1, arrays.scale2,
            self._width, self._blocks, rows, self._grad_rows[rows], self._scalars,
        )  # fmt: skip
        self._done[rows] = True
