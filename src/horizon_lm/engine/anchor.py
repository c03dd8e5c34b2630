"""A tensor that every unit's autograd node depends on, and that depends on the parameters.

A unit's gradients do not pass through autograd: they go from the device to host memory. The anchor keeps its node in the
graph all the same, and shows whether a backward runs the whole graph.
"""

from typing import Any

import torch
from torch import nn


class Anchor:
    """See the module's description. One anchor serves every forward, until other parameters are trained."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        self.params = params
        sentinel = torch.zeros((), requires_grad=True)
        self._sentinel = torch.autograd.graph.get_gradient_edge(sentinel).node
        self.tensor: torch.Tensor = _Anchor.apply(sentinel, *params)

    def sees_whole_backward(self) -> bool:
        """Return false in a backward that was restricted to some tensors: ``backward(inputs=...)``, ``autograd.grad``."""
        return torch._C._will_engine_execute_node(self._sentinel)


class _Anchor(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, sentinel: torch.Tensor, *params: torch.Tensor) -> torch.Tensor:
        ctx.num_inputs = 1 + len(params)
        ctx.set_materialize_grads(False)
        return sentinel.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, ...]:
        return (None,) * ctx.num_inputs
