"""Blocks as the model calls them, for a training step or for inference.

Shapes: B batch rows, T tokens of a row, H hidden size. Hidden states of a batch are (B, T, H); a block computes one
micro-batch, rows [start, stop) of a batch, at a time. Most passes have one batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from horizon_lm.common.ranges import consecutive
from horizon_lm.common.units import block
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.forward_pass import require_forward
from horizon_lm.engine.passes.lockstep import batched_call, caller_number
from horizon_lm.engine.passes.micro_batches import BlockCall, RowOutputs
from horizon_lm.engine.units.absent import compute_absent
from horizon_lm.engine.units.block_autograd import BlockAutograd
from horizon_lm.engine.units.block_computation import BlockComputation
from horizon_lm.engine.units.gradient_check import GradientCheck
from horizon_lm.engine.units.tower_block import TowerBlock
from horizon_lm.errors import StreamingError
from horizon_lm.model import capture


class Blocks(BlockComputation):
    """The streamed blocks of a model, which it calls one by one.

    Args:
        engine, call_model: as in `BlockComputation`.

    Attributes:
        gradient_check: compares blocks in the next training step; None otherwise.
    """

    def __init__(self, engine: Engine, call_model: Callable[..., Any]) -> None:
        super().__init__(engine, call_model)
        self.gradient_check: GradientCheck | None = None

    def forward(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Compute a block for a whole batch. The model calls this instead of the forward method of the block module."""
        require_forward(self.engine, self.blocks[index].name)
        call = BlockCall(args, kwargs)
        # Read, and published below, in the thread of this call: its context has the collector in which transformers gathers
        # `output_hidden_states` and the like.
        keys, forward = capture.requested_keys(), self.engine.forward
        is_joint = len(forward.batches) > 1
        value = (caller_number() if is_joint else 0, call, keys)
        place = forward.place(block(index)) if is_joint else 0
        output, captured = batched_call(index, value, lambda calls: self._forward_all(index, calls), place)
        capture.publish(captured)
        return output

    def _forward_all(self, index: int, calls: list[tuple[int, BlockCall, tuple[str, ...]]]) -> list[Any]:
        """Compute a block for all batches of the pass that have inputs for it. Return its output, and what transformers captures, for each.

        Args:
            index: the block's index.
            calls: the number of each batch, its call, and the names of the outputs that transformers captures inside the block.
        """
        engine, forward = self.engine, self.engine.forward
        is_for_all = index in engine.parts.decoder_blocks
        different_keys = {keys for _, _, keys in calls}
        if (is_for_all and len(calls) != len(forward.num_rows)) or len(different_keys) > 1:
            raise StreamingError(
                f"{self.blocks[index].name}: the batches of a pass do not pass through the same blocks, or do not ask for "
                "the same outputs; compute them one by one"
            )
        (keys,) = different_keys
        compute_absent(self, block(index))
        # What is captured inside a tower's block may have another layout than its output, so such a call is not cut.
        joined = self.cut(index, [call for _, call, _ in calls], [batch for batch, _, _ in calls], is_whole=bool(keys))
        hooked = self.blocks[index].is_hooked()
        # Compiled code would not call hooks inside a block. A cache identifies each block by its number, so compiled
        # code could not be shared between blocks.
        uncompiled = bool(keys) or hooked or forward.caching
        state = engine.recording
        if state is not None and index in state.keeps:
            node = (
                BlockAutograd(self, index, joined, keys, state, hooked, uncompiled, self.gradient_check)
                if is_for_all
                else TowerBlock(self, index, joined, keys, state, hooked, self.gradient_check)
            )
            tensors = node.compute(*joined.tensors)
            forward.note_outputs(tensors)
            # Rebuilt from the tensors that `compute` returns, which have the node as their grad_fn.
            return rebuild_all(node.outputs, tensors)
        if state is not None and any(each.requires_grad for each in joined.tensors):
            raise StreamingError(
                f"{self.blocks[index].name}: its input needs a gradient, but no gradient was expected to reach it; please report this"
            )
        outputs = self.compute_forward(index, joined, keys, uncompiled)
        rebuilt = [each.rebuild(each.tensors) for each in outputs]
        # The pass keeps the structure; the tensors would stay alive with it.
        for each in outputs:
            each.release()
        return rebuilt

    def is_structure_changed(self) -> bool:
        """Return whether a module or parameter inside a block was added, removed or replaced."""
        return any(each.is_structure_changed() for each in self.blocks)


def rebuild_all(outputs: Sequence[RowOutputs], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return the output for each batch, from the tensors of all of them."""
    spans = consecutive(each.num_tensors for each in outputs)
    return [each.rebuild(tensors[span]) for each, span in zip(outputs, spans, strict=True)]
