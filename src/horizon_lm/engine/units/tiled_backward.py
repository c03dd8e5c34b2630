"""The backward pass of a block whose experts are moved in tiles, up to the backward pass of its core.

Autograd would reach the experts in the middle of the core's graph, where several micro-batches cannot share a tile. So the gradient
of the experts' output is found first: it needs only what the block computes after the experts. Then each tile is computed again
and differentiated, for all micro-batches. Then the core is differentiated as a whole, with these gradients in place of the
experts.

Shapes: N tokens of a micro-batch, K experts of a token, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from horizon_lm.common.units import OUTER, Unit, block
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.units.expert_call import ExpertCall
from horizon_lm.engine.units.grad_sink import GradSink, GradSlot, PartialSlot, fresh_leaves
from horizon_lm.engine.units.saved_for_backward import Graph
from horizon_lm.engine.units.tiled_computation import TiledExperts
from horizon_lm.schedule.ops import Kind

Pairs = list[tuple[torch.Tensor, torch.Tensor]]  # outputs of a block, and their gradients


class TiledBackward:
    """The gradients of a block's experts.

    Args:
        engine: the model's engine.
        index: the block's index.
        before: the experts' calls in the forward pass, one for each micro-batch; none if the block has left them out.

    Attributes:
        sink: receives the gradients of the core.
        written: full names of the experts' weights that have received a gradient.
    """

    def __init__(self, engine: Engine, index: int, before: Sequence[ExpertCall]) -> None:
        self._engine, self._index, self._before = engine, index, before
        self._experts = TiledExperts(engine, index)
        self._calls: list[ExpertCall] = []
        self._graph: Graph | None = None
        self._has_gradient = False  # a loss depends on the experts' output for a micro-batch
        self.sink, self.written = GradSink(engine, index), set[str]()

    def find_output_grads(self, recompute: Callable[[int], Graph], pairs_of: Callable[[int, Graph], Pairs]) -> None:
        """Find the gradients of the experts' outputs. The core of the block must be bound to the leaves of `sink`.

        Args:
            recompute: function that computes a micro-batch, given by its number, again.
            pairs_of: function of the number of a micro-batch and its graph that returns the outputs that a loss depends on, with
                their gradients.
        """
        for number, before in enumerate(self._before):
            graph = self._find_output_grad(number, before, recompute, pairs_of)
            # A single graph is kept and differentiated later. Several have no room side by side, so they are computed again.
            if len(self._before) == 1:
                self._graph = graph
            del graph  # before the next is made

    def _find_output_grad(
        self,
        number: int,
        before: ExpertCall,
        recompute: Callable[[int], Graph],
        pairs_of: Callable[[int, Graph], Pairs],
    ) -> Graph:
        """Find the gradient of the experts' output of one micro-batch. Return the graph of the micro-batch."""
        expert_outputs: list[torch.Tensor] = []  # one: a block calls its experts once
        with self._experts.replaced(self._replaying(before, expert_outputs)):
            graph = recompute(number)
        pairs = pairs_of(number, graph)
        outputs, grads = [output for output, _ in pairs], [grad for _, grad in pairs]
        (grad,) = torch.autograd.grad(outputs, expert_outputs, grads, retain_graph=True, allow_unused=True)
        self._has_gradient = self._has_gradient or grad is not None
        # The call is the one that `replay` has appended.
        self._calls[number].begin_backward(torch.zeros_like(expert_outputs[0]) if grad is None else grad)
        return graph

    def _replaying(
        self, before: ExpertCall, outputs: list[torch.Tensor]
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Return a replacement of the experts that computes nothing: it returns the output of the forward pass, attached to the
        graph of the second computation. It appends the output to ``outputs``, and the call to `_calls`.

        Args:
            before: the call in the forward pass.
            outputs: receives the output.
        """

        def replay(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            call = self._experts.call(hidden, ids, weights, before)
            self._calls.append(call)
            outputs.append(call.attach(hidden, weights))
            return outputs[-1]

        return replay

    def differentiate_tiles(self, run: Callable[[Callable[[], None]], None]) -> None:
        """Differentiate all tiles, from the last to the first. At the end of each computation the cursor lands the tile's gradients.

        Args:
            run: calls a function in the context of the forward pass.
        """
        for unit in reversed(self._experts.tiles):
            with self._engine.cursor.compute(Kind.BACKWARD, unit):
                self._differentiate_tile(unit, run)
                self._engine.poison_weights(unit)

    def _differentiate_tile(self, unit: Unit, run: Callable[[Callable[[], None]], None]) -> None:
        """Differentiate one tile for all micro-batches. Fill the slot from which its gradients land, and its part of the gradients of
        adapters. ``run`` is as in `differentiate_tiles`.
        """
        engine = self._engine
        slot = GradSlot(engine.part_of(unit).grad_layout, set(engine.trained_names(block(self._index))))
        is_trained = bool(slot.trained) and slot.layout.numel > 0
        if is_trained:
            slot.buffers = engine.memory.grads_of(unit)
            for buffer in slot.buffers:
                engine.device.poison(buffer)  # every element must be written
        adapters = self._adapter_slot(unit)
        leaves = fresh_leaves(self._experts.weights(unit), [slot, adapters])
        experts = engine.tiles.experts_of(unit)

        def differentiate() -> None:
            with self._experts.bound(unit, leaves) as function:
                for call in self._calls:
                    call.differentiate(experts, function)

        run(differentiate)
        if not all(call.has_rows(experts) for call in self._calls):
            # In a whole block, a micro-batch without tokens for these experts has zeros as their gradients, and adds them.
            slot.add_zeros()
            adapters.add_zeros()
        if is_trained:
            slot.zero_the_rest()
            if engine.memory.accumulates:
                # The sums of a whole block are rounded, too, so later backward passes add to the same numbers.
                slot.round_to(engine.store.precision.grad_dtype)
        adapters.zero_the_rest()
        if self._has_gradient:  # the zeros of experts that no loss depends on land, too, but are no gradient
            self.written |= slot.written
            engine.backward.adapters.update(adapters.written)

    def _adapter_slot(self, unit: Unit) -> GradSlot:
        """Return the slot of the gradients of a tile's adapters: a part of the slot of the outer parameters."""
        engine = self._engine
        trained = set(self._experts.adapters) & set(engine.trained_names(OUTER))
        part = partial(self._experts.part_of_adapter, unit)
        slot = PartialSlot(engine.part_of(OUTER).grad_layout, trained, part=part)
        if trained:  # otherwise nothing is written
            slot.buffers = engine.memory.grads_of(OUTER)
        return slot

    def take_graph(self) -> Graph | None:
        """Return the graph of the only micro-batch, and forget it; None if there are several, or no calls of experts."""
        graph, self._graph = self._graph, None
        return graph

    @contextmanager
    def with_known_grads(self, number: int) -> Iterator[None]:
        """Context manager: compute a micro-batch again, with a node in place of its experts whose gradients are known already."""
        if not self._calls:  # the block has left out its experts
            yield
            return
        with self._experts.replaced(lambda hidden, ids, weights: self._calls[number].attach(hidden, weights)):
            yield
