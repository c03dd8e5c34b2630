"""The autograd node of a tower's block, whose output other code than the next block may use, as models do that read several layers.

Plain autograd adds the gradients of a tensor in the order in which its uses are differentiated: first that of code that uses the output
of a block after later blocks have computed, and then those of each use inside the next block. So the next block's node must begin its
sum with the gradient of the other code. The output therefore leaves the node in two ways: as a tensor for the model, whose gradient comes
through `_Shared`, and as a token without memory, which stands for it among the inputs of the next block's node.
"""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from horizon_lm.engine.passes.forward_state import ForwardState, is_executed
from horizon_lm.engine.passes.micro_batches import BlockCalls
from horizon_lm.engine.units.block_autograd import BlockAutograd, BlockComparison
from horizon_lm.engine.units.block_computation import BlockComputation
from horizon_lm.engine.units.saved_for_backward import Graph

_FIRST = 2**62  # above the numbers that autograd gives to nodes, of which it runs the one with the largest number first


class SharedOutput:
    """The hidden states that a block has returned, as seen by the next block.

    Attributes:
        token: stands for them among the inputs of the next block's node; it has their shape, but no memory.
        reader: the autograd node of the next block, which may be gone; None if no block has read them yet.
        grad: the gradient of other uses, kept for the next block's node.
        is_read: the next block was differentiated.
    """

    def __init__(self, token: torch.Tensor) -> None:
        self.token = token
        self.reader: weakref.ref[Any] | None = None
        self.grad: torch.Tensor | None = None
        self.is_read = False

    def keep(self, grad: torch.Tensor | None) -> bool:
        """Keep the gradient of other uses for the next block's node. Return False if that has run, or does not run in this backward pass."""
        if self.reader is None or self.is_read or not is_executed(self.reader):
            return False
        self.grad = grad
        return True

    def take(self) -> torch.Tensor | None:
        """Return the gradient of other uses, and forget it; None if there is none."""
        grad, self.grad, self.is_read = self.grad, None, True
        return grad


class _Shared(torch.autograd.Function):
    """The identity, whose gradient goes to the next block's node if that is still to come."""

    @staticmethod
    def forward(ctx: Any, shared: SharedOutput, hidden: torch.Tensor) -> torch.Tensor:
        ctx.shared = shared
        ctx.set_materialize_grads(False)
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, torch.Tensor | None]:
        return None, None if ctx.shared.keep(grad) else grad


class TowerBlock(BlockAutograd):
    """The autograd state of one block of a tower in one forward pass."""

    def __init__(
        self, blocks: BlockComputation, index: int, calls: BlockCalls, keys: tuple[str, ...], forward_state: ForwardState,
        hooked: bool, comparison: BlockComparison | None,
    ) -> None:  # fmt: skip
        super().__init__(blocks, index, calls, keys, forward_state, hooked, uncompiled=True, comparison=comparison)
        tensors = calls.tensors
        read = {i: getattr(tensors[i].grad_fn, "shared", None) for i in calls.hidden}
        # Another block has read the others: their gradient comes through `_Shared`, too.
        self._inputs = {i: each for i, each in read.items() if isinstance(each, SharedOutput) and each.reader is None}

    def compute(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the block as a node of autograd's graph, and return its outputs."""
        linked = [self._inputs[i].token if i in self._inputs else each for i, each in enumerate(inputs)]
        outputs = super().compute(*linked)
        num_tokens = len(self.outputs)
        tensors, tokens = list(outputs[:-num_tokens]), outputs[-num_tokens:]
        own_node = self.forward_state.nodes[self.index] = weakref.ref(tokens[0].grad_fn)
        for each in self._inputs.values():
            each.reader = own_node
        for place, token in zip(self._hidden_outputs(), tokens, strict=True):
            shared: torch.Tensor = _Shared.apply(SharedOutput(token), tensors[place])
            node: Any = shared.grad_fn
            node._set_sequence_nr(_FIRST)  # as soon as the other uses are differentiated
            tensors[place] = shared
        return tuple(tensors)

    def _hidden_outputs(self) -> list[int]:
        """Return the places of the hidden states of each batch among the tensors of all outputs."""
        return [sum(each.num_tensors for each in self.outputs[:number]) for number in range(len(self.outputs))]

    def forward(self, inputs: Sequence[torch.Tensor], needs_grad: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        """Compute the block. Return the tensors of its output, and a token for the hidden states of each batch."""
        outputs = super().forward(inputs, needs_grad)
        return *outputs, *(self.blocks.without_memory(outputs[i]) for i in self._hidden_outputs())

    def kept(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Return the inputs themselves in place of tokens, but None instead of offloaded hidden states."""
        return super().kept([each.detach() for each in self.calls.tensors])

    def backward(
        self, grads: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Differentiate the block. Return the gradients of its inputs, with those of their other uses."""
        num_tokens = len(self.outputs)
        of_outputs = list(grads[:-num_tokens])
        for place, of_next in zip(self._hidden_outputs(), grads[-num_tokens:], strict=True):
            of_others = of_outputs[place]
            of_outputs[place] = of_next if of_others is None else of_others if of_next is None else of_next + of_others
        return super().backward(of_outputs, kept)

    def differentiate_part(
        self, number: int, graph: Graph, inputs: list[torch.Tensor | None], grads: Sequence[torch.Tensor | None],
        input_grads: list[torch.Tensor | None],
    ) -> None:  # fmt: skip
        """Differentiate one micro-batch, as the base does, and add the gradients of other uses of its inputs. The sums of the gradients of
        a whole batch begin with these.
        """
        if not self.micro_batches[number].is_whole:
            super().differentiate_part(number, graph, inputs, grads, input_grads)
            for i in range(*self.calls.spans[self.micro_batches[number].batch].indices(len(inputs))):
                if i in self._inputs and (of_others := self._inputs[i].take()) is not None:  # once in a batch
                    total = input_grads[
                        i
                    ]  # of this block, unlike the other gradient, which later micro-batches may not change
                    input_grads[i] = of_others.clone() if total is None else total.add_(of_others)
            return
        pairs = self.outputs_and_grads(number, graph, grads)
        found: dict[int, torch.Tensor] = {}
        for i, leaf in enumerate(graph.leaves, self.calls.spans[self.micro_batches[number].batch].start):
            if leaf.requires_grad:
                # By a hook: the gradient of a leaf would be copied to the memory format of the leaf, and later sums differ in it.
                leaf.register_hook(partial(found.__setitem__, i))
            if i in self._inputs and (of_others := self._inputs[i].take()) is not None:
                pairs.append((leaf, of_others))
        if pairs:
            with torch.enable_grad():
                torch.autograd.backward([output for output, _ in pairs], [grad for _, grad in pairs])
        for i, grad in found.items():
            input_grads[i] = grad
