"""Choose the blocks whose activation checkpoints, weights and graphs stay on the device until the backward pass."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from horizon_lm.common.streaming_options import StreamingOptions


@dataclass(frozen=True, slots=True)
class Residency:
    """Number of last blocks that keep data on the device between the forward and backward pass.

    Attributes:
        boundaries: blocks with their activation checkpoint (their input) on the device; earlier blocks offload it.
        weights: blocks with resident weights, which are loaded once per update and not again for the backward pass.
        graphs: blocks with a resident graph, which are not recomputed; they also need a resident boundary and weights.
    """

    boundaries: int
    weights: int = 0
    graphs: int = 0

    @classmethod
    def of(cls, options: StreamingOptions) -> "Residency":
        """Return the residency of options in which every setting is chosen."""
        return cls(int(options.activation_checkpoints), options.resident_blocks or 0, options.resident_graphs or 0)

    def keeps_boundary(self, index: int, num_blocks: int) -> bool:
        """Return whether a block keeps its boundary on the device."""
        return index >= num_blocks - self.boundaries

    def keeps_graph(self, index: int, num_blocks: int) -> bool:
        """Return whether a block keeps its graph, so that it is not recomputed."""
        return index >= num_blocks - self.graphs

    def options(self) -> dict[str, Any]:
        """Return the settings that select this residency, by name."""
        return {
            "activation_checkpoints": self.boundaries,
            "resident_blocks": self.weights,
            "resident_graphs": self.graphs,
        }


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The properties of a batch that determine the memory of a step.

    Attributes:
        tokens: number of sequences times their length, B x T.
        length: length of the sequences, T.
        tokens_at_once: tokens of one device micro-batch.
        is_masked: the batch has an attention mask.
        modal: numbers of images, video and audio, such as values of pixels.
    """

    tokens: int = 0
    length: int = 0
    tokens_at_once: int = 0
    is_masked: bool = False
    modal: int = 0

    def covers(self, other: "BatchSize") -> bool:
        """Return whether memory planned for this batch suffices for the other batch."""
        return self.merge(other) == self

    def merge(self, other: "BatchSize") -> "BatchSize":
        """Return the elementwise maximum of two batch sizes."""
        return BatchSize(*map(max, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class ExpectedBatch:
    """Known properties of future batches.

    Attributes:
        tokens: sequences times length of the largest training batch; 0 if unknown.
        distinct_tokens: number of distinct tokens in all batches; None if unknown.
    """

    tokens: int = 0
    distinct_tokens: int | None = None

    def table_rows(self, tokens: int, vocabulary: int) -> int:
        """Return an upper bound on the number of distinct embedding rows read by a batch of this many tokens."""
        return min(tokens, vocabulary, self.distinct_tokens or vocabulary)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """The device plan for batches up to some size.

    Attributes:
        residency: data that stays on the device.
        peak: peak bytes of a training step: the engine's buffers exactly, activations of blocks and head as estimated.
    """

    residency: Residency
    peak: int

    def merge(self, other: "DevicePlan") -> "DevicePlan":
        """Return a plan that is valid for the batches of both plans."""
        residency = Residency(*map(min, astuple(self.residency), astuple(other.residency)))
        return DevicePlan(residency, max(self.peak, other.peak))


_LOGIT_BYTES = 12  # bytes of a logit with its log-probability and gradients, without compiled code
_CHUNK_SHARE = 16  # a chunk of logits gets a sixteenth of spare memory
_MOST_CHUNK_BYTES = 4 * 2**30  # larger chunks are no faster


def head_chunk_tokens(spare: int | None, vocabulary: int, itemsize: int, compiled: bool) -> int:
    """Return the tokens of a chunk of logits.

    Args:
        spare: bytes of device memory, of which a chunk takes a share; None if memory is not limited: a chunk then takes about 64 MiB.
        vocabulary: logits of a token.
        itemsize: bytes of a logit.
        compiled: the loss is computed by compiled code, whose only other tensor of this size is the gradient of the logits.
    """
    if spare is None:
        return max(64, 64 * 2**20 // (4 * vocabulary))
    num_bytes = min(spare // _CHUNK_SHARE, _MOST_CHUNK_BYTES)
    logit_bytes = 2 * itemsize if compiled else _LOGIT_BYTES
    return max(64, num_bytes // (logit_bytes * vocabulary) // 64 * 64)


@dataclass(frozen=True, slots=True)
class ActivationMemory:
    """Bytes that computations need for the whole batch, without weights and gradients.

    Attributes:
        graphs: activations kept by each block, without its input and output.
        peaks: peak of each block's forward and backward pass.
        backward_peaks: peak of each block's backward pass, in addition to a resident graph.
        head: peak of the head.
        boundaries: bytes that each block keeps for the backward pass: its input, and with tiles what its experts return.
        differentiated: the blocks with a gradient; other blocks keep nothing.
        tiled: blocks whose experts are computed tile by tile. Their graph is never kept.
        towers: number of blocks of towers, which come first.
        around_towers: peak of the model's code around these blocks.
    """

    graphs: Sequence[int]
    peaks: Sequence[int]
    backward_peaks: Sequence[int]
    head: int
    boundaries: Sequence[int]
    differentiated: frozenset[int]
    tiled: frozenset[int] = frozenset()
    towers: int = 0
    around_towers: int = 0

    def step_peak(self, boundaries: int, graphs: int = 0) -> int:
        """Return the peak of a step in which these numbers of last blocks keep their boundaries and their graphs.

        All kept data exist while the head computes. When the backward pass reaches a block, it has freed the data of later blocks.
        """
        num_blocks = len(self.graphs)
        kept = peak = 0
        for index in range(num_blocks):
            is_differentiated = index in self.differentiated
            if is_differentiated and index >= num_blocks - boundaries:
                kept += self.boundaries[index]
            has_graph = is_differentiated and index >= num_blocks - graphs
            if has_graph:
                kept += self.graphs[index]
            peak = max(peak, kept + (self.backward_peaks[index] if has_graph else self.peaks[index]))
            if index == self.towers - 1:  # the decoder's blocks come later, and are differentiated before
                peak = max(peak, kept + self.around_towers)
        return max(peak, kept + self.head)


def choose_residency(spare: int, weights: Sequence[int], activations: ActivationMemory) -> Residency:
    """Choose what stays in spare device memory.

    A boundary on the device saves its transfer to the host and back. A resident graph saves a quarter of its block's
    work and one load of its weights, which must also be resident; the boundary is part of the graph. Resident weights
    without a graph save only the load.

    Args:
        spare: bytes not needed for anything else.
        weights: bytes of each block's weights.
        activations: bytes that computations need.
    """
    num_blocks = len(weights)
    boundaries = fitting_boundaries(num_blocks, 0, spare, activations) or 0
    if boundaries < num_blocks:
        return Residency(boundaries)
    resident = graphs = 0
    for num_bytes in reversed(weights):  # graphs, each with the weights of its block
        index = num_blocks - 1 - graphs
        if index in activations.tiled or spare - num_bytes < activations.step_peak(num_blocks, graphs + 1):
            break
        spare, resident, graphs = spare - num_bytes, resident + 1, graphs + 1
    spare -= activations.step_peak(num_blocks, graphs)
    for num_bytes in reversed(weights[: num_blocks - resident]):  # weights of earlier blocks
        if spare < num_bytes:
            break
        spare, resident = spare - num_bytes, resident + 1
    return Residency(boundaries, resident, graphs)


def lower_residency(chosen: Residency, spare: int, weights: Sequence[int], activations: ActivationMemory) -> Residency:
    """Return the largest part of a chosen residency that fits spare device memory.

    Boundaries are given up first, because they are often chosen as ``auto``; then graphs, which take the most memory; weights last.

    Args:
        chosen: the residency that does not fit.
        spare: bytes not needed for anything else.
        weights: bytes of each block's weights.
        activations: bytes that computations need.
    """
    fewer_graphs = [(chosen.weights, graphs) for graphs in range(chosen.graphs, -1, -1)]
    fewer_weights = [(resident, 0) for resident in range(chosen.weights - 1, -1, -1)]
    for resident, graphs in fewer_graphs + fewer_weights:
        left = spare - sum(weights[len(weights) - resident :])
        boundaries = fitting_boundaries(chosen.boundaries, graphs, left, activations)
        if boundaries is not None:
            return Residency(boundaries, resident, graphs)
    return Residency(0)


def fitting_boundaries(most: int, graphs: int, spare: int, activations: ActivationMemory) -> int | None:
    """Return the largest number of boundaries with which a step fits spare memory; None if none does.

    Args:
        most: the largest number to return.
        graphs: number of kept graphs. Each contains its block's boundary, so this is also the smallest number to return.
        spare: bytes for the computations and what they keep, without weights.
        activations: bytes that computations need.
    """
    return next((n for n in range(most, graphs - 1, -1) if activations.step_peak(n, graphs) <= spare), None)
