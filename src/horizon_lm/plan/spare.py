"""How spare device memory is spent: boundaries first, then whole graphs of the last blocks, then their weights."""

from collections.abc import Sequence
from dataclasses import dataclass

from horizon_lm.plan.residency import Residency

# Counted, of one logit with its log-probability and gradients. The vocabulary's mean and entropy take half as much again.
LOGIT_BYTES = {"chunked": 12, "whole": 16}
_CHUNK_SHARE, _MOST_CHUNK_BYTES = 16, 4 * 2**30  # of spare memory for a chunk of logits, beyond which nothing is gained


def head_chunk_tokens(spare: int | None, vocabulary: int) -> int:
    """Tokens whose logits exist at once. Without a limit of its own (host memory), about 64 MiB of fp32 logits."""
    if spare is None:
        return max(64, 64 * 2**20 // (4 * vocabulary))
    num_bytes = min(spare // _CHUNK_SHARE, _MOST_CHUNK_BYTES)
    return max(64, num_bytes // (LOGIT_BYTES["chunked"] * vocabulary) // 64 * 64)


@dataclass(frozen=True, slots=True)
class Working:
    """Bytes that computations need for a while, weights and gradients not counted.

    Attributes:
        graph: what one block's computation of the whole batch keeps, without its input.
        peak: the most that a block's forward and backward hold at once.
        beside: what the backward of a kept graph holds beside it.
        head: the most that the head holds at once.
        num_blocks: of the model.
    """

    graph: int
    peak: int
    beside: int
    head: int
    num_blocks: int

    def with_graphs(self, graphs: int) -> int:
        """The most at any moment of a step, when so many of the last blocks keep their graphs.

        Those are all there when the head computes, and when the last block is differentiated; they are gone when the
        blocks before them are computed again.
        """
        there = graphs * self.graph + max(self.head, self.beside if graphs else 0)
        return max(there, self.peak if graphs < self.num_blocks else 0)


def spend(spare: int, boundary: int, weights: Sequence[int], working: Working) -> Residency:
    """What fits into spare device memory.

    A boundary on the device saves its way to the host and back. A kept graph saves a quarter of its block's work and a
    load of its weights, which it needs as well; the boundary is part of it. Kept weights alone save the load.

    Args:
        spare: bytes that nothing else will need.
        boundary: bytes of one block's input, for the whole batch.
        weights: bytes of each block.
        working: what computations need of it.
    """
    num_blocks = len(weights)
    boundaries = max(0, min(num_blocks, (spare - working.with_graphs(0)) // boundary))
    if boundaries < num_blocks:
        return Residency(boundaries, 0, 0)
    spare -= num_blocks * boundary
    held = graphs = 0
    for num_bytes in reversed(weights):
        if spare - num_bytes < working.with_graphs(graphs + 1):
            break
        spare, held, graphs = spare - num_bytes, held + 1, graphs + 1
    spare -= working.with_graphs(graphs)
    for num_bytes in reversed(weights[: num_blocks - held]):
        if spare < num_bytes:
            break
        spare, held = spare - num_bytes, held + 1
    return Residency(boundaries, held, graphs)
