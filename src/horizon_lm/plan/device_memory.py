"""Device bytes of a step: the engine's buffers exactly, the temporary needs of computations, and their course over time."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from horizon_lm.plan.memory import device_buffers, slab_elements
from horizon_lm.plan.outline import Footprint, Linear
from horizon_lm.plan.request import ForwardBatch
from horizon_lm.plan.residency import Working
from horizon_lm.plan.step import Step
from horizon_lm.schedule.ops import HEAD, Kind, Stream
from horizon_lm.schedule.trace import Span


def working(
    footprints: Sequence[Sequence[Footprint]],
    *,
    boundary: int,
    tokens: int,
    head_peak: Linear[int],
    head_chunk_tokens: int | None,
    first: int = 0,
) -> Working:
    """What computations need, weights and gradients not counted.

    Args:
        footprints: of each micro-batch, the largest first, in each block.
        boundary: bytes of a block's input, for the whole batch.
        tokens: of the whole batch.
        head_peak: bytes that norm, head and loss hold at once, by tokens.
        head_chunk_tokens: tokens whose logits exist at once; None for all, in Hugging Face's own head and loss.
        first: the first block that a gradient passes through.
    """
    # Beside what it holds itself there are the last block's output and, in chunks, its gradient and the chunk's own copy.
    at_once = tokens if head_chunk_tokens is None else min(tokens, head_chunk_tokens)
    hidden = boundary if head_chunk_tokens is None else 2 * boundary + at_once * (boundary // tokens)
    # Several micro-batches are put together: a block's output when it is computed, its input's gradient when it is
    # differentiated. The output of a single one is the next block's boundary, or what the head is given.
    together, output = (2 * boundary, 0) if len(footprints) > 1 else (0, boundary)
    graphs = [sum(each.graph for each in of_block) for of_block in zip(*footprints, strict=True)]
    return Working(
        graphs=[graph - output for graph in graphs],
        peaks=[each.peak + together for each in footprints[0]],
        besides=[each.peak - each.graph + together + output for each in footprints[0]],
        head=head_peak.at(at_once) + hidden,
        boundary=boundary,
        first=first,
    )


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What a step takes on the device.

    Attributes:
        buffers: of the engine, by kind.
        kept: boundaries that stay on the device between forward and backward.
        for_a_while: the most that computations, and kept graphs, need beside them.
        shared: masks and rotary tables.
    """

    buffers: Mapping[str, int]
    kept: int
    for_a_while: int
    shared: int

    @property
    def total(self) -> int:
        return sum(self.buffers.values()) + self.kept + self.for_a_while + self.shared


def step_working(step: Step) -> Working:
    """`working` of a step."""
    outline, settings = step.outline, step.settings
    return working(
        [outline.footprints(rows) for rows in settings.slices],
        boundary=step.boundary,
        tokens=step.tokens,
        head_peak=outline.head_peak["chunked" if settings.chunked_head else "whole"],
        head_chunk_tokens=settings.head_chunk_tokens if settings.chunked_head else None,
        first=outline.first_differentiated,
    )


def device_use(step: Step) -> DeviceUse:
    """What a step takes on the device."""
    residency = step.settings.residency
    kept = step.staying * step.boundary
    in_training = step_working(step).most(residency.boundaries, residency.graphs)
    most = max([in_training, *(_forward(step, batch) for batch in step.settings.forwards)])
    return DeviceUse(
        buffers=device_buffers(step.outline.sizes, step.buffer_settings(), step.outline.trained),
        kept=kept,
        for_a_while=most - kept,
        shared=step.outline.shared.at(step.settings.rows),
    )


def _forward(step: Step, batch: ForwardBatch) -> int:
    """What a batch without gradients needs: no boundary is kept, and as many rows are there at once as in training."""
    outline, settings = step.outline, step.settings
    share = batch.length / outline.length  # of a row that was outlined
    # Scores grow with the square of the length where they are held.
    in_rows = share * max(1.0, share) if outline.attention == "eager" else share
    at_once = min(batch.rows, settings.micro_batch or batch.rows)
    tokens = batch.rows * batch.length
    hidden = tokens * outline.sizes.hidden * outline.compute_bytes
    in_block = max(kind.forward_peak.at(max(1.0, at_once * in_rows)) for kind in outline.kinds)
    head = outline.head_peak["chunked" if settings.chunked_head else "whole"]
    at_head = head.at(min(tokens, settings.head_chunk_tokens) if settings.chunked_head else tokens)
    masks = outline.shared.at(batch.rows * max(1.0, share**2)) - outline.shared.at(settings.rows)
    return int(3 * hidden + max(in_block, at_head) + max(0, masks) + batch.kept_bytes)


def weights_of_blocks(step: Step) -> Sequence[int]:
    """Bytes of each block's weights on the device."""
    return [slab_elements(tensors) * step.outline.compute_bytes for tensors in step.outline.sizes.blocks]


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
