"""Prove that a schedule is correct for a sequence of passes, and that none of its waits is superfluous.

A sequence is unrolled into one list of operations. Vector clocks over the streams show which operations precede each
operation; any two accesses to a buffer, at least one of them a write, must be ordered. The contents of buffers are
tracked in program order: a computation must find its own unit in the slot that it reads, or a tile that has completed it.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from horizon_lm.common.units import EMBED, HEAD, OUTER, Unit, block
from horizon_lm.schedule import between, build
from horizon_lm.schedule.ops import After, Buf, Buffer, Op, Schedule, Stream, Wait

# Maximum number of buffers of each kind, which must not depend on the number of blocks.
# HOST_LANDING: two for blocks, then HEAD, EMBED and OUTER.
SLOTS = {
    Buf.WEIGHTS: 2,
    Buf.TILE: 2,
    Buf.TILE_GRADS: 2,
    Buf.TILE_PACKED: 2,
    Buf.PACKED: 2,
    Buf.GRADS: 2,
    Buf.RING: 2,
    Buf.HOST_LANDING: 5,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake in operation ``op`` of pass number ``pass_index`` of a sequence."""

    pass_index: int
    op: Op
    text: str

    def __str__(self) -> str:
        return f"pass {self.pass_index}, {self.op}: {self.text}"


_STREAMS = {stream: number for number, stream in enumerate(Stream)}


@dataclass(slots=True)
class _Node:
    """An operation of the unrolled sequence. ``clock``: for each stream, the last operation that precedes it, or -1."""

    pass_index: int
    op: Op
    clock: list[int]


class _Unrolled:
    """Operations of a sequence in program order, with the accesses needed to resolve waits and find conflicts."""

    def __init__(self) -> None:
        self.nodes: list[_Node] = []
        self.problems: list[Problem] = []
        self._last_on_stream = [-1] * len(_STREAMS)
        self._writer: dict[Buffer, int] = {}
        self._readers: dict[Buffer, dict[Stream, int]] = {}
        self._content: dict[Buffer, Unit] = {}
        self._last_use: dict[Wait, int] = {}

    def add_pass(self, pass_index: int, schedule: Schedule, scope: int) -> None:
        """Append a pass. ``scope``: number of the forward pass that its boundaries belong to."""
        first = len(self.nodes)
        earlier = dict(self._last_use)
        for position, op in enumerate(schedule.ops):
            waits = []
            for wait in op.waits:
                if isinstance(wait, After) and wait.index >= position:
                    self._report(pass_index, op, f"waits for {wait}, which is issued after it")
                elif isinstance(wait, After):
                    waits.append(first + wait.index)
                else:
                    waits.extend([earlier[wait]] if wait in earlier else [])
            self._add(pass_index, _scope_boundaries(op, scope), waits)
            for use in schedule.uses[position]:
                self._last_use[use] = first + position

    def _add(self, pass_index: int, op: Op, waits: list[int]) -> None:
        index, stream = len(self.nodes), _STREAMS[op.stream]
        clock = [-1] * len(_STREAMS)
        for before in {*waits, self._last_on_stream[stream]} - {-1}:
            clock = list(map(max, clock, self.nodes[before].clock))
        self.nodes.append(_Node(pass_index, op, clock))

        # A read must follow the last write; a write must follow the last write and all later reads.
        for buffer in op.reads:
            self._require_order(index, buffer, self._writer.get(buffer))
            self._check_content(pass_index, op, buffer)
        for buffer in op.writes:
            self._require_order(index, buffer, self._writer.get(buffer))
            for reader in self._readers.get(buffer, {}).values():
                self._require_order(index, buffer, reader)

        for buffer in op.reads:
            self._readers.setdefault(buffer, {})[op.stream] = index
        for buffer in op.writes:
            self._writer[buffer], self._readers[buffer] = index, {}
            self._content[buffer] = op.unit
        clock[stream] = index
        self._last_on_stream[stream] = index

    def _require_order(self, index: int, buffer: Buffer, other: int | None) -> None:
        if other is None or other == index:
            return
        node, before = self.nodes[index], self.nodes[other]
        if before.op.stream != node.op.stream and node.clock[_STREAMS[before.op.stream]] < other:
            self._report(
                node.pass_index, node.op, f"races with {before.op} of pass {before.pass_index} for {buffer}"
            )  # fmt: skip

    def _check_content(self, pass_index: int, op: Op, buffer: Buffer) -> None:
        if buffer.kind not in SLOTS or not isinstance(buffer.index, int):
            return
        found = self._content.get(buffer)
        if found is None or op.unit not in (found, found.owner):
            self._report(pass_index, op, f"finds {found or 'nothing'} in {buffer}")

    def _report(self, pass_index: int, op: Op, text: str) -> None:
        self.problems.append(Problem(pass_index, op, text))


def check(sequence: Sequence[Schedule]) -> list[Problem]:
    """Return all mistakes in passes that run one after the other; empty if they are correct."""
    return list(mistakes(sequence))


def mistakes(sequence: Sequence[Schedule]) -> Iterator[Problem]:
    """Yield the mistakes in passes that run one after the other, pass by pass.

    Boundaries of different forward passes are different buffers. A backward pass is assumed to belong to the last
    pending forward pass, which requires more order than an earlier one.
    """
    unrolled = _Unrolled()
    pending: list[int] = []  # forward passes that wait for their backward pass
    for index, schedule in enumerate(sequence):
        if schedule.name == "forward" and schedule.keeps:
            pending.append(index)
            scope = index
        else:
            scope = pending.pop() if schedule.name == "backward" and pending else index
        known = len(unrolled.problems)
        unrolled.add_pass(index, schedule, scope)
        _check_bounded(unrolled, index, schedule)
        yield from unrolled.problems[known:]


def is_wrong(passes: "Passes", changed: Schedule) -> bool:
    """Return whether a legal sequence of these passes that has the changed one is wrong."""
    return any(next(mistakes(each), None) is not None for each in sequences(passes).values() if changed in each)


def _scope_boundaries(op: Op, scope: int) -> Op:
    def rename(buffers: tuple[Buffer, ...]) -> tuple[Buffer, ...]:
        return tuple(
            Buffer(b.kind, f"{b.index}@{scope}") if b.kind == Buf.HOST_BOUNDARY else b for b in buffers
        )  # fmt: skip

    if all(buffer.kind != Buf.HOST_BOUNDARY for buffer in op.reads + op.writes):
        return op
    return replace(op, reads=rename(op.reads), writes=rename(op.writes))


def _check_bounded(unrolled: _Unrolled, pass_index: int, schedule: Schedule) -> None:
    for kind, most in SLOTS.items():
        used = {b for op in schedule.ops for b in op.reads + op.writes if b.kind == kind}
        if len(used) > most:
            unrolled._report(pass_index, schedule.ops[-1], f"{len(used)} buffers of kind {kind}, at most {most}")


def without_wait(schedule: Schedule, op_index: int, wait: Wait) -> Schedule:
    """Return the pass with one wait removed, for negative controls."""
    ops = list(schedule.ops)
    ops[op_index] = replace(ops[op_index], waits=tuple(w for w in ops[op_index].waits if w != wait))
    return replace(schedule, ops=tuple(ops))


def each_wait(schedule: Schedule) -> Iterator[tuple[int, Wait]]:
    """Yield every wait of a pass with the position of its operation."""
    for index, op in enumerate(schedule.ops):
        for wait in op.waits:
            yield index, wait


class Passes(NamedTuple):
    """The passes of one model, from which legal sequences are built.

    Attributes:
        first: training forward pass right after an update, before the update of the table.
        again: training forward pass without an update since the last forward pass.
        second: like ``again``, while a pending forward pass occupies the head's gradient buffer.
        evaluating: forward pass that keeps nothing, right after an update.
        evaluation: forward pass that keeps nothing, without an update since the last forward pass.
        routing: like ``evaluation``, for a few tokens: of experts, only those that these are routed to are streamed.
        backward: backward pass of `first` and `again`.
        recomputing: backward pass that computes the head's gradients, for `second` or a forward pass that lost the
            buffer.
        update: the optimizer's pass; None if units are updated in the backward pass.
        save: writes a checkpoint right after an update, without the table if that is not updated yet.
        save_table: adds the table after the next forward pass; None if `save` has written it.
    """

    first: Schedule
    again: Schedule
    second: Schedule
    evaluating: Schedule
    evaluation: Schedule
    routing: Schedule
    backward: Schedule
    recomputing: Schedule
    update: Schedule | None
    save: Schedule
    save_table: Schedule | None


def sequences(passes: Passes) -> dict[str, list[Schedule]]:
    """Return legal sequences of passes that together contain every hazard."""
    first, again, second, evaluating, evaluation, routing, backward, recomputing, update, save, save_table = passes
    saving = [save, first, *([] if save_table is None else [save_table]), backward]
    if update is None:  # only one backward pass per step, because a second would see weights that the first has updated
        step = [first, backward]
        return {
            "steps": step * 3,
            "evaluation between": [first, evaluation, backward] * 2 + step,
            "evaluation first": [*step, evaluating, again, backward, evaluating, evaluation, again, backward, *step],
            "abandoned forward": [first, again, backward, *step],
            "abandoned twice": [first, again, again, backward, first, again, backward],
            "two forward passes, last one abandoned": [first, second, backward] * 3,
            "two forward passes, first one abandoned": [first, second, recomputing] * 3,
            "saved": [*step, *saving * 2, *step],
            "few tokens between": [first, routing, routing, backward, evaluating, routing, again, backward],
        }
    step = [first, backward, update]
    return {
        "steps": step * 3,
        "accumulation": [first, backward, again, backward, again, backward, update] * 2,
        "two forward passes, last one first": [first, second, recomputing, recomputing, update] * 2,
        "two forward passes, first one first": [first, second, backward, recomputing, update] * 2,
        "evaluation between": [first, evaluation, backward, evaluation, update] * 2,
        "evaluation before update": [first, backward, evaluation, evaluation, update] * 2,
        "evaluation first": [
            *step,
            evaluating,
            again,
            backward,
            evaluation,
            update,
            evaluating,
            again,
            backward,
            update,
        ],
        "abandoned forward": [first, again, backward, again, update, *step],
        "abandoned twice": [first, again, again, backward, update, *step],
        "evaluation after update": [*step, first, evaluation, evaluation],
        "saved": [*step, *[*saving, update] * 2, first],
        "few tokens between": [first, routing, backward, routing, routing, evaluation, update] * 2,
    }


def superfluous_waits(passes: Passes) -> list[tuple[str, Op, Wait]]:
    """Return the waits inside a pass whose removal no legal sequence detects, each with the name of its pass."""
    found: list[tuple[str, Op, Wait]] = []
    for name, schedule in passes._asdict().items():
        if schedule is None:
            continue
        for op_index, wait in each_wait(schedule):
            if not isinstance(wait, After):
                continue
            broken = without_wait(schedule, op_index, wait)
            changed = Passes(*(broken if p == schedule else p for p in passes))  # type: ignore[arg-type]
            if not is_wrong(changed, broken):
                found.append((name, schedule.ops[op_index], wait))
    return found


def passes(
    layout: build.Layout, head_grads: bool, first_trained: int = 0, outer: bool = True, orthogonalized: bool = False
) -> Passes:
    kept = range(first_trained, layout.num_blocks)
    trained = [*map(block, kept), HEAD] + ([EMBED, *([OUTER] if outer else [])] if first_trained == 0 else [])
    return passes_of(layout, head_grads, kept, trained, orthogonalized)


def passes_of(
    layout: build.Layout, head_grads: bool, kept: Sequence[int], trained: Collection[str], orthogonalized: bool = False
) -> Passes:
    updated = [u for u in (OUTER, *map(block, kept), HEAD) if u in trained and not (layout.tied and u == HEAD)]
    on_device = [unit for unit in updated if unit.is_block and orthogonalized]
    table_update = EMBED in trained or (layout.tied and HEAD in trained)
    saved = [EMBED, *map(block, range(layout.num_blocks)), *([] if layout.tied else [HEAD]), OUTER]
    saved = [unit for unit in saved if unit in trained] if layout.adapters else saved
    streamed = [u for u in range(layout.num_blocks) if not layout.is_resident(u)]
    fresh = {"table_update": table_update, "blocks_changed": any(unit.is_block for unit in trained)}
    return Passes(
        first=build.forward(layout, keeps=kept, **fresh, head_grads=head_grads),
        again=build.forward(layout, keeps=kept, changed=False, head_grads=head_grads),
        second=build.forward(layout, keeps=kept, changed=False),
        evaluating=build.forward(layout, **fresh),
        evaluation=build.forward(layout, changed=False),
        routing=build.forward(layout, changed=False, routed=[] if layout.sharded else streamed),
        backward=build.backward(layout, order=[EMBED, *map(block, kept)], trainable=trained, head_grads=head_grads),
        recomputing=build.backward(layout, order=[EMBED, *map(block, kept)], trainable=trained),
        update=None if layout.update_in_backward else between.update(layout, updated, on_device),
        save=between.save(layout, [unit for unit in saved if unit != EMBED or not table_update]),
        save_table=between.save_table(layout) if table_update else None,
    )
