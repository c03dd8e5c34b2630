"""Bytes on the device and in host memory over the course of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from horizon_lm.plan.device import device_use, step_working
from horizon_lm.plan.step import Step
from horizon_lm.schedule.ops import HEAD, Kind, Stream
from horizon_lm.schedule.trace import Span


@dataclass(frozen=True, slots=True)
class Curve:
    """Bytes at moments of a step, in order; each holds until the next one.

    Attributes:
        seconds: since the step began.
        device, host: bytes.
    """

    seconds: Sequence[float]
    device: Sequence[int]
    host: Sequence[int]


def memory_curve(step: Step, spans: Sequence[Span], host_base: int) -> Curve:
    """What a step holds while its operations run.

    Buffers are there all the time. Boundaries come with the forward and go with the backward; what computations need is
    there while they run. In host memory a boundary's buffer is kept for the next step.

    Args:
        spans: of the step, from its begin at 0.
        host_base: bytes in host memory that are always there, boundaries included.
    """
    changes: list[tuple[float, int]] = []
    needed, residency = step_working(step), step.settings.residency
    num_blocks, first = step.outline.num_blocks, step.outline.first_differentiated
    of_slice = step.outline.footprints(step.settings.slices[0])
    for span in spans:
        if span.op.stream != Stream.COMPUTE or span.end <= span.start:
            continue
        if span.op.unit == HEAD:
            changes += [(span.start, needed.head), (span.end, -needed.head)]
        if not span.op.unit.startswith("block"):
            continue
        index = int(span.op.unit.removeprefix("block"))
        stays = step.boundary if index >= max(first, num_blocks - residency.boundaries) else 0
        graph = needed.graphs[index]
        stays += graph if index >= max(first, num_blocks - residency.graphs) else 0
        if span.op.kind == Kind.FORWARD:
            changes += [(span.start, of_slice[index].graph), (span.end, stays - of_slice[index].graph)]
        if span.op.kind == Kind.BACKWARD:
            has_graph = index >= num_blocks - residency.graphs
            peak = needed.besides[index] if has_graph else needed.peaks[index]
            changes += [(span.start, peak), (span.end, -stays - peak)]
    changes.sort()
    use = device_use(step)
    base = sum(use.buffers.values()) + use.shared
    seconds, device = [0.0], [base]
    for at, change in changes:
        seconds.append(at)
        device.append(max(base, device[-1] + change))
    return Curve(seconds, device, [host_base] * len(seconds))
