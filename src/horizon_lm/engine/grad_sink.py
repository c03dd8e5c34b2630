"""Gradients of a block's parameters on their way from autograd into a slot."""

from collections.abc import Callable

import torch

from horizon_lm.engine.engine import Engine
from horizon_lm.schedule.ops import block
from horizon_lm.store.layout import SlabLayout


class GradSink:
    """Takes each parameter's gradient as autograd finishes it, so that only one of them exists besides the slot."""

    def __init__(self, engine: Engine, index: int) -> None:
        self._engine, self._index = engine, index
        self._trainable = set(engine.trainable(block(index)))
        self._weights = engine.memory.weights_of(block(index))
        self._taken = _Taken(engine.store.units[block(index)].grad_layout)
        self._prefix = f"{engine.parts.block_prefix}.{index}."

    def params(self, names: Callable[[int, torch.Tensor], dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Fresh leaves over the streamed weights, by their names inside the block."""
        leaves = {}
        for name, view in names(self._index, self._weights).items():
            leaf = view.detach()
            if self._prefix + name in self._trainable:
                leaf.requires_grad_()
                leaf.register_post_accumulate_grad_hook(self._taken.hook(self._prefix + name))
            leaves[name] = leaf
        return leaves

    def open(self) -> None:
        """The block's backward begins: the slot is its own now."""
        memory = self._engine.memory
        if self._trainable:
            slot = memory.accumulator[0] if memory.accumulates else memory.outgoing_grads(self._index)
            self._engine.device.poison(slot)
            self._taken.slot = slot

    def close(self) -> None:
        """Zeros where no gradient came: unused parameters, and the padding between tensors."""
        if self._trainable:
            self._taken.zero_the_rest()


class _Taken:
    """What the hooks know. The leaves know the hooks, and a template the leaves: an engine in here would never be freed."""

    def __init__(self, layout: SlabLayout) -> None:
        self._layout = layout
        self._written: set[str] = set()
        self.slot: torch.Tensor

    def hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def take(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            target = self._layout.view(self.slot, name)
            with torch.no_grad():
                if name in self._written:
                    target.add_(leaf.grad)
                else:
                    target.copy_(leaf.grad)
            self._written.add(name)
            leaf.grad = None

        return take

    def zero_the_rest(self) -> None:
        for name in self._layout:
            if name not in self._written:
                self._layout.view(self.slot, name).zero_()
        for gap in self._layout.gaps(self.slot):
            gap.zero_()
