"""Device memory of a step: the engine's buffers exactly, the peak of temporary activations, and the course
over time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from horizon_lm.planning.device_buffers import block_bytes, device_buffers
from horizon_lm.planning.matrices import orthogonalizing_bytes
from horizon_lm.planning.outline import Footprint, Linear
from horizon_lm.planning.request import ForwardBatch
from horizon_lm.planning.residency import Working
from horizon_lm.planning.step import Step
from horizon_lm.schedule.ops import Kind, Stream
from horizon_lm.schedule.trace import Span
from horizon_lm.units import HEAD


def working(
    footprints: Sequence[Sequence[Footprint]],
    *,
    hidden: int,
    boundary: int,
    tokens: int,
    head_peak: Linear[int],
    chunk_tokens: int | None,
    first: int = 0,
) -> Working:
    """Return the bytes that computations need, excluding weights and gradients.

    Args:
        footprints: footprints of the blocks for each micro-batch, largest first.
        hidden: bytes of a block's input for the whole batch.
        boundary: bytes that a block keeps for the backward pass.
        tokens: tokens of the whole batch.
        head_peak: peak bytes of norm, head and loss, as a function of tokens.
        chunk_tokens: tokens per chunk of logits; None if Hugging Face's code computes all logits together.
        first: the first block with a gradient.
    """
    blocks = [_block_bytes(micro_batches, hidden) for micro_batches in zip(*footprints, strict=True)]
    graphs, peaks, backward_peaks = zip(*blocks, strict=True)
    return Working(
        graphs=graphs,
        peaks=peaks,
        backward_peaks=backward_peaks,
        head=_head_bytes(head_peak, hidden, tokens, chunk_tokens),
        boundary=boundary,
        first=first,
        tiled=frozenset(index for index, each in enumerate(footprints[0]) if each.experts),
    )


def _head_bytes(head_peak: Linear[int], hidden: int, tokens: int, chunk_tokens: int | None) -> int:
    """Return the bytes that norm, head and loss need. The arguments are those of `working`."""
    # Also the last block's output and, in chunks, the output's gradient and a copy of the chunk's states.
    if chunk_tokens is None:
        return head_peak.at(tokens) + hidden
    chunk = min(tokens, chunk_tokens)
    return head_peak.at(chunk) + 2 * hidden + chunk * (hidden // tokens)


def _block_bytes(micro_batches: Sequence[Footprint], hidden: int) -> tuple[int, int, int]:
    """Return the bytes of a block's graph, its peak, and the peak of its backward pass if the graph is kept."""
    # Several micro-batches are concatenated: the output of a block in the forward pass, the gradient of its input in
    # the backward pass. The output of a single micro-batch is already the next block's boundary or the head's input.
    concatenated, counted_output = (2 * hidden, 0) if len(micro_batches) > 1 else (0, hidden)
    largest, peak = micro_batches[0], _peak(micro_batches) + concatenated
    if largest.experts:  # with tiles no graph is kept
        return 0, peak, peak
    graph = sum(each.graph for each in micro_batches) - counted_output
    return graph, peak, peak - largest.graph + counted_output


def _peak(micro_batches: Sequence[Footprint]) -> int:
    """Return the peak of a block's forward and backward pass.

    With tiles, all micro-batches come as far as the experts before any goes on. The graph of a single one exists meanwhile.
    """
    largest = micro_batches[0]
    graph = largest.graph if len(micro_batches) == 1 else 0
    with_experts = graph + largest.experts if largest.experts else 0
    return max(largest.peak, with_experts) + sum(each.held for each in micro_batches)


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Device memory of a step in bytes.

    Attributes:
        buffers: the engine's buffers, by kind.
        checkpoints: activation checkpoints that stay on the device between the forward and backward pass.
        activations: peak of computations and resident graphs on top of them.
        shared: masks and rotary tables.
    """

    buffers: Mapping[str, int]
    checkpoints: int
    activations: int
    shared: int

    @property
    def total(self) -> int:
        return sum(self.buffers.values()) + self.checkpoints + self.activations + self.shared


def step_working(step: Step) -> Working:
    """Return the bytes that the computations of a step need."""
    outline, settings = step.outline, step.settings
    return working(
        [outline.footprints(rows, settings.expert_tile) for rows in settings.slices],
        hidden=step.hidden,
        boundary=step.boundary,
        tokens=step.tokens,
        head_peak=outline.head_peak["chunked" if settings.chunked_head else "whole"],
        chunk_tokens=settings.chunk_tokens,
        first=outline.first_differentiated,
    )


def device_use(step: Step) -> DeviceUse:
    """Return the device memory of a step in bytes."""
    residency = step.settings.residency
    checkpoints = step.staying * step.boundary
    in_training = step_working(step).step_peak(residency.boundaries, residency.graphs)
    in_update = max(
        (orthogonalizing_bytes(step.outline.trained.matrices_of(u.block_index)) for u in step.orthogonalized), default=0
    )
    most = max([in_training, in_update, *(_evaluation_peak(step, batch) for batch in step.settings.forwards)])
    return DeviceUse(
        buffers=device_buffers(step.outline.sizes, step.buffer_settings(), step.outline.trained),
        checkpoints=checkpoints,
        activations=most - checkpoints,
        shared=step.outline.shared.at(step.settings.rows),
    )


def _evaluation_peak(step: Step, batch: ForwardBatch) -> int:
    """Return the bytes of a batch without gradients: it keeps no boundary, and uses the micro-batches of training."""
    outline, settings = step.outline, step.settings
    relative_length = batch.length / outline.length
    # The outlined sequences that take as much as one of the batch. Eager attention materializes the scores, (T, T) per head.
    per_row = relative_length * max(1.0, relative_length) if outline.attention == "eager" else relative_length
    rows_at_once = settings.rows_at_once(batch.rows)
    tokens = batch.rows * batch.length
    hidden = tokens * outline.sizes.hidden * outline.compute_bytes
    in_block = max(kind.forward_peak.at(max(1.0, rows_at_once * per_row)) for kind in outline.kinds)
    if settings.expert_tile is not None:
        in_block += max((kind.core.held.at(batch.rows * per_row) for kind in outline.kinds if kind.core), default=0)
    head = outline.head_peak["chunked" if settings.chunked_head else "whole"]
    at_head = head.at(min(tokens, settings.chunk_tokens or tokens))
    masks = outline.shared.at(batch.rows * max(1.0, relative_length**2)) - outline.shared.at(settings.rows)
    return int(3 * hidden + max(in_block, at_head) + max(0, masks) + batch.kept_bytes)


def weights_of_blocks(step: Step) -> Sequence[int]:
    """Return the device bytes of each block's weights."""
    return block_bytes(step.outline.sizes, step.buffer_settings())


@dataclass(frozen=True, slots=True)
class Curve:
    """Memory in use at successive moments of a step; each value holds until the next moment.

    Attributes:
        seconds: time since the start of the step.
        device, host: bytes in use.
    """

    seconds: Sequence[float]
    device: Sequence[int]
    host: Sequence[int]


@dataclass(frozen=True, slots=True)
class _BlockUse:
    """The device memory of one block's computations in bytes.

    Attributes:
        forward: the activations of its forward pass.
        kept: what it keeps from there to the end of its backward pass: its boundary and its graph, if they are resident.
        backward: the activations of its recomputation and backward pass, without what is kept.
        is_tiled: its experts are computed in tiles.
    """

    forward: int
    kept: int
    backward: int
    is_tiled: bool


def _block_use(step: Step, needed: Working, index: int, footprints: Sequence[Footprint]) -> _BlockUse:
    """Return the memory of a block, given its footprints for each micro-batch."""
    residency, num_blocks = step.settings.residency, step.outline.num_blocks
    is_differentiated = index >= step.outline.first_differentiated
    has_graph = residency.keeps_graph(index, num_blocks)
    kept = step.boundary if is_differentiated and residency.keeps_boundary(index, num_blocks) else 0
    if is_differentiated and has_graph:
        kept += needed.graphs[index]
    is_tiled = index in needed.tiled
    return _BlockUse(
        forward=sum(each.held for each in footprints) if is_tiled else footprints[0].graph,
        kept=kept,
        backward=needed.backward_peaks[index] if has_graph else needed.peaks[index],
        is_tiled=is_tiled,
    )


def _block_changes(span: Span, use: _BlockUse) -> Iterator[tuple[float, int]]:
    """Yield the moments at which a computation of a block changes the memory in use, and the changes."""
    kind = span.op.kind
    # The experts' tiles are computed between two operations of the block, of which the first allocates.
    if kind == (Kind.ROUTE if use.is_tiled else Kind.FORWARD):
        yield span.start, use.forward
    if kind == Kind.FORWARD:
        yield span.end, use.kept - use.forward
    if kind == (Kind.RECOMPUTE if use.is_tiled else Kind.BACKWARD):
        yield span.start, use.backward
    if kind == Kind.BACKWARD:
        yield span.end, -use.kept - use.backward


def memory_curve(step: Step, spans: Sequence[Span], host_base: int) -> Curve:
    """Return the memory in use during a step.

    Buffers exist throughout. Activation checkpoints are added in the forward pass and freed in the backward pass;
    activations exist while they are in use. Host memory is constant: a checkpoint's host buffer is reused by the next
    step.

    Args:
        step: the step.
        spans: spans of the step, which starts at 0.
        host_base: bytes of host memory, including activation checkpoints.
    """
    needed = step_working(step)
    of_slices = [step.outline.footprints(rows, step.settings.expert_tile) for rows in step.settings.slices]
    blocks = [_block_use(step, needed, index, each) for index, each in enumerate(zip(*of_slices, strict=True))]
    changes: list[tuple[float, int]] = []
    for span in spans:
        unit = span.op.unit
        if span.op.stream != Stream.COMPUTE:
            continue
        if unit.is_block:
            changes += _block_changes(span, blocks[unit.block_index])
        elif unit == HEAD and span.end > span.start:
            changes += [(span.start, needed.head), (span.end, -needed.head)]
    changes.sort()
    use = device_use(step)
    base = sum(use.buffers.values()) + use.shared
    seconds, device = [0.0], [base]
    for moment, change in changes:
        seconds.append(moment)
        device.append(max(base, device[-1] + change))
    return Curve(seconds, device, [host_base] * len(seconds))
