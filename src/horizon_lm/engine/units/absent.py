"""Blocks that this rank has no inputs for, while other ranks do: a tower, if only their batches have images.

This rank takes part in gathering their weights and in summing their gradients, which are zero on it.
"""

from collections.abc import Sequence

import torch

from horizon_lm.common.units import Unit, block
from horizon_lm.engine.passes.forward_state import ForwardState
from horizon_lm.engine.passes.micro_batches import BlockCalls
from horizon_lm.engine.units.block_autograd import BlockAutograd
from horizon_lm.engine.units.block_computation import BlockComputation


def compute_absent(blocks: BlockComputation, before: Unit) -> None:
    """Compute the absent blocks of the running pass that come before a unit, for no rows."""
    forward, state = blocks.engine.forward, blocks.engine.recording
    for index in forward.absent_before(before):
        nothing = BlockCalls([], forward.cut(index, []))
        if state is not None and index in state.keeps:
            (forward.anchor,) = _AbsentBlock(blocks, index, nothing, state).compute()
        else:
            blocks.compute_forward(index, nothing, (), uncompiled=True)


class _AbsentBlock(BlockAutograd):
    """The autograd node of an absent block. It is between the nodes before and after it by the anchor alone, which it returns."""

    def __init__(self, blocks: BlockComputation, index: int, calls: BlockCalls, forward_state: ForwardState) -> None:
        super().__init__(blocks, index, calls, (), forward_state, hooked=False, uncompiled=True, comparison=None)

    def forward(self, inputs: Sequence[torch.Tensor], needs_grad: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        """Compute nothing, and return a new anchor."""
        super().forward(inputs, needs_grad)
        return (self.engine.anchor.detach().clone(),)

    def backward(
        self, grads: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Take part in the block's backward pass, unless other ranks leave it out, too."""
        return super().backward((), kept) if self.engine.backward.visits(block(self.index)) else []
