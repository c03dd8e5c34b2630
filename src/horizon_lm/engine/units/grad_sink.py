"""Take the gradients of a unit's parameters, one by one, into a gradient slot.

From the slot, the move of STREAM_OUT (`engine.passes.unit_moves`) lands them in host memory (`engine.host.host_grads`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from typing import Any

import torch

from horizon_lm.common.units import OUTER, block
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.errors import StreamingError
from horizon_lm.memory.layout.slabs import SlotLayout
from horizon_lm.memory.unit_slabs import Slot


class GradSink:
    """The receiver of all gradients of one block: it makes the leaves, and has a `GradSlot` for its weights and one for its adapters.

    Each gradient moves into its slot as soon as autograd has computed it, so at most one exists on the device beside the slots.
    """

    def __init__(self, engine: Engine, index: int) -> None:
        self._engine, self._index = engine, index
        self._trained = set(engine.trained_names(block(index)))
        self._adapters = engine.parts.adapters.get(index, frozenset()) & set(engine.trained_names(OUTER))
        self._slot = GradSlot(engine.part_of(block(index)).grad_layout, self._trained)
        self._adapter_slot = GradSlot(engine.store.units[OUTER].grad_layout, self._adapters)
        self._prefix = f"{engine.parts.block_names[index]}."

    def leaves(self, views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return fresh leaves over a block's weights on the device, by their names inside the block."""
        return fresh_leaves(views, [self._slot, self._adapter_slot], self._prefix)

    def trapped_leaves(self, views: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return leaves like `leaves`, for a graph that must not be differentiated: a gradient that reaches one is an
        error.
        """
        trained = self._trained | self._adapters
        leaves = {name: view.detach().requires_grad_((self._prefix + name) in trained) for name, view in views.items()}
        set_traps(leaves.values())
        return leaves

    def open(self) -> None:
        """Take the buffers that gradients are written to. The computation of the block's backward pass must have begun."""
        memory = self._engine.memory
        if self._trained:
            self._slot.buffers = memory.sums_of(block(self._index))
            for buffer in self._slot.buffers:
                self._engine.device.poison(buffer)  # every element must be written
        if self._adapters:
            # One buffer for the adapters of all blocks: they are outer parameters, landed once, at the end of the
            # pass.
            self._adapter_slot.buffers = memory.grads_of(OUTER)

    def close(self) -> list[str]:
        """Zero the places without a gradient (unused parameters, padding). Return the names of the parameters that received one.

        Adapters are not among them: their names go to the running backward pass, which lands them with the outer parameters.
        """
        if self._trained:
            self._slot.zero_the_rest()
        self._engine.backward.adapters.update(self._adapter_slot.written)
        return self._slot.names_written()


@contextmanager
def trapped_graph() -> Iterator[None]:
    """Context manager: save nothing for a backward pass, so that differentiating the graph made here is an error."""
    # The graph has its nodes, through which the gradient of a kept activation would come, but holds no tensor.
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, reject_gradient):
        yield


def set_traps(leaves: Iterable[torch.Tensor]) -> None:
    """Raise StreamingError if a gradient reaches one of these leaves."""
    for leaf in leaves:
        if leaf.requires_grad:
            leaf.register_hook(reject_gradient)


def reject_gradient(_: Any) -> Any:
    """Raise StreamingError: a gradient has reached a graph that must not be differentiated."""
    raise unexpected_gradient()


def unexpected_gradient() -> StreamingError:
    """Return the error for a gradient that has reached a graph that must not be differentiated."""
    return StreamingError(
        "a loss depends on an activation that a forward hook inside a block kept. A streamed block is recomputed in the "
        "backward pass, so the kept activation gets no gradient. Use output_hidden_states=True, or a hook on the whole block, "
        "whose output keeps its gradient."
    )


def fresh_leaves(
    views: Mapping[str, torch.Tensor], slots: Iterable["GradSlot"], prefix: str = ""
) -> dict[str, torch.Tensor]:
    """Return a leaf for each weight. A hook moves its gradient to the slot that takes it; frozen weights are in no slot.

    Args:
        views: the weights.
        slots: the slots, which know weights by their full names.
        prefix: the beginning of the full names, which the names of the weights lack.
    """
    leaves = {}
    for name, view in views.items():
        # A leaf of this graph alone, whose hook goes with the graph.
        leaf = view.detach()
        for slot in slots:
            if prefix + name in slot.trained:
                # A hook after accumulation: a weight that the block uses several times arrives as one sum, not use by use.
                leaf.requires_grad_().register_post_accumulate_grad_hook(slot.hook(prefix + name))
        leaves[name] = leaf
    return leaves


class GradSlot:
    """A gradient slot, and the trained parameters of a unit whose gradients go to it as wholes. A `GradSink` has two.

    Attributes:
        layout: the layout of the slot.
        trained: full names of the parameters.
        written: those that have received a gradient.
        buffers: the slot, once the computation has begun.

    The hooks refer to this object instead of the sink. A kept graph refers to its leaves, and the leaves to their
    hooks: a reference from here to the engine would close a cycle, and the engine would never be freed.
    """

    buffers: Slot

    def __init__(self, layout: SlotLayout, trained: Set[str]) -> None:
        self.layout, self.trained = layout, trained
        self.written: set[str] = set()

    def view(self, name: str) -> torch.Tensor:
        """Return the place of a parameter's gradient in the slot."""
        return self.layout.view(self.buffers, name)

    def write(self, name: str) -> tuple[torch.Tensor, bool]:
        """Record that a parameter's gradient is about to be written. Return its place in the slot, and whether it must be added to what is
        there: the gradient of another micro-batch, chunk of tokens or batch.
        """
        adds = name in self.written
        self.written.add(name)
        return self.view(name), adds

    def hook(self, name: str) -> Callable[[torch.Tensor], None]:
        """Return the hook that moves the gradient of a parameter's leaf into the slot, and frees it."""

        def take(leaf: torch.Tensor) -> None:
            assert leaf.grad is not None
            target, adds = self.write(name)
            with torch.no_grad():
                # In the dtype of the slot, float32 if the model is opened with micro-batches: their sum is rounded once.
                target.add_(leaf.grad) if adds else target.copy_(leaf.grad)
            leaf.grad = None  # free its memory for the next gradient

        return take

    def zero_the_rest(self) -> None:
        """Fill the parts that no gradient was written to with zeros."""
        # The slot is landed as a whole, and squares are summed over all of it for the norm.
        for name in self.layout:
            if name not in self.written:
                self.view(name).zero_()
        for gap in self.layout.gaps(self.buffers):
            gap.zero_()

    def names_written(self) -> list[str]:
        """Return the full names of the parameters that have received a gradient, in the order of the layout."""
        # The order lets an update merge neighbours into spans (`StepUpdate.spans`).
        return [name for name in self.layout if name in self.written]

    def add_zeros(self) -> None:
        """Add zeros to the gradients, as a micro-batch whose gradients are zero does: they change nothing but -0.0, to 0.0."""
        for name in self.written:
            self.view(name).add_(0.0)

    def round_to(self, dtype: torch.dtype) -> None:
        """Round the gradients to a dtype that is narrower than the slot's."""
        for name in self.written:
            self.view(name).copy_(self.view(name).to(dtype))


class PartialSlot(GradSlot):
    """A `GradSlot` that fills only a part of the place of each gradient, and zeroes no other place: other computations fill the rest.

    Args:
        layout, trained: as in `GradSlot`.
        part: function of a parameter's name and its gradient that returns a view of the part that is filled.
    """

    def __init__(
        self, layout: SlotLayout, trained: Set[str], part: Callable[[str, torch.Tensor], torch.Tensor]
    ) -> None:
        super().__init__(layout, trained)
        self._part = part

    def view(self, name: str) -> torch.Tensor:
        """Return the place of the part of a parameter's gradient in the slot."""
        return self._part(name, super().view(name))

    def zero_the_rest(self) -> None:
        """Fill the parts of these parameters that no gradient was written to with zeros."""
        for name in self.trained - self.written:
            self.view(name).zero_()
