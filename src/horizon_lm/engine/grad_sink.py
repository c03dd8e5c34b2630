"""Gradients of a block's parameters on their way from autograd into a slot."""

from collections.abc import Callable

import torch

from horizon_lm.engine.engine import Engine
from horizon_lm.schedule.ops import block


class GradSink:
    """Takes each parameter's gradient as autograd finishes it, so that only one of them exists besides the slot."""

    def __init__(self, engine: Engine, index: int) -> None:
        self._index = index
        slabs = engine.store.units[block(index)]
        self._trainable = set(engine.trainable(block(index)))
        self._layout = slabs.grad_layout
        self._weights = engine.memory.weights_of(block(index))
        if self._trainable:
            self._slot = (
                engine.memory.accumulator[0] if engine.memory.accumulates else engine.memory.outgoing_grads(index)
            )
            engine.device.poison(self._slot)
        self._written: set[str] = set()
        self._prefix = f"{engine.parts.block_prefix}.{index}."

    def params(self, names: Callable[[int, torch.Tensor], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Fresh leaves over the streamed weights, by their names inside the block."""
        leaves = {}
        for name, view in names(self._index, self._weights).items():
            leaf = view.detach()
            if self._prefix + name in self._trainable:
                leaf.requires_grad_()
                leaf.register_post_accumulate_grad_hook(self._hook(self._prefix + name))
            leaves[name] = leaf
        return leaves

    def _hook(self, name: str) -> Callable[[torch.Tensor], None]:
        target = self._layout.view(self._slot, name)

        def take(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            with torch.no_grad():
                if name in self._written:
                    target.add_(leaf.grad)
                else:
                    target.copy_(leaf.grad)
            self._written.add(name)
            leaf.grad = None

        return take

    def close(self) -> None:
        """Zeros where no gradient came: unused parameters, and the padding between tensors."""
        if not self._trainable:
            return
        for name in self._layout:
            if name not in self._written:
                self._layout.view(self._slot, name).zero_()
        for gap in self._layout.gaps(self._slot):
            gap.zero_()
