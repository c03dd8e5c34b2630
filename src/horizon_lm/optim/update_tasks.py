"""The update of one step: its hyperparameters, and its pieces, which any thread may run.

A piece updates part of a span of a slab, or some rows of the embedding.
"""

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from horizon_lm.constants import MOMENT_BLOCK as BLOCK
from horizon_lm.device.transfers import Link, Move
from horizon_lm.engine.host.updates import TableGrads
from horizon_lm.kernels.adamw import Scalars, rows_kernel, update_kernel
from horizon_lm.optim.moments import UnitArrays
from horizon_lm.store.arena import as_array
from horizon_lm.units import Unit

# The least elements of a piece, a multiple of the 8-bit block size: half a millisecond of work.
_PIECE_ELEMENTS = 1 << 19
_LARGEST = 4  # times as many elements has a piece at most
_ENOUGH_PIECES = 64  # so that all threads have work until the end of a span


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """The hyperparameters of one parameter in one step, copied at its start because schedulers change them
    right after.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float

    def scalars(self, step: int, clip: float, key: int) -> Scalars:
        """Return the kernels' scalars, computed in double precision. ``step`` starts at 1; ``key`` seeds the noise."""
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


@dataclass(frozen=True, slots=True)
class Span:
    """Adjacent parameters that are updated with the same scalars; with 8-bit moments, a single parameter."""

    names: Sequence[str]
    scalars: Scalars


class StepUpdate:
    """An update step in progress: its hyperparameters, and the parameters updated so far.

    Args:
        groups: the optimizer's parameter groups.
        steps: number of earlier steps of each parameter.
        seed: the seed of the noise of stochastic rounding.
        step: number of this step, counted from 1; the noise also depends on it.
        clip: factor on all gradients.

    Attributes:
        stepped: parameters that have been grouped into spans.
    """

    def __init__(
        self, groups: Iterable[Mapping[str, Any]], steps: Mapping[torch.Tensor, int], seed: int, step: int, clip: float
    ) -> None:
        self._hyperparameters = {
            id(param): Hyperparameters(
                lr=float(group["lr"]),
                beta1=float(group["betas"][0]),
                beta2=float(group["betas"][1]),
                eps=float(group["eps"]),
                weight_decay=float(group["weight_decay"]),
            )
            for group in groups
            for param in group["params"]
        }
        self._steps, self._seed, self._step, self._clip = steps, seed, step, clip
        self.stepped: list[torch.nn.Parameter] = []

    def spans(self, unit: Unit, arrays: UnitArrays, params: Mapping[str, torch.nn.Parameter]) -> list[Span]:
        """Group parameters of a unit into spans, leaving out parameters that the optimizer does not train."""
        order = {name: number for number, name in enumerate(arrays.layout)}
        spans: list[tuple[list[str], Scalars]] = []
        before: tuple[Any, ...] = ()
        for name, param in params.items():
            hyper = self._hyperparameters.get(id(param))
            if hyper is None:
                continue
            step = self._steps[param] + 1
            if arrays.mergeable and before == (order[name] - 1, hyper, step):
                spans[-1][0].append(name)
            else:
                spans.append(([name], hyper.scalars(step, self._clip, noise_key(self._seed, self._step, unit))))
            before = order[name], hyper, step
            self.stepped.append(param)
        return [Span(*span) for span in spans]


def noise_key(seed: int, step: int, unit: Unit) -> int:
    """Return a key that differs by step and unit. The noise of an element depends on the key and on its position in the
    slab.
    """
    return zlib.crc32(f"{seed}/{step}/{unit}".encode())


def compile_kernels(arrays: UnitArrays) -> None:
    """Compile the kernels of an update, so that the first step takes no longer than later steps."""
    scalars = Hyperparameters(0.0, 0.9, 0.9, 1.0, 0.0).scalars(1, 1.0, 0)
    values = as_array(torch.empty(0, dtype=getattr(torch, arrays.modes[2])))
    slabs = [a[:0] for a in (arrays.weights, arrays.low, values, arrays.first, arrays.second)]
    scales = [a[:0] for a in (arrays.scale1, arrays.scale2)]
    nothing = np.empty(0, np.int64)
    update_kernel(*arrays.modes)(*slabs, *scales, np.uint32(0), scalars)
    rows_kernel(*arrays.modes)(*slabs, *scales, 1, 0, nothing, nothing, scalars)


Record = Callable[[BaseException], None]
Guard = Callable[[], bool]


@dataclass(eq=False, slots=True)
class _Piece:
    """A piece of an update as a move. `Pieces` records which pieces are done, as an interrupted pass may issue one
    again.
    """

    pieces: "Pieces"
    number: int
    host_bytes: int = 0

    def run(self, link: Link) -> None:
        self.pieces.run(self.number)

    def split(self, parts: int) -> list[Move]:
        return [self]


class Pieces(Sequence[Move]):
    """An update in pieces. Each piece is created when a thread takes it, because a large model has tens of thousands.

    Args:
        count: number of pieces.
        function: runs the piece with a given number.
        record: called with an error raised inside a piece, which leaves a partial update.
        guard: function that returns False if pieces must not run because a gradient is not finite.
    """

    def __init__(self, count: int, function: Callable[[int], None], record: Record, guard: Guard) -> None:
        self._function, self._record, self._guard = function, record, guard
        self._done = bytearray(count)

    def __len__(self) -> int:
        return len(self._done)

    def __getitem__(self, number: Any) -> Any:
        return _Piece(self, range(len(self))[number])

    def run(self, number: int) -> None:
        """Run a piece unless it has already run."""
        if self._done[number]:
            return
        if self._guard():
            try:
                self._function(number)
            except BaseException as error:
                self._record(error)
                raise
        self._done[number] = True


def piece_elements(numel: int) -> int:
    """Return the elements of a piece of a span of ``numel`` elements.

    A piece takes about 10 us of the interpreter's time, which other threads need to enqueue computations. At 200 GB/s,
    small pieces of a 7B model would take an eighth of that time.
    """
    return _PIECE_ELEMENTS * max(1, min(_LARGEST, numel // (_ENOUGH_PIECES * _PIECE_ELEMENTS)))


def span_pieces(arrays: UnitArrays, spans: Sequence[Span], values: Any, record: Record, guard: Guard) -> Pieces:
    """Return the update of some spans of a unit, with this rank's part of its gradient slab as an array.

    The padding between parameters is also updated: zeros stay zeros.
    """
    kernel = update_kernel(*arrays.modes)
    places = [_place(arrays, span) for span in spans]
    pieces = [piece_elements(numel) for _, _, numel in places]
    firsts = [0, *accumulate(-(-numel // piece) for (_, _, numel), piece in zip(places, pieces, strict=True))]

    def update(number: int) -> None:
        index = bisect_right(firsts, number) - 1
        (start, grad_start, numel), span = places[index], spans[index]
        offset = (number - firsts[index]) * pieces[index]
        size = min(pieces[index], numel - offset)
        w, g = start + offset, grad_start + offset
        scales = slice(0, 0)
        if arrays.scale_starts:
            before = start - arrays.layout.entries[span.names[0]].offset  # of other ranks, a multiple of a block
            first = arrays.scale_starts[span.names[0]] + (before + offset) // BLOCK
            scales = slice(first, first - (-size // BLOCK))
        kernel(
            arrays.weights[w : w + size], arrays.low[w : w + size], values[g - arrays.own_grads.start :][:size],
            arrays.first[g : g + size], arrays.second[g : g + size], arrays.scale1[scales], arrays.scale2[scales],
            np.uint32(w & 0xFFFFFFFF), span.scalars,
        )  # fmt: skip

    return Pieces(firsts[-1], update, record, guard)


def _place(arrays: UnitArrays, span: Span) -> tuple[int, int, int]:
    """Return the start of a span among the weights and among the gradients, and its number of elements, of the part that
    this rank owns.
    """
    first, last = (arrays.layout.entries[span.names[i]] for i in (0, -1))
    start = max(first.offset, arrays.own.start)
    stop = max(start, min(last.offset + last.numel, arrays.own.stop))
    return start, arrays.grad_layout.entries[span.names[0]].offset + start - first.offset, stop - start


class TableRows:
    """The update of the embedding (V, H) in one step, by row; see `engine.updates.TableUpdate`."""

    def __init__(self, arrays: UnitArrays, grads: TableGrads, scalars: Scalars, record: Record, guard: Guard) -> None:
        (place,) = arrays.layout.entries.values()
        self._arrays, self._scalars, self._record, self._guard = arrays, scalars, record, guard
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
        own = self._arrays.own
        return self._pieces(np.arange(own.start // self._width, min(-(-own.stop // self._width), self._num_rows)))

    def _pieces(self, rows: Any) -> Pieces:
        count = max(1, _PIECE_ELEMENTS // self._width)
        return Pieces(
            -(-len(rows) // count),
            lambda number: self._update(rows[number * count : (number + 1) * count]),
            self._record,
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
