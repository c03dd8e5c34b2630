"""The random states and graphs that the forward pass of a block saves for its backward pass.

A micro-batch is the row range [start, stop) of a batch.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, NamedTuple

import torch

from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.forward_state import ForwardState
from horizon_lm.engine.units.expert_call import ExpertCall
from horizon_lm.engine.units.fixed_routing import Choices
from horizon_lm.engine.units.grad_sink import GradSink, set_traps, trapped_graph


class Graph(NamedTuple):
    """The autograd graph of one micro-batch: its leaves and its outputs."""

    leaves: list[torch.Tensor]
    outputs: list[torch.Tensor]


class GraphUse(Enum):
    """The use that a block's forward pass makes of a separate autograd graph.

    Attributes:
        NONE: no graph is made; the backward pass recomputes the block.
        DROPPED: a graph is made and dropped. A compiled block would otherwise be compiled a second time for the
            recompute, whose results could differ from those of the forward pass in the last bits. In a tower, torch would choose
            other kernels of attention for a bias that needs no gradient.
        TRAPPED: the graph is dropped, but a hook inside the block may keep an activation. A loss that depends on such
            an activation raises an error; otherwise its gradient would be missing silently.
        KEPT: the graph stays on the device, and the backward pass recomputes nothing.
    """

    NONE = "none"
    DROPPED = "dropped"
    TRAPPED = "trapped"
    KEPT = "kept"


class SavedForBackward:
    """The random states that a block's forward pass saves for its backward pass, and its graph if it is kept.

    Attributes:
        rng_states: the random state that each micro-batch started from.
        graphs: the graph of each micro-batch, if graphs are kept.
        sink: takes the gradients of the graph; None if there is no graph.
        experts: the calls of experts that are cut into tiles, one for each micro-batch.
        choices: the experts that a block with tiles has chosen, for each micro-batch.
    """

    def __init__(
        self, engine: Engine, index: int, forward_state: ForwardState, needs_grad: Sequence[bool], hooked: bool
    ) -> None:
        self.forward_state, self._needs_grad = forward_state, needs_grad
        # Hooks first: a kept graph would let a gradient in through an activation that a hook has kept, unnoticed.
        if hooked:
            self.graph_use = GraphUse.TRAPPED
        elif index in forward_state.graphs:
            self.graph_use = GraphUse.KEPT
        elif engine.options.compile or index not in engine.parts.decoder_blocks:
            self.graph_use = GraphUse.DROPPED
        else:
            self.graph_use = GraphUse.NONE
        self.sink = None if self.graph_use is GraphUse.NONE else GradSink(engine, index)
        self.rng_states: list[Any] = []
        self.graphs: list[Graph] = []
        self.experts: list[ExpertCall] = []
        self.choices: list[Choices] = []
        self._has_tiles = engine.tiles.is_cut(index)

    def params(self, weights: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the weights for the forward computation: as they are if it makes no graph, as fresh leaves if it does, or as leaves
        that reject gradients if a hook may keep an activation of the graph.
        """
        if self.sink is None:
            return weights
        if self.graph_use is GraphUse.TRAPPED:
            return self.sink.trapped_leaves(weights)
        return self.sink.leaves(weights)

    def inputs(self, tensors: list[torch.Tensor], span: slice) -> list[torch.Tensor]:
        """Return the inputs of one micro-batch for the forward computation, as fresh leaves if it makes a graph.

        Args:
            tensors: the inputs.
            span: the place of these inputs among the inputs of the node.
        """
        if self.graph_use is GraphUse.NONE:
            return tensors
        leaves = self.input_leaves(tensors, span)
        if self.graph_use is GraphUse.TRAPPED:
            set_traps(leaves)
        return leaves

    def input_leaves(self, inputs: list[torch.Tensor], span: slice) -> list[torch.Tensor]:
        """Return fresh leaves over inputs, which are ``span`` among all of the node. A leaf requires a gradient if its input did."""
        # Detached, so that differentiating the graph ends at the block; autograd passes the gradients on.
        return [t.detach().requires_grad_(need) for t, need in zip(inputs, self._needs_grad[span], strict=True)]

    def recorded_choices(self) -> AbstractContextManager[None]:
        """Return the context in which the experts that the next micro-batch chooses are recorded, if the block has tiles."""
        if not self._has_tiles:
            return nullcontext()
        self.choices.append(Choices())
        return self.choices[-1].recorded()

    def repeated_choices(self, number: int) -> AbstractContextManager[None]:
        """Return the context in which a micro-batch is computed again with the experts that it has chosen."""
        return self.choices[number].repeated() if self._has_tiles else nullcontext()

    def computing(self) -> AbstractContextManager[None]:
        """Return the context in which the block's forward computation runs: if a hook may keep an activation, its graph is trapped."""
        return trapped_graph() if self.graph_use is GraphUse.TRAPPED else nullcontext()

    def save(self, rng_state: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Save what the backward pass of a computed micro-batch needs. Return its outputs without their graph."""
        # A block with kept graphs needs no random state, but `GradientCheck` computes it again, too.
        self.rng_states.append(rng_state)
        if self.graph_use is GraphUse.NONE:
            return outputs
        if self.graph_use is GraphUse.KEPT:
            self.graphs.append(Graph(inputs, outputs))
        # Detached, because the block's node stands for the graph, which must not be differentiated from outside.
        return [tensor.detach() for tensor in outputs]

    def take_graph(self, number: int) -> Graph:
        """Return the kept graph of a micro-batch and forget it, so that its memory is freed right after
        differentiation.
        """
        # An empty one in its place, because graphs are found by the number of their micro-batch.
        graph, self.graphs[number] = self.graphs[number], Graph([], [])
        return graph
