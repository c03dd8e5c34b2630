"""Gradients of a block's parameters on their way from autograd into a slot."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from horizon_lm.engine.executor import Engine
from horizon_lm.errors import StreamingError
from horizon_lm.schedule.ops import block
from horizon_lm.store.store import SlabLayout


class GradSink:
    """Takes each parameter's gradient as autograd finishes it, so that only one of them exists besides the slot."""

    def __init__(self, engine: Engine, index: int) -> None:
        self._engine, self._index = engine, index
        self._trained = set(engine.trained(block(index)))
        self._taken = _Taken(engine.store.units[block(index)].grad_layout)
        self._prefix = f"{engine.parts.block_prefix}.{index}."

    def leaves(self, views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return fresh leaves over a block's weights on the device, by their names inside the block."""
        return _fresh_leaves(views, self._prefix, self._trained, self._taken.hook)

    def traps(self, views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return such leaves for a graph that nobody may differentiate."""
        leaves = _fresh_leaves(views, self._prefix, self._trained, None)
        set_traps(leaves.values())
        return leaves

    def open(self) -> None:
        """The block's backward begins: the slot is its own now."""
        memory = self._engine.memory
        if self._trained:
            slot = memory.accumulator[0] if memory.accumulates else memory.outgoing_grads(self._index)
            self._engine.device.poison(slot)
            self._taken.slot = slot

    def close(self) -> list[str]:
        """Return the parameters that got a gradient. The rest of the slot becomes zeros: unused ones, and padding."""
        if self._trained:
            self._taken.zero_the_rest()
        return [name for name in self._taken.layout if name in self._taken.written]


@contextmanager
def trapped_graph() -> Iterator[None]:
    """Inside, autograd saves nothing: differentiating what is computed there is an error."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, _reject_gradient):
        yield


def set_traps(leaves: Iterable[torch.Tensor]) -> None:
    """Make a gradient that reaches one of these leaves an error."""
    for leaf in leaves:
        if leaf.requires_grad:
            leaf.register_hook(_reject_gradient)


def _reject_gradient(_: Any) -> Any:
    raise StreamingError(
        "a loss depends on an activation that a forward hook inside a block kept. A streamed block is computed again for "
        "its backward, so such an activation has no gradient here. Use output_hidden_states=True, or a hook on the whole "
        "block, whose output keeps its gradient."
    )


def _fresh_leaves(
    views: Mapping[str, torch.Tensor], prefix: str, trained: set[str], hook: Callable[[str], Any] | None
) -> dict[str, torch.Tensor]:
    leaves = {}
    for name, view in views.items():
        leaf = view.detach()
        if prefix + name in trained:
            leaf.requires_grad_()
            if hook is not None:
                leaf.register_post_accumulate_grad_hook(hook(prefix + name))
        leaves[name] = leaf
    return leaves


class _Taken:
    """What the hooks know. The leaves know the hooks, and a kept graph the leaves: an engine in here would never be freed."""

    def __init__(self, layout: SlabLayout) -> None:
        self.layout = layout
        self.written: set[str] = set()
        self.slot: torch.Tensor

    def hook(self, name: str) -> Callable[[torch.Tensor], None]:
        def take(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            target = self.layout.view(self.slot, name)
            with torch.no_grad():
                if name in self.written:
                    target.add_(leaf.grad)
                else:
                    target.copy_(leaf.grad)
            self.written.add(name)
            leaf.grad = None

        return take

    def zero_the_rest(self) -> None:
        for name in self.layout:
            if name not in self.written:
                self.layout.view(self.slot, name).zero_()
        for gap in self.layout.gaps(self.slot):
            gap.zero_()
