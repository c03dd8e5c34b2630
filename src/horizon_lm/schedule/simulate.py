"""Simulate the duration of a sequence of passes on given hardware.

This is a fluid model, advanced from event to event. Each operation runs on its stream in list order once its waits are
over. Computations take fixed seconds. Transfers run at the link's rate and take their bytes from host memory bandwidth;
updates share the rest. All ranks do the same at the same time, so one of them is simulated with its share of the machine. If the device is the host, transfers run in the computing thread, and updates and
computation slow each other down. Nothing else takes time: latencies, the issuing thread and caches are not modeled.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from horizon_lm.schedule.ops import UPDATES, After, Kind, Op, Schedule, ScheduleError, Stream, Wait
from horizon_lm.schedule.trace import Span

Cost = Callable[[Op], float]
"""Seconds of a computation, link bytes of a transfer, bytes that a rank receives in a collective, host bytes (read and written) of an
update, or bytes of a save."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates in bytes per second, all positive.

    Attributes:
        link_in, link_out: rate of the link from host to device, and back.
        host: rate of host memory, reads and writes together.
        link_both: rate of both directions of the link together; None if each direction keeps its full rate.
        inline: transfers run in the computing thread.
        compute_share: fraction of its speed that computation keeps during an update.
        update_share: fraction of the host memory rate available to updates during computation.
        disk: rate at which checkpoints are written.
        gather, reduce: rates at which this rank receives the bytes of a collective.
        through_host: these bytes also cross the link, in both directions, and host memory.
    """

    link_in: float
    link_out: float
    host: float
    link_both: float | None = None
    inline: bool = False
    compute_share: float = 1.0
    update_share: float = 1.0
    disk: float = float("inf")
    gather: float = float("inf")
    reduce: float = float("inf")
    through_host: bool = False

    def lane(self, op: Op) -> Stream:
        """Return the lane of an operation. Operations in one lane run one after the other."""
        return Stream.COMPUTE if self.inline and op.stream not in (Stream.HOST, Stream.DISK) else op.stream


@dataclass(frozen=True, slots=True)
class Timeline:
    """Spans of a simulated sequence of passes, in seconds from its start: for each pass, one span per operation."""

    passes: tuple[tuple[Span, ...], ...]

    @property
    def spans(self) -> list[Span]:
        """All spans, ordered by their ends as in a `Trace`."""
        return sorted((span for schedule in self.passes for span in schedule), key=lambda span: span.end)

    def last_step(self, num_passes: int) -> tuple[float, float]:
        """Return the ends of the computations of the last two steps, in seconds. A step has ``num_passes`` passes."""
        before, last = self.passes[-2 * num_passes : -num_passes], self.passes[-num_passes:]
        begin, end = (
            max(span.end for spans in step for span in spans if span.op.stream == Stream.COMPUTE)
            for step in (before, last)
        )
        return begin, end


def simulate(sequence: Sequence[Schedule], cost: Cost, rates: Rates) -> Timeline:
    """Return the timeline of passes that are all issued at the start, one after the other.

    Raises:
        ScheduleError: operations wait for each other.
    """
    ops = [op for schedule in sequence for op in schedule.ops]
    start, end = _starts_and_ends(ops, _positions_of_waits(sequence), cost, rates)
    reached = dict.fromkeys(Stream, 0.0)
    spans = []
    for i, op in enumerate(ops):
        spans.append(Span(op, start[i], end[i], reached[op.stream]))
        reached[op.stream] = end[i]
    ordered = iter(spans)
    return Timeline(tuple(tuple(next(ordered) for _ in schedule.ops) for schedule in sequence))


def _starts_and_ends(
    ops: Sequence[Op], waits: Sequence[Sequence[int]], cost: Cost, rates: Rates
) -> tuple[dict[int, float], dict[int, float]]:
    """Return the start and the end of each operation in seconds, by its position in ``ops``. ``waits`` has, for each operation, the
    positions of the operations that it waits for. Time advances from event to event.
    """
    queues = {lane: deque(i for i, op in enumerate(ops) if rates.lane(op) == lane) for lane in Stream}
    left: dict[int, float] = {}  # remaining cost of the running operations, by position
    start: dict[int, float] = {}
    end: dict[int, float] = {}
    known_speeds: dict[tuple[tuple[Stream, Kind], ...], list[float]] = {}  # the speeds of operations that run together
    now = 0.0
    while len(end) < len(ops):
        for next_op in (queue[0] for queue in queues.values() if queue):
            if next_op not in left and all(other in end for other in waits[next_op]):
                left[next_op], start[next_op] = cost(ops[next_op]), now
        if not left:
            stuck = ", ".join(f"{ops[queue[0]]} on {stream}" for stream, queue in queues.items() if queue)
            raise ScheduleError(f"deadlock: no operation runs; waiting: {stuck}")
        running = tuple((ops[i].stream, ops[i].kind) for i in left)
        if running not in known_speeds:
            known_speeds[running] = _speeds([ops[i] for i in left], rates)
        speeds = known_speeds[running]
        # Speeds change only when an operation starts or ends, so advance to the next end.
        seconds = {i: _seconds_left(left[i], speed) for i, speed in zip(left, speeds, strict=True)}
        elapsed = min(seconds.values())
        now += elapsed
        for i, speed in zip(list(left), speeds, strict=True):
            left[i] -= speed * elapsed
            if seconds[i] <= elapsed:
                end[i] = now
                del left[i]
                queues[rates.lane(ops[i])].popleft()
    return start, end


def _positions_of_waits(sequence: Sequence[Schedule]) -> list[list[int]]:
    """Return, for each operation of the sequence, the positions of the operations that it waits for."""
    resolved: list[list[int]] = []
    last_use: dict[Wait, int] = {}
    for schedule in sequence:
        first = len(resolved)
        for op in schedule.ops:
            found = [first + w.index if isinstance(w, After) else last_use.get(w) for w in op.waits]
            resolved.append([index for index in found if index is not None])
        # Only after the whole pass, because a `LastUse` is a use in an earlier pass.
        last_use.update((use, first + i) for i, found in enumerate(schedule.uses) for use in found)
    return resolved


def step_seconds(step: Sequence[Schedule], cost: Cost, rates: Rates, num_steps: int = 4) -> float:
    """Return the seconds of one step among many, between the last computations of the last two steps.

    Steps overlap, so the first steps differ from later ones; after a few steps the timeline repeats.
    """
    begin, end = simulate(list(step) * num_steps, cost, rates).last_step(len(step))
    return end - begin


def without(cost: Cost, *kinds: Kind) -> Cost:
    """Return the same costs, but 0 for operations of these kinds, to find the time that they add to a step."""
    return lambda op: 0.0 if op.kind in kinds else cost(op)


def _speeds(running: Sequence[Op], rates: Rates) -> list[float]:
    """Return the speed of each running operation: seconds of computation per second, or bytes per second.

    First each stream gets its share of its link. Then all transfers are slowed down alike if links or host memory cannot keep up, and
    updates divide what is left of the rate of host memory.
    """
    collectives = {Kind.GATHER: rates.gather, Kind.GATHER_MATRICES: rates.gather, Kind.REDUCE: rates.reduce}
    transfers = [op for op in running if op.stream in (Stream.COPY_IN, Stream.COPY_OUT) and op.kind not in UPDATES]
    crossing = [op for op in running if rates.through_host and op.kind in collectives]
    # A direction of the link is divided equally between those that use it.
    num_in = sum(op.stream == Stream.COPY_IN for op in transfers) + len(crossing)
    num_out = sum(op.stream == Stream.COPY_OUT for op in transfers) + len(crossing)
    links = {Stream.COPY_IN: rates.link_in / max(1, num_in), Stream.COPY_OUT: rates.link_out / max(1, num_out)}
    if crossing:
        collectives = {kind: min(rate, *links.values()) for kind, rate in collectives.items()}
    # What would cross the link if nothing else limited it. A collective through the host crosses it in both directions.
    wanted = sum(links[op.stream] for op in transfers) + 2 * sum(collectives[op.kind] for op in crossing)
    # Directions may share a link, and a link may be faster than the memory behind it.
    link = rates.link_both if num_in and num_out and rates.link_both is not None else wanted
    share = min(1.0, link / wanted, rates.host / wanted) if wanted else 1.0
    num_updates = sum(op.kind in UPDATES for op in running)
    computes = any(op.stream == Stream.COMPUTE for op in running)
    for_updates = (rates.host - wanted * share) * (rates.update_share if computes else 1.0)

    def speed(op: Op) -> float:
        """Return how much of an operation's cost is done in a second."""
        if op.stream == Stream.COMPUTE:
            return rates.compute_share if num_updates else 1.0
        if op.stream == Stream.DISK:
            return rates.disk
        if op.kind in UPDATES:
            return max(0.0, for_updates) / num_updates
        if op.kind in collectives:
            return collectives[op.kind] * (share if rates.through_host else 1.0)
        return links[op.stream] * share

    return [speed(op) for op in running]


def _seconds_left(amount: float, speed: float) -> float:
    if amount <= 0:
        return 0.0
    return amount / speed if speed else float("inf")
