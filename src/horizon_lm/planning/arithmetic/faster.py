"""Find what would make a step faster: other settings, if it waits for its optimizer or its loads, or plain training on the GPU."""

from collections.abc import Callable, Iterator
from dataclasses import replace

from horizon_lm.common.constants import DEVICE_MARGIN
from horizon_lm.common.quantities import format_bytes, format_rate
from horizon_lm.planning.arithmetic.device_memory import device_use
from horizon_lm.planning.arithmetic.host_memory import host_bytes
from horizon_lm.planning.arithmetic.request import Machine, Request
from horizon_lm.planning.arithmetic.residency import Residency
from horizon_lm.planning.arithmetic.step import Step
from horizon_lm.planning.arithmetic.step_time import StepTime
from horizon_lm.schedule.ops import CAUSE_TITLES

RateOf = Callable[[Request], float | None]
"""Return the tokens per second of a run with other settings; None if it does not fit."""

_NOTABLE_GAIN = 0.02  # share of the rate that makes a change of how a step is computed worth a remark
_NOTABLE_GAIN_OF_ROWS = 0.05  # the same for a larger batch, which changes the steps of a run
_MOST_ROWS = 64  # times those of the run; with more, it would be another run


def faster_reasons(request: Request, time: StepTime, tokens: int, rate_of: RateOf) -> Iterator[str]:
    """Yield a sentence about each change with which a run is notably faster.

    Args:
        request: settings of the run, without open moments and tiles.
        time: time of its step.
        tokens: tokens of a step, of each rank.
        rate_of: finds the tokens per second with other settings.
    """
    if time.limited_by == "update":
        yield from _lighter_moments(request, time, rate_of)
        yield from _updates_in_backward(request, time, rate_of)
    if time.limited_by != "compute":
        yield from _more_tokens(request, time, tokens, rate_of)


def _lighter_moments(request: Request, time: StepTime, rate_of: RateOf) -> Iterator[str]:
    """Yield a sentence if a step with moments in bfloat16 instead of float32 is notably shorter."""
    if request.moments != "float32":
        return
    rate = rate_of(replace(request, moments="bfloat16"))
    if rate is None or (saved := 1 - time.tokens_per_second / rate) < _NOTABLE_GAIN:
        return
    yield f"optimizer updates are not fully overlapped: moments: bfloat16 would make a step {saved:.0%} shorter"


def _updates_in_backward(request: Request, time: StepTime, rate_of: RateOf) -> Iterator[str]:
    """Yield a sentence if updates in the backward pass are possible and notably raise the rate."""
    if request.update_in_backward or request.skips_steps or not request.optimizer.updates_in_backward:
        return
    rate = rate_of(replace(request, update_in_backward=True))
    if rate is None or rate < (1 + _NOTABLE_GAIN) * time.tokens_per_second:
        return
    clipping = ", but gradients could not be clipped (max_grad_norm: 0)" if request.clips_gradients else ""
    yield f"update_in_backward: true would give {_rate_instead(rate, time)}: updates also run under the backward pass{clipping}"


def _more_tokens(request: Request, time: StepTime, tokens: int, rate_of: RateOf) -> Iterator[str]:
    """Yield a sentence about the largest useful batch that fits.

    A batch is useful up to the size with which computation hides all transfers and updates that a step waits for now.
    """
    # The causes of waiting that are not hidden now, each with the tokens from which it is.
    not_hidden = {cause: least for cause, least in time.hidden_from_tokens.items() if least > tokens}
    for times in _factors(max(not_hidden.values(), default=0), tokens):
        rate = rate_of(_with_rows(request, times))
        if rate is None:  # it does not fit
            continue
        if rate < (1 + _NOTABLE_GAIN_OF_ROWS) * time.tokens_per_second:
            return
        hidden = [CAUSE_TITLES[cause] for cause, least in not_hidden.items() if least <= times * tokens]
        overlapped = f", {' and '.join(hidden)} fully overlapped" if hidden else ""
        batch = f"per_device_train_batch_size: {request.per_device_train_batch_size * times}, {times * tokens:,} tokens a step,"
        yield f"{batch} would give {_rate_instead(rate, time)}{overlapped}; a larger batch may need another learning rate"
        return


def _factors(least: int, tokens: int) -> list[int]:
    """Return the factors from 2 to `_MOST_ROWS` by which to multiply a step's tokens, largest first: the smallest factor that makes
    ``least`` tokens or more, and the powers of two below it.
    """
    factor = -(-least // tokens)
    powers = [2**power for power in range(_MOST_ROWS.bit_length() - 1, 0, -1)]
    return [factor] * (1 < factor <= _MOST_ROWS) + [power for power in powers if power < factor]


def _with_rows(request: Request, times: int) -> Request:
    """Return a request whose steps have this many times the rows."""
    typical = request.tokens_per_step
    return replace(
        request,
        per_device_train_batch_size=request.per_device_train_batch_size * times,
        tokens_per_step=None if typical is None else typical * times,
    )


def _rate_instead(rate: float, time: StepTime) -> str:
    return f"{format_rate(rate)} tokens/s instead of {format_rate(time.tokens_per_second)}"


# Plain training, for which the whole model and its optimizer are on the GPU


_READ_AND_WRITTEN = ("weights", "low_halves", "moments")  # by an update


def plain_reasons(step: Step, machine: Machine, time: StepTime | None) -> list[str]:
    """Return a sentence with the bytes and the time of plain training; none if it does not fit the GPU, or if that is unknown."""
    settings = step.settings
    if machine.on_host or not machine.device_limits or settings.num_ranks > 1 or step.outline.unknown:
        return []
    if step.outline.trains_decoded:  # plain training decodes the base, whose size this plan does not have
        return []
    # Plain training has weights, gradients and moments on the GPU, not in host memory, and all activation checkpoints, too.
    state = {kind: num_bytes for kind, num_bytes in host_bytes(step).items() if kind != "boundaries"}
    use = device_use(replace(step, settings=settings.keeping(Residency(step.outline.num_blocks))))
    available = min(limit.bytes for limit in machine.device_limits)
    needed = sum(state.values()) + use.checkpoints + use.activations + use.shared + machine.device_context_bytes
    needed += int(available * DEVICE_MARGIN)
    if needed > available:
        return []
    sentence = (
        f"this model also fits the GPU as a whole: plain training with activation checkpointing takes about {format_bytes(needed)} of "
        f"{format_bytes(available)} there"
    )
    if time is None or machine.hardware is None:
        return [sentence]
    moved = sum(num_bytes * (2 if kind in _READ_AND_WRITTEN else 1) for kind, num_bytes in state.items())
    seconds = time.busy["compute"] * time.seconds + moved / machine.hardware.device_bandwidth
    shorter = 1 - seconds / time.seconds
    gain = f"a step about {shorter:.0%} shorter" if shorter >= 0.01 else "a step about as long"
    return [f"{sentence}, and {gain}"]
