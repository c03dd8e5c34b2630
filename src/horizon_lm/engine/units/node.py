"""The computation of a unit in one pass, as a single node of autograd's graph."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.forward_state import ForwardState


class UnitNode(ABC):
    """The computation of a unit in one forward pass, and in its backward pass.

    Args:
        engine: the engine of the model.
        forward_state: the state of the forward pass; None if no backward pass can follow.
    """

    def __init__(self, engine: Engine, forward_state: ForwardState | None) -> None:
        self.engine, self.forward_state = engine, forward_state

    @abstractmethod
    def forward(self, inputs: Sequence[torch.Tensor], needs_grad: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        """Compute the unit, and return its outputs.

        Args:
            inputs: the tensors that it is computed from.
            needs_grad: for each of them, whether it needs a gradient.
        """

    def kept(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Return what autograd keeps of the inputs until the backward pass. It is called after `forward`."""
        return ()

    @abstractmethod
    def backward(
        self, grads: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Differentiate the unit, whose weights' gradients go to host memory, past autograd.

        Args:
            grads: the gradient of each output; None for an output that no loss depends on.
            kept: what autograd has kept.

        Returns:
            The gradient of each input.
        """

    def compute(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Compute the unit as a node of autograd's graph, and return its outputs."""
        # Without the anchor, autograd would skip a node if none of its inputs needs a gradient, such as the first block on a frozen table.
        # A pass that no backward pass can follow has no anchor and needs none. In such a pass only the chunked head comes here.
        anchor = torch.empty(0) if self.forward_state is None else self.engine.anchor
        outputs: tuple[torch.Tensor, ...] = _NodeFunction.apply(self, anchor, *inputs)
        return outputs


class _NodeFunction(torch.autograd.Function):
    """The autograd function of all units."""

    @staticmethod
    def forward(ctx: Any, node: UnitNode, anchor: torch.Tensor, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.node = node
        # None for an output without gradient: zeros of its size would be made, and differentiated.
        ctx.set_materialize_grads(False)
        outputs = node.forward(inputs, ctx.needs_input_grad[2:])  # of the inputs, which follow node and anchor
        ctx.save_for_backward(*node.kept(inputs))
        ctx.mark_non_differentiable(*[each for each in outputs if not each.is_floating_point()])
        return outputs

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        node: UnitNode = ctx.node
        assert node.forward_state is not None
        with node.engine.backward_of(node.forward_state):
            # Read after `backward_of` has begun, whose error for a second backward pass names the remedy; the error of
            # `saved_tensors` does not.
            return None, None, *node.backward(grads, ctx.saved_tensors)
