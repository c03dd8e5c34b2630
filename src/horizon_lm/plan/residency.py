"""What stays on the device between a forward and its backward, and how spare device memory is spent on it."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass


@dataclass(frozen=True, slots=True)
class Residency:
    """What stays on the device between a forward and its backward, each for so many of the last blocks.

    Attributes:
        boundaries: inputs of blocks; those of earlier blocks wait in host memory.
        weights: these blocks are streamed in once after an update, not again for the backward.
        graphs: and these are not computed again either; at most as many as have boundaries and weights.
    """

    boundaries: int
    weights: int = 0
    graphs: int = 0


@dataclass(frozen=True, slots=True)
class BatchSize:
    """What of a batch decides how much memory a step takes.

    Attributes:
        tokens: rows times their length.
        length: of the rows.
        tokens_at_once: of one device micro-batch.
        is_masked: it has an attention mask.
    """

    tokens: int = 0
    length: int = 0
    tokens_at_once: int = 0
    is_masked: bool = False

    def covers(self, other: "BatchSize") -> bool:
        return self.together_with(other) == self

    def together_with(self, other: "BatchSize") -> "BatchSize":
        """The largest of each."""
        return BatchSize(*map(max, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class ExpectedBatch:
    """What is known of the batches to come.

    Attributes:
        tokens: of the largest one to train on: rows times their length. 0 if that is not known.
        distinct_tokens: that there are in all batches; None if that is not known.
    """

    tokens: int = 0
    distinct_tokens: int | None = None

    def table_rows(self, tokens: int, vocabulary: int) -> int:
        """Distinct rows of the embedding table that a batch of so many tokens reads at most."""
        return min(tokens, vocabulary, self.distinct_tokens or vocabulary)


@dataclass(frozen=True, slots=True)
class DevicePlan:
    """What was planned for batches up to some size.

    Attributes:
        residency: what stays on the device.
        peak: bytes of device memory that a training step allocates at once: the engine's buffers exactly, what blocks and
            head need for a while as counted when it was planned.
    """

    residency: Residency
    peak: int

    def together_with(self, other: "DevicePlan") -> "DevicePlan":
        """For the batches of both."""
        residency = Residency(*map(min, astuple(self.residency), astuple(other.residency)))
        return DevicePlan(residency, max(self.peak, other.peak))


_LOGIT_BYTES = 12  # with its log-probability and gradients
_CHUNK_SHARE, _MOST_CHUNK_BYTES = 16, 4 * 2**30  # of spare memory for a chunk of logits, beyond which nothing is gained


def head_chunk_tokens(spare: int | None, vocabulary: int) -> int:
    """Tokens whose logits exist at once. Without a limit of its own (host memory), about 64 MiB of fp32 logits."""
    if spare is None:
        return max(64, 64 * 2**20 // (4 * vocabulary))
    num_bytes = min(spare // _CHUNK_SHARE, _MOST_CHUNK_BYTES)
    return max(64, num_bytes // (_LOGIT_BYTES * vocabulary) // 64 * 64)


@dataclass(frozen=True, slots=True)
class Working:
    """Bytes that computations need, weights and gradients not counted; by block, for the whole batch.

    Attributes:
        graphs: what each block's computation keeps, without its input and what the next block is given.
        peaks: the most that each block's forward and backward hold at once.
        besides: what the backward of a kept graph holds beside it.
        head: the most that the head holds at once.
        boundary: a block's input.
        first: the first block that a gradient passes through; those before it keep nothing.
    """

    graphs: Sequence[int]
    peaks: Sequence[int]
    besides: Sequence[int]
    head: int
    boundary: int
    first: int = 0

    def most(self, boundaries: int, graphs: int = 0) -> int:
        """The most at any moment of a step, when so many of the last blocks keep their boundary, and their graph.

        All that is kept is there when the head computes. The backward of a block finds what it and earlier ones keep.
        """
        num_blocks = len(self.graphs)
        kept = most = 0
        for u in range(num_blocks):
            has_graph = u >= max(self.first, num_blocks - graphs)
            kept += (self.boundary if u >= max(self.first, num_blocks - boundaries) else 0) + (
                self.graphs[u] if has_graph else 0
            )
            most = max(most, kept + (self.besides[u] if has_graph else self.peaks[u]))
        return max(most, kept + self.head)


def spend(spare: int, weights: Sequence[int], working: Working) -> Residency:
    """What fits into spare device memory.

    A boundary on the device saves its way to the host and back. A kept graph saves a quarter of its block's work and a
    load of its weights, which it needs as well; the boundary is part of it. Kept weights alone save the load.

    Args:
        spare: bytes that nothing else will need.
        weights: bytes of each block.
        working: what computations need of it.
    """
    num_blocks = len(weights)
    boundaries = next((n for n in range(num_blocks, 0, -1) if working.most(n) <= spare), 0)
    if boundaries < num_blocks:
        return Residency(boundaries, 0, 0)
    held = graphs = 0
    for num_bytes in reversed(weights):
        if spare - num_bytes < working.most(num_blocks, graphs + 1):
            break
        spare, held, graphs = spare - num_bytes, held + 1, graphs + 1
    spare -= working.most(num_blocks, graphs)
    for num_bytes in reversed(weights[: num_blocks - held]):
        if spare < num_bytes:
            break
        spare, held = spare - num_bytes, held + 1
    return Residency(boundaries, held, graphs)
