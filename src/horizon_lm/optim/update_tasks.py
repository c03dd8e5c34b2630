"""The update of one step: its hyperparameters, and its pieces, which any thread may run.

A piece updates part of a span of a slab, or some rows of the embedding.
"""

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from horizon_lm.common.constants import MOMENT_BLOCK as BLOCK
from horizon_lm.common.ranges import length, overlap
from horizon_lm.device.transfers import Link, Move
from horizon_lm.engine.host.updates import TableGrads
from horizon_lm.memory.arena import as_array
from horizon_lm.memory.kernels.updates import Rule, Scalars, rows_kernel, update_kernel
from horizon_lm.memory.layout.slabs import SlabLayout
from horizon_lm.optim.moments import MomentArrays, SlabArrays

# Elements of a piece of a small span, a multiple of the 8-bit block size: half a millisecond of work.
_PIECE_ELEMENTS = 1 << 19
_MAX_FACTOR = 4  # pieces of a large span are up to as many times larger
_ENOUGH_PIECES = 64  # so that all threads have work until the end of a span


def step_scalars(rule: Rule, settings: Mapping[str, Any], step: int, clip: float, key: int) -> Scalars:
    """Return the kernels' scalars, computed in double precision.

    Args:
        rule: the optimizer's rule.
        settings: settings of a parameter group.
        step: number of the parameter's step, counted from 1.
        clip: factor on the gradients.
        key: seed of the noise.
    """
    settings_of_rule = {name: value for name, value in settings.items() if name != "weight_decay"}
    return Scalars(
        clip=np.float32(clip),
        decay=np.float32(1 - settings["lr"] * settings["weight_decay"]),
        key=np.uint32(key),
        numbers=rule.numbers(step, **settings_of_rule),
    )


@dataclass(frozen=True, slots=True)
class UpdateSpan:
    """Adjacent parameters that are updated by the same rule with the same scalars; with 8-bit moments, a single parameter."""

    names: Sequence[str]
    rule: Rule
    scalars: Scalars


class StepUpdate:
    """An update step in progress: its hyperparameters, and the parameters updated so far.

    Args:
        groups: parameters, and the settings of their group, which are copied because schedulers change them right after.
        steps: number of earlier steps of each parameter.
        seed: the seed of the noise of stochastic rounding.
        step: number of this step, counted from 1; the noise also depends on it.
        clip: factor on all gradients.

    Attributes:
        stepped: parameters that have been grouped into spans, so that they are updated in this step.
    """

    def __init__(
        self, groups: Iterable[tuple[Iterable[Any], Mapping[str, Any]]], steps: Mapping[torch.Tensor, int], seed: int, step: int,
        clip: float,
    ) -> None:  # fmt: skip
        self._settings: dict[int, dict[str, Any]] = {}
        for params, settings in groups:
            self._settings.update(dict.fromkeys(map(id, params), _copied(settings)))
        self._steps, self._seed, self._step, self._clip = steps, seed, step, clip
        self.stepped: list[torch.nn.Parameter] = []

    def spans(
        self, slab: str, arrays: SlabArrays, params: Mapping[str, torch.nn.Parameter], rules: Mapping[str, Rule]
    ) -> list[UpdateSpan]:
        """Group parameters of a slab, given by its name, into spans, and add them to `stepped`. Parameters in no group of the optimizer are
        left out.
        """
        order = {name: number for number, name in enumerate(arrays.layout)}
        spans: list[tuple[list[str], Rule, Scalars]] = []
        previous: tuple[Any, ...] = ()  # the last parameter's place in the slab's order, rule, settings and step
        for name, param in params.items():
            settings = self._settings.get(id(param))
            if settings is None:
                continue
            rule, step = rules[name], self._steps[param] + 1
            if rule.on_device is not None:  # the numbers of such a rule depend on the shape (`Rule.on_device`)
                settings = {**settings, "shape": tuple(param.shape)}
            if arrays.mergeable and previous == (order[name] - 1, rule, settings, step):
                names, _, _ = spans[-1]
                names.append(name)
            else:
                key = noise_key(self._seed, self._step, slab)
                spans.append(([name], rule, step_scalars(rule, settings, step, self._clip, key)))
            previous = order[name], rule, settings, step
            self.stepped.append(param)
        return [UpdateSpan(*span) for span in spans]


def noise_key(seed: int, step: int, slab: str) -> int:
    """Return a key that differs by step and slab. The noise of an element depends on the key and on its position in the slab."""
    return zlib.crc32(f"{seed}/{step}/{slab}".encode())


def _copied(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as plain numbers; a learning rate may be a tensor."""
    return {
        name: tuple(map(float, value)) if isinstance(value, tuple | list) else float(value)
        for name, value in settings.items()
    }


def compile_kernels(arrays: SlabArrays, rule: Rule, settings: Mapping[str, Any], is_table: bool) -> None:
    """Compile the kernels of a rule by calling them with no elements, so that the first step takes no longer than later steps."""
    shape = {} if rule.on_device is None else {"shape": (1, 1)}
    scalars = step_scalars(rule, _copied(settings) | shape, step=1, clip=1.0, key=0)
    no_rows = np.empty(0, np.int64)
    values = as_array(torch.empty(0, dtype=getattr(torch, arrays.grad_format)))

    def compile_rule(arrays: SlabArrays, rule: Rule) -> None:
        moments = arrays.moments_of(rule)
        slabs = [arrays.weights, arrays.low, values, *(m.values for m in moments), *(m.scales for m in moments)]
        slabs = [each[:0] for each in slabs]
        update_kernel(*arrays.modes(rule))(*slabs, np.uint32(0), scalars)
        if is_table:
            rows_kernel(*arrays.modes(rule))(*slabs, 1, 0, no_rows, no_rows, scalars)  # rows of width 1, without scales

    if rule.on_device is None:
        compile_rule(arrays, rule)
    else:
        compile_rule(arrays.of_grads(values), rule)
        compile_rule(arrays, rule.on_device.then)


def first_parts(spans: Iterable[UpdateSpan]) -> list[UpdateSpan]:
    """Return the spans with a part on the device (`Rule.on_device`), with scalars for the part before it.

    That part writes its result over the gradient, which takes the place of the weight (`SlabArrays.of_grads`); a decay of 0 removes it.
    """

    def without_weight(scalars: Scalars) -> Scalars:
        return Scalars(scalars.clip, decay=np.float32(0), key=scalars.key, numbers=scalars.numbers)

    return [replace(s, scalars=without_weight(s.scalars)) for s in spans if s.rule.on_device is not None]


def last_parts(spans: Iterable[UpdateSpan]) -> list[UpdateSpan]:
    """Return all spans with the rule and scalars that update the weights. A span with a part on the device gets the rule after it."""

    def after(span: UpdateSpan) -> UpdateSpan:
        assert span.rule.on_device is not None
        # The device's results are not clipped: they come from gradients that the first part has clipped.
        scalars = Scalars(np.float32(1), span.scalars.decay, span.scalars.key, span.scalars.numbers)
        return replace(span, rule=span.rule.on_device.then, scalars=scalars)

    return [span if span.rule.on_device is None else after(span) for span in spans]


Record = Callable[[BaseException], None]
Guard = Callable[[], bool]


@dataclass(eq=False, slots=True)
class _Piece:
    """A piece of an update as a move. `Pieces` records which pieces are done, because an interrupted pass may issue a piece again."""

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
        """Run a piece unless it has already run, or its guard returns False."""
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
    return _PIECE_ELEMENTS * max(1, min(_MAX_FACTOR, numel // (_ENOUGH_PIECES * _PIECE_ELEMENTS)))


def span_pieces(arrays: SlabArrays, spans: Sequence[UpdateSpan], grads: Any, record: Record, guard: Guard) -> Pieces:
    """Return the update of some spans of a slab in pieces. ``grads`` is this rank's range of its gradients, as an array.

    The padding between parameters is also updated: zeros stay zeros.
    """
    own_parts = [_OwnPart.of(arrays, span) for span in spans]
    sizes = [piece_elements(each.numel) for each in own_parts]  # of the pieces of each span
    # The number of the first piece of each span, and at the end the number of all pieces.
    firsts = [0, *accumulate(-(-each.numel // size) for each, size in zip(own_parts, sizes, strict=True))]

    def update(number: int) -> None:
        """Update the piece with a number."""
        part = bisect_right(firsts, number) - 1  # of its span
        own_parts[part].update(grads, (number - firsts[part]) * sizes[part], sizes[part])

    return Pieces(firsts[-1], update, record, guard)


@dataclass(frozen=True, slots=True)
class _OwnPart:
    """A span in its slab, and the part of it that this rank owns.

    The span reaches from the begin of its first parameter to the end of its last. Other ranks may own its begin or its end; the part is
    what lies in this rank's range of the slab.

    Attributes:
        arrays, span: the slab, and the span.
        before: number of elements of the span before the part.
        numel: number of elements of the part.
        kernel, moments: the kernel that updates by the span's rule, and the moments of that rule.
    """

    arrays: SlabArrays
    span: UpdateSpan
    before: int
    numel: int
    kernel: Callable[..., None]
    moments: Sequence[MomentArrays]

    @classmethod
    def of(cls, arrays: SlabArrays, span: UpdateSpan) -> "_OwnPart":
        """Find the part of a span that this rank owns."""
        first, last = (arrays.layout.entries[span.names[i]] for i in (0, -1))
        own = overlap(slice(first.offset, last.offset + last.numel), arrays.own)
        kernel = update_kernel(*arrays.modes(span.rule))
        return cls(arrays, span, own.start - first.offset, length(own), kernel, arrays.moments_of(span.rule))

    def update(self, grads: Any, offset: int, size: int) -> None:
        """Update at most ``size`` elements of the part, from ``offset`` on. ``grads`` is this rank's range of a slab of gradients."""
        arrays, name = self.arrays, self.span.names[0]  # the parameter with which the span begins, in each slab
        size, start_in_span = min(size, self.numel - offset), self.before + offset

        def elements_of(layout: SlabLayout, slab: Any) -> Any:
            """Return these elements of a slab of weights, low halves or moments; none of a moment that the rule lacks."""
            if name not in layout:
                return slab[:0]
            start = layout.entries[name].offset + start_in_span
            return slab[start : start + size]

        def scales_of(moment: MomentArrays) -> Any:
            """Return the scales of these elements of an 8-bit moment; none of another."""
            if not moment.scale_starts:
                return moment.scales[:0]
            start = moment.scale_starts[name] + start_in_span // BLOCK  # ranges and pieces begin at blocks
            return moment.scales[start : start - (-size // BLOCK)]

        start_in_grads = arrays.grad_layout.entries[name].offset + start_in_span - arrays.own_grads.start
        index_in_slab = arrays.layout.entries[name].offset + start_in_span
        # The arguments are those of `update_kernel`. The index keys the noise of stochastic rounding, which is a hash of 32 bits.
        self.kernel(
            elements_of(arrays.layout, arrays.weights), elements_of(arrays.layout, arrays.low),
            grads[start_in_grads : start_in_grads + size],
            *(elements_of(each.layout, each.values) for each in self.moments), *map(scales_of, self.moments),
            np.uint32(index_in_slab & 0xFFFFFFFF), self.span.scalars,
        )  # fmt: skip


class TableRows:
    """The update of the embedding (V, H) in one step, by row; see `engine.host.updates.TableUpdate`."""

    def __init__(self, arrays: SlabArrays, grads: TableGrads, span: UpdateSpan, record: Record, guard: Guard) -> None:
        (place,) = arrays.layout.entries.values()
        self._arrays, self._scalars, self._record, self._guard = arrays, span.scalars, record, guard
        self._num_rows, self._width = place.shape
        self._moments = arrays.moments_of(span.rule)
        self._blocks = -(-self._width // BLOCK) if self._moments[0].scale_starts else 0  # scales of a row
        self._kernel = rows_kernel(*arrays.modes(span.rule))
        self._grads = as_array(grads.grads).reshape(-1)
        self._done = np.zeros(self._num_rows, dtype=bool)
        self._grad_rows = np.arange(self._num_rows)  # for each row of the table, the row of its gradient in ``grads``
        if grads.rows is not None:
            self._grad_rows[:] = grads.rows.numel()  # a row of zeros follows the gradients of rows that were read
            self._grad_rows[grads.rows.numpy()] = np.arange(grads.rows.numel())

    def rows(self, rows: torch.Tensor) -> Sequence[Move]:
        return self._pieces(rows.numpy())

    def rest(self) -> Sequence[Move]:
        own = self._arrays.own
        return self._pieces(np.arange(own.start // self._width, min(-(-own.stop // self._width), self._num_rows)))

    def _pieces(self, rows: Any) -> Pieces:
        """Return the update of some rows in pieces."""
        height = max(1, _PIECE_ELEMENTS // self._width)  # rows of a piece

        def update(number: int) -> None:
            self._update(rows[number * height : (number + 1) * height])

        return Pieces(-(-len(rows) // height), update, self._record, self._guard)

    def _update(self, rows: Any) -> None:
        """Update rows, except those that this step has updated before."""
        rows = rows[~self._done[rows]]
        self._kernel(
            self._arrays.weights, self._arrays.low, self._grads, *(each.values for each in self._moments),
            *(each.scales for each in self._moments), self._width, self._blocks, rows, self._grad_rows[rows], self._scalars,
        )  # fmt: skip
        self._done[rows] = True
