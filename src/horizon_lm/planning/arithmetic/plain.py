"""Compare a step with plain training, for which the whole model and its optimizer are on the GPU."""

from dataclasses import replace

from horizon_lm.common.constants import DEVICE_MARGIN
from horizon_lm.common.quantities import format_bytes
from horizon_lm.planning.arithmetic.device_memory import device_use
from horizon_lm.planning.arithmetic.host_memory import host_bytes
from horizon_lm.planning.arithmetic.request import Machine
from horizon_lm.planning.arithmetic.residency import Residency
from horizon_lm.planning.arithmetic.step import Step
from horizon_lm.planning.arithmetic.step_time import StepTime

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
