"""The duration of a step on a machine, its bottleneck, and the number of tokens from which transfers are overlapped."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from horizon_lm.planning.arithmetic.catalog import Hardware
from horizon_lm.planning.arithmetic.interconnect import Interconnect
from horizon_lm.planning.arithmetic.plan_file import PlannedStep
from horizon_lm.planning.arithmetic.step import Step
from horizon_lm.planning.arithmetic.step_cost import StepCost, rates
from horizon_lm.schedule.ops import SOMETIMES, UPDATES, Kind, Stream
from horizon_lm.schedule.simulate import Timeline, simulate, step_seconds, without
from horizon_lm.schedule.trace import Span, busy_seconds, exposed_seconds


def staged(hardware: Hardware) -> Hardware:
    """Return the rates of a machine whose transfers are staged.

    Host copies run at half the memory bandwidth, because they read and write. Toward the device, one staging buffer is
    filled while the other is sent; toward the host, a buffer is emptied after the transfer. Both directions share the
    host memory bandwidth.
    """
    copying = hardware.host_rate / 2
    link_out = 1 / (1 / hardware.link_out + 1 / copying)
    link_in, link_both = min(hardware.link_in, copying), min(hardware.link_both, copying)
    return replace(hardware, link_in=link_in, link_out=link_out, link_both=link_both)


_MOST_TOKENS = 2**30  # returned for transfers that no number of tokens hides
_NOTABLE_SHARE = 0.05  # of a step's duration, from which its cause is its bottleneck
_STEPS = 4  # steps to simulate: after these, the duration of a step no longer changes
_CAUSES = {
    "copy_in": (Kind.STREAM_IN, Kind.FETCH, Kind.STREAM_MATRICES),
    "copy_out": (Kind.STREAM_OUT, Kind.OFFLOAD, Kind.RETURN_MATRICES),
    "gather": (Kind.GATHER, Kind.GATHER_MATRICES),
    "reduce": (Kind.REDUCE,),
    "update": UPDATES,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime(PlannedStep):
    """A simulated step. ``spans``: spans of all its operations; it starts at 0."""

    hidden_from_tokens: Mapping[str, int]
    spans: Sequence[Span]


@dataclass(frozen=True, slots=True)
class SaveTime:
    """The simulated time of writing one checkpoint while training goes on.

    Attributes:
        num_bytes: bytes of weights, low halves and moments.
        seconds: time until the checkpoint is written.
        stall_seconds: time that the steps lose, because updates wait for their units to be written.
    """

    num_bytes: int
    seconds: float
    stall_seconds: float


class Simulation:
    """Many consecutive steps on a machine.

    Args:
        step: the step.
        hardware: the machine, with the rate of its disk if checkpoints are simulated.
        computing_threads, interconnect: as in `step_cost.rates`.
    """

    def __init__(
        self, step: Step, hardware: Hardware, computing_threads: int | None = None, interconnect: Interconnect | None = None
    ) -> None:  # fmt: skip
        self._step, self._passes = step, step.passes()
        self._cost = StepCost(step, hardware, interconnect)
        self._rates = rates(hardware, computing_threads, interconnect, step.settings)

    def estimated_seconds(self) -> float:
        """Return approximately the seconds of a step, to compare settings: fewer steps are simulated than in `seconds`."""
        return step_seconds(self._passes, self._cost, self._rates, num_steps=2)

    def seconds(self) -> float:
        """Return the seconds of a step, the same as in `step_time`, without all else that is found there."""
        return step_seconds(self._passes, self._cost, self._rates, num_steps=_STEPS)

    def step_time(self) -> StepTime:
        """Return the time of one step among many, all of which are simulated."""
        step, passes, cost = self._step, self._passes, self._cost
        timeline = simulate(passes * _STEPS, cost, self._rates)
        begin, end = timeline.last_step(len(passes))
        seconds = end - begin
        spans = [span for schedule in timeline.passes for span in schedule if span.end > begin and span.start < end]
        causes = _CAUSES if step.layout.sharded else {name: _CAUSES[name] for name in ("copy_in", "copy_out", "update")}
        # The seconds that a step would be shorter if operations of these kinds took no time.
        saved = {
            name: max(0.0, seconds - step_seconds(passes, without(cost, *kinds), self._rates))
            for name, kinds in causes.items()
        }
        settings = step.settings
        return StepTime(
            seconds=seconds, tokens_per_second=step.counted_tokens / seconds,
            model_tflops=step.outline.step_flops(step.tokens) / seconds / 1e12, limited_by=_limited_by(saved, seconds),
            exposed_seconds=exposed_seconds(spans), exposed_update_seconds=saved["update"],
            busy=_utilization(timeline, begin, seconds), hidden_from_tokens=self._hidden_from_tokens(),
            run_seconds=None if settings.num_steps is None else seconds * settings.num_steps,
            spans=[Span(each.op, each.start - begin, each.end - begin, each.reached - begin) for each in spans],
        )  # fmt: skip

    def save_time(self) -> SaveTime:
        """Simulate steps with and without a checkpoint before one of them, and return what the checkpoint takes and delays."""
        passes, cost = self._passes, self._cost
        # Both are _STEPS + 2 steps: the last but one has the checkpoint, and the last one shows what that has delayed.
        with_save = simulate([*passes * _STEPS, *self._step.passes_with_save(), *passes], cost, self._rates)
        without_save = simulate(passes * (_STEPS + 2), cost, self._rates)
        saved = [span for span in with_save.spans if span.op.kind == Kind.SAVE]
        _begin, delayed = with_save.last_step(len(passes))
        _begin, undelayed = without_save.last_step(len(passes))
        return SaveTime(
            num_bytes=round(sum(cost(span.op) for span in saved)),
            seconds=max(span.end for span in saved) - min(span.start for span in saved),
            stall_seconds=max(0.0, delayed - undelayed),
        )

    def _hidden_from_tokens(self) -> dict[str, int]:
        """Return the tokens per step from which computation fully overlaps ``update``, ``copy_in`` (loads) and ``gather``, by these names.

        The time of loads and updates does not depend on the tokens. The time of computation grows with them, but less than
        proportionally while matrix products wait for weights. Inline transfers cannot be overlapped.
        """
        cost, speed, (forward_pass, backward_pass, *_) = self._cost, self._rates, self._passes
        # Updates. The forward pass overlaps them or, with `update_in_backward`, the backward pass.
        in_backward = self._step.settings.update_in_backward
        forward_seconds = partial(cost.blocks_seconds, backward=False)
        overlapping_seconds = partial(cost.blocks_seconds, backward=in_backward)
        update_bytes = sum(cost(op) for each in self._passes for op in each.ops if op.kind in UPDATES)
        overlapped = (backward_pass if in_backward else forward_pass).ops
        copy_bytes = sum(cost(op) for op in overlapped if op.kind in (Kind.STREAM_IN, Kind.STREAM_OUT))
        link = speed.link_both if in_backward and speed.link_both else speed.link_in
        # Copies of the same pass also take bandwidth of host memory. Updates end when both have moved their bytes, or sooner, if the
        # bandwidth that the copies leave suffices.
        left_bandwidth = speed.host - min(link, speed.host)
        update_seconds = update_bytes / speed.host if speed.inline else (update_bytes + copy_bytes) / speed.host
        if left_bandwidth and not speed.inline:
            update_seconds = min(update_seconds, update_bytes / left_bandwidth)
        # Loads and gathers of the blocks, which the forward pass overlaps.
        of_blocks = [op for op in forward_pass.ops if op.unit.is_block or op.unit.is_tile]
        load_bytes = sum(cost(op) for op in of_blocks if op.kind == Kind.STREAM_IN)
        gather_bytes = sum(cost(op) for op in of_blocks if op.kind == Kind.GATHER)
        found = {"update": _tokens_for(update_seconds, overlapping_seconds)}
        if speed.through_host:  # gathers cross the links to the device, like loads
            load_bytes += gather_bytes
        elif gather_bytes:
            found["gather"] = _tokens_for(gather_bytes / speed.gather, forward_seconds)
        if not speed.inline:
            found["copy_in"] = _tokens_for(load_bytes / min(speed.link_in, speed.host), forward_seconds)
        return found


def _utilization(timeline: Timeline, begin: float, seconds: float) -> dict[str, float]:
    """Return the share of a step in which each stream is busy, by its name. Updates count for the host's stream, also the one of rows.

    Streams of `SOMETIMES` are left out if no operation of the timeline runs in them.
    """
    end = begin + seconds
    in_step: dict[Stream, list[Span]] = {}
    for span in timeline.spans:
        if span.end > begin and span.start < end:
            stream = Stream.HOST if span.op.kind in UPDATES else span.op.stream
            part = replace(span, start=max(span.start, begin), end=min(span.end, end))
            in_step.setdefault(stream, []).append(part)
    used = {span.op.stream for span in timeline.spans}
    streams = [stream for stream in Stream if stream not in SOMETIMES or stream in used]
    return {str(stream): busy_seconds(in_step.get(stream, [])) / seconds for stream in streams}


def _limited_by(saved: Mapping[str, float], seconds: float) -> str:
    """Return the bottleneck of a step, given the seconds that it would be shorter without each cause."""
    cause, most = max(saved.items(), key=lambda each: each[1])
    return cause if most > _NOTABLE_SHARE * seconds else "compute"


def _tokens_for(seconds: float, computed: Callable[[float], float]) -> int:
    """Return the smallest number of tokens whose computation takes this long, by bisection to a thousandth; `_MOST_TOKENS` if none does.

    Args:
        seconds: the time to reach.
        computed: function that returns the seconds of computation for a number of tokens, and never falls.
    """
    low, high = 0.0, 1.0
    while computed(high) < seconds:
        low, high = high, 2 * high
        if high > _MOST_TOKENS:
            return _MOST_TOKENS
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if computed(middle) < seconds else (low, middle)
    return round(high)
