"""Device memory of a step: the engine's buffers exactly, the peak of temporary activations, and the course
over time.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from horizon_lm.common.units import HEAD
from horizon_lm.memory.layout.buffers import buffer_bytes
from horizon_lm.planning.arithmetic.matrices import orthogonalizing_bytes
from horizon_lm.planning.arithmetic.outline import Footprint, Linear
from horizon_lm.planning.arithmetic.plan_file import PlannedMemory
from horizon_lm.planning.arithmetic.request import ForwardBatch
from horizon_lm.planning.arithmetic.residency import ActivationMemory
from horizon_lm.planning.arithmetic.step import Step
from horizon_lm.schedule.ops import Kind, Stream
from horizon_lm.schedule.trace import Span


def activation_memory(
    footprints: Sequence[Sequence[Footprint]], *, hidden: Sequence[int], boundaries: Sequence[int], tokens: int,
    head_peak: Linear[int], chunk_tokens: int | None, differentiated: Collection[int], towers: int = 0, around_towers: int = 0,
) -> ActivationMemory:  # fmt: skip
    """Return the bytes that computations need, excluding weights and gradients.

    Args:
        footprints: footprints of each block for its micro-batches, largest first.
        hidden: bytes of each block's input for the whole batch; the last one has the size of the head's input.
        boundaries: bytes that each block keeps for the backward pass.
        tokens: tokens of the whole batch.
        head_peak: peak bytes of norm, head and loss, as a function of tokens.
        chunk_tokens: tokens per chunk of logits; None if Hugging Face's code computes all logits together.
        differentiated: the blocks with a gradient.
        towers, around_towers: as in `ActivationMemory`.
    """
    blocks = [
        _block_bytes(micro_batches, num_bytes) for micro_batches, num_bytes in zip(footprints, hidden, strict=True)
    ]
    graphs, peaks, backward_peaks = zip(*blocks, strict=True)
    return ActivationMemory(
        graphs=graphs, peaks=peaks, backward_peaks=backward_peaks, boundaries=boundaries,
        differentiated=frozenset(differentiated), head=_head_bytes(head_peak, hidden[-1], tokens, chunk_tokens),
        tiled=frozenset(index for index, (largest, *_) in enumerate(footprints) if largest.experts), towers=towers,
        around_towers=around_towers,
    )  # fmt: skip


def _head_bytes(head_peak: Linear[int], hidden: int, tokens: int, chunk_tokens: int | None) -> int:
    """Return the bytes that norm, head and loss need. The arguments are those of `activation_memory`."""
    # Beside `head_peak`: the last block's output and, in chunks, the gradient of that output and a copy of the chunk's hidden states.
    if chunk_tokens is None:
        return head_peak.at(tokens) + hidden
    chunk = min(tokens, chunk_tokens)
    return head_peak.at(chunk) + 2 * hidden + chunk * (hidden // tokens)


def _block_bytes(micro_batches: Sequence[Footprint], hidden: int) -> tuple[int, int, int]:
    """Return three numbers of bytes: a block's graph, the peak of its forward and backward pass, and the peak of its backward pass in
    addition to a kept graph.

    Args:
        micro_batches: the footprints of its micro-batches, largest first.
        hidden: bytes of a block's input for the whole batch.
    """
    if len(micro_batches) > 1:
        # Micro-batches are concatenated: the output of a block in the forward pass, the gradient of its input in the backward pass.
        concatenated, counted_output = 2 * hidden, 0
    else:
        # The output is counted elsewhere: it is the next block's boundary, or the head's input.
        concatenated, counted_output = 0, hidden
    largest = micro_batches[0]
    peak = _peak(micro_batches) + concatenated + largest.casts
    if largest.experts:  # with tiles no graph is kept
        return 0, peak, peak
    graph = sum(each.graph for each in micro_batches) - counted_output
    # A kept graph has the weights for the gradients of inputs, and the backward pass casts all of them again.
    return graph + largest.casts // 2, peak, peak - largest.graph + counted_output


def _peak(micro_batches: Sequence[Footprint]) -> int:
    """Return the peak of a block's forward and backward pass, for micro-batches from the largest on.

    With tiles, all micro-batches are computed up to their experts before the first tile, and each holds ``held`` bytes meanwhile. A single
    micro-batch also keeps its graph; several are computed again.
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
        activations: peak of computations and resident graphs, beside these checkpoints.
        shared: masks and rotary tables.
        images: pixels and features of images, masks and rotary tables of towers.
    """

    buffers: Mapping[str, int]
    checkpoints: int
    activations: int
    shared: int
    images: int = 0

    @property
    def total(self) -> int:
        return sum(self.buffers.values()) + self.checkpoints + self.activations + self.shared + self.images


def step_activations(step: Step) -> ActivationMemory:
    """Return the bytes that the computations of a step need."""
    outline, settings = step.outline, step.settings
    blocks, images = range(outline.num_blocks), outline.images
    # The code around the towers also holds the embedded tokens.
    around_towers = 0 if images is None else images.peak(settings.rows) + step.hidden
    return activation_memory(
        [step.footprints_of(index) for index in blocks], hidden=[step.hidden_of(index) for index in blocks],
        boundaries=[step.boundary_of(index) for index in blocks], tokens=step.tokens, head_peak=step.head.peak,
        chunk_tokens=settings.chunk_tokens, differentiated=outline.differentiated, towers=outline.layout.num_tower_blocks,
        around_towers=around_towers,
    )  # fmt: skip


def device_use(step: Step) -> DeviceUse:
    """Return the device memory of a step in bytes."""
    residency = step.settings.residency
    checkpoints = sum(map(step.boundary_of, step.staying))
    in_training = step_activations(step).step_peak(residency.boundaries, residency.graphs)
    in_update = max((orthogonalizing_bytes(step.outline.layout.matrices_of(u)) for u in step.orthogonalized), default=0)
    most = max([in_training, in_update, *(_evaluation_peak(step, batch) for batch in step.settings.forwards)])
    return DeviceUse(
        buffers=buffer_bytes(step.tiled, step.buffer_table, step.buffer_settings()),
        checkpoints=checkpoints, activations=most - checkpoints, shared=step.outline.shared.at(step.settings.rows),
        images=step.image_bytes,
    )  # fmt: skip


def _evaluation_peak(step: Step, batch: ForwardBatch) -> int:
    """Return the peak bytes of a batch without gradients, beside the engine's buffers and the masks of training.

    Such a batch keeps no boundaries, and is cut into micro-batches as in training.
    """
    outline, settings = step.outline, step.settings
    relative_length = batch.length / outline.length
    # Sequences of the outline that take as much memory as one of the batch. Eager attention has scores of T x T for each head.
    per_row = relative_length * max(1.0, relative_length) if outline.attention == "eager" else relative_length
    rows_at_once = settings.rows_at_once(batch.rows)
    tokens = batch.rows * batch.length
    hidden = tokens * outline.layout.hidden * outline.compute_bytes
    in_block = max(
        kind.forward_peak.at(max(1.0, rows_at_once * per_row) if kind.hidden is None else batch.rows)
        for kind in outline.kinds
    )
    if settings.expert_tile is not None:  # all micro-batches come as far as the experts before any goes on
        in_block += max(
            (kind.core.footprint.at(batch.rows * per_row).held for kind in outline.kinds if kind.core), default=0
        )
    at_head = step.head.peak.at(min(tokens, settings.chunk_tokens or tokens))
    # `DeviceUse.shared` has the masks of training, so only what these masks take more is added. They grow with the square of the length.
    more_masks = outline.shared.at(batch.rows * max(1.0, relative_length**2)) - outline.shared.at(settings.rows)
    # Three hidden states of the whole batch exist at once: a block's input, its output in micro-batches, and these concatenated.
    return int(3 * hidden + max(in_block, at_head) + max(0, more_masks) + _more_images(step, batch) + batch.kept_bytes)


def _more_images(step: Step, batch: ForwardBatch) -> int:
    """Return the bytes that the images of a batch without gradients take beside those of a training step."""
    images = step.outline.images
    if images is None:
        return 0
    return max(0, images.held.at(batch.rows) - images.held.at(step.settings.rows))


def weights_of_blocks(step: Step) -> Sequence[int]:
    """Return the device bytes of each block's weights."""
    return [slots.num_bytes for slots in step.buffer_table.block_weights]


def memory_curve(step: Step, spans: Sequence[Span], host_base: int) -> PlannedMemory:
    """Return the memory in use during a step.

    Buffers exist throughout. Activation checkpoints are added in the forward pass and freed in the backward pass;
    activations exist while they are in use. Host memory is constant: a checkpoint's host buffer is reused by the next
    step.

    Args:
        step: the step.
        spans: spans of the step, which starts at 0.
        host_base: bytes of host memory, including activation checkpoints.
    """
    use = device_use(step)
    base = sum(use.buffers.values()) + use.shared + use.images
    seconds: list[float] = [0.0]
    device: list[float] = [base]
    for moment, change in sorted(_memory_changes(step, spans)):  # at the same moment, memory is freed first
        seconds.append(moment)
        device.append(max(base, device[-1] + change))
    return PlannedMemory(seconds, device, [host_base] * len(seconds))


def _memory_changes(step: Step, spans: Sequence[Span]) -> Iterator[tuple[float, int]]:
    """Yield the moments at which computations change the memory in use on the device, and the changes in bytes."""
    needed = step_activations(step)
    for span in spans:
        unit = span.op.unit
        if span.op.stream != Stream.COMPUTE:
            continue
        if unit == HEAD and span.end > span.start:
            yield span.start, needed.head
            yield span.end, -needed.head
        if unit.is_block:
            yield from _changes_of_block(step, needed, step.footprints_of(unit.block_index), span)


def _changes_of_block(
    step: Step, needed: ActivationMemory, footprints: Sequence[Footprint], span: Span
) -> Iterator[tuple[float, int]]:
    """Yield the moments at which one operation of a block changes the memory in use, and the changes in bytes.

    Args:
        step: the step.
        needed: bytes of the computations of the step.
        footprints: footprints of the block's micro-batches, largest first.
        span: the span of the operation.
    """
    index, kind, num_blocks = span.op.unit.block_index, span.op.kind, step.outline.num_blocks
    residency = step.settings.residency
    is_tiled, has_graph = index in needed.tiled, residency.keeps_graph(index, num_blocks)
    forward = footprints[0].casts + (sum(each.held for each in footprints) if is_tiled else footprints[0].graph)
    backward = needed.backward_peaks[index] if has_graph else needed.peaks[index]
    kept = 0  # from the forward pass to the end of the backward pass
    if index in step.outline.differentiated:
        kept += step.boundary_of(index) if residency.keeps_boundary(index, num_blocks) else 0
        kept += needed.graphs[index] if has_graph else 0
    # A block with tiles has two operations in each pass, around its tiles: the first allocates, and the last frees.
    if kind == (Kind.ROUTE if is_tiled else Kind.FORWARD):
        yield span.start, forward
    if kind == Kind.FORWARD:
        yield span.end, kept - forward
    if kind == (Kind.RECOMPUTE if is_tiled else Kind.BACKWARD):
        yield span.start, backward
    if kind == Kind.BACKWARD:
        yield span.end, -kept - backward
