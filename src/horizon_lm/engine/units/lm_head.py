"""The LM head over all hidden states: ``head="whole"``, and forward passes whose caller needs logits.

Shapes: B batch rows, T tokens of a row, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import nn

from horizon_lm.engine.passes.ambient import no_autocast_cache
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.forward_pass import require_forward
from horizon_lm.engine.passes.forward_state import ForwardState
from horizon_lm.engine.passes.lockstep import compute_jointly
from horizon_lm.engine.units.grad_sink import GradSlot, fresh_leaves
from horizon_lm.engine.units.node import UnitNode
from horizon_lm.model.functional import in_place
from horizon_lm.schedule.ops import Kind
from horizon_lm.units import HEAD


class LmHead:
    """The streamed output projection of a model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.module = engine.parts.head
        modules = {id(module) for module in self.module.modules()}  # several if an adapter wraps the projection
        # The modules of the head, and their attributes, that hold a parameter.
        places = {
            name: [(module, attribute) for module, attribute in ref.places if id(module) in modules]
            for name, ref in engine.refs.items()
        }
        streamed = list(engine.slabs(HEAD).layout)
        self._streamed_places = {name: places[name] for name in streamed if places[name]}
        # A head with a tied weight uses the embedding's slab; its bias is then an outer parameter, already on the
        # device.
        self.outer_places = {name: found for name, found in places.items() if found and name not in streamed}

    def weights(self) -> dict[str, torch.Tensor]:
        """Return views of the streamed weights, by full name."""
        views = self.engine.weights_on_device(HEAD)
        return {name: views[name] for name in self._streamed_places}

    def streamed_places(self) -> list[tuple[nn.Module, str]]:
        """Return the modules and attributes that hold the head's streamed weights."""
        return [place for places in self._streamed_places.values() for place in places]

    def outer_weights(self) -> dict[str, torch.Tensor]:
        """Return the outer parameters of the head's modules on the device, by full name."""
        # All places of a parameter hold the same tensor, so the first one will do.
        places = {name: found[0] for name, found in self.outer_places.items()}
        return {name: module._parameters[attribute] for name, (module, attribute) in places.items()}  # type: ignore[misc]

    def grad_slot(self) -> GradSlot | None:
        """Return the slot of the gradients of the trained weights; None if there are none."""
        engine = self.engine
        trained = self._streamed_places.keys() & set(engine.trained_names(HEAD))
        if not trained:
            return None
        slot = GradSlot(engine.part_of(HEAD).grad_layout, trained)
        slot.buffers = engine.memory.grads_of(HEAD)
        return slot

    def grads(self) -> dict[str, torch.Tensor]:
        """Return views of the gradient buffers for the trained weights, by full name."""
        slot = self.grad_slot()
        return {} if slot is None else {name: slot.view(name) for name in slot.layout if name in slot.trained}

    def note_written(self, written: Set[str] | None = None) -> None:
        """Record that the head's gradients are in their slot, and zero the rest of the slot.

        Args:
            written: full names of the weights that received a gradient; None for all trained weights.
        """
        slot = self.grad_slot()
        if slot is not None:
            slot.written |= slot.trained if written is None else slot.trained & written
            slot.zero_the_rest()
            self.engine.backward.note_written(HEAD, slot.names_written())

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, T, V) of hidden states (B, T, H). Differentiable if the forward pass records."""
        require_forward(self.engine, "the head")
        logits: torch.Tensor = compute_jointly("head", hidden, self._project_all)
        return logits

    def _project_all(self, hidden: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the logits (B, T, V) of the hidden states (B, T, H) of each batch of the pass."""
        engine = self.engine
        forward_state, outer = engine.recording, self.outer_weights()
        needs_grad = any(t.requires_grad for t in (*hidden, *outer.values()))
        if forward_state is not None and (needs_grad or engine.trained_names(HEAD)):
            return _Projection(self, forward_state, list(outer)).compute(*outer.values(), *hidden)
        with engine.cursor.compute(Kind.FORWARD, HEAD), torch.no_grad(), no_autocast_cache():
            # Parameters, as in the plain model: for another tensor, matmul computes a slice of hidden states, such as the last
            # tokens of prompts, by another kernel, which rounds otherwise.
            weights = {
                name: nn.Parameter(view, engine.refs[name].param.requires_grad) for name, view in self.weights().items()
            }
            logits = [self.run(weights, each) for each in hidden]
            engine.poison_weights(HEAD)
        return logits

    def run(self, weights: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """Run the model's head module with these weights, given by full name."""
        # The forward of the class, because that of the instance is replaced.
        places = self._streamed_places | self.outer_places
        with in_place((*place, weight) for name, weight in weights.items() for place in places[name]):
            logits: torch.Tensor = type(self.module).forward(self.module, hidden)
        return logits


class _ViewOfWeights(NamedTuple):
    """The geometry of a view of weights in a buffer, which is identified by the address of its storage."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def _without_weights(
    buffers: Sequence[torch.Tensor],
) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Return the hooks for what a graph saves, which keep of weights in these buffers only the geometry of their views.

    The backward pass finds the same values in the same buffers, which other units use in between.
    """
    by_storage = {buffer.untyped_storage().data_ptr(): buffer for buffer in buffers}

    def pack(tensor: torch.Tensor) -> torch.Tensor | _ViewOfWeights:
        storage = tensor.untyped_storage().data_ptr()
        if storage not in by_storage:
            return tensor
        return _ViewOfWeights(storage, tensor.size(), tensor.stride(), tensor.storage_offset())

    def unpack(saved: torch.Tensor | _ViewOfWeights) -> torch.Tensor:
        if isinstance(saved, torch.Tensor):
            return saved
        return torch.as_strided(by_storage[saved.storage], saved.size, saved.stride, saved.offset)

    return pack, unpack


class _Projection(UnitNode):
    """The calls of the head in a pass. Their graph is kept without the weights, which are streamed in again for the
    backward pass.
    """

    def __init__(self, head: LmHead, forward_state: ForwardState, outer: list[str]) -> None:
        super().__init__(head.engine, forward_state)
        self.head, self._outer = head, outer
        self.graph: tuple[list[torch.Tensor], list[torch.Tensor]]  # leaves over the inputs, and the logits
        self._slot = head.grad_slot()

    def forward(self, inputs: Sequence[torch.Tensor], needs_grad: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        """Return the logits of each batch and keep their graph. The inputs are the outer parameters of the head's modules, then the
        hidden states (B, T, H) of each batch.
        """
        head, engine = self.head, self.engine
        pack, unpack = _without_weights(engine.memory.weights_of(HEAD))
        with engine.cursor.compute(Kind.FORWARD, HEAD), torch.enable_grad(), no_autocast_cache():
            # A separate graph, detached from autograd's: its weights are in a buffer that other units will use.
            leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs_grad, strict=True)]
            outer = dict(zip(self._outer, leaves[: len(self._outer)], strict=True))
            weights = fresh_leaves(head.weights(), [] if self._slot is None else [self._slot])
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                logits = [head.run(weights | outer, hidden) for hidden in leaves[len(outer) :]]
            self.graph = (leaves, logits)
            engine.poison_weights(HEAD)
        return tuple(each.detach() for each in logits)

    def backward(
        self, grads: Sequence[torch.Tensor | None], kept: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs, given the gradient of each batch's logits (B, T, V)."""
        head, engine = self.head, self.engine
        # A loss that the caller keeps holds this node. Its graph and logits (B, T, V) are dropped here, as autograd drops what it
        # has saved.
        (leaves, logits), slot = self.graph, self._slot
        del self.graph, self._slot
        with engine.cursor.compute(Kind.BACKWARD, HEAD):
            with torch.enable_grad():
                for each, grad in zip(logits, grads, strict=True):  # summed in this order
                    if grad is not None:
                        torch.autograd.backward([each], [grad])
            engine.poison_weights(HEAD)
            # A batch whose loss does not depend on its logits leaves weights without a gradient, as in plain
            # autograd.
            head.note_written(set() if slot is None else slot.written)
        return [leaf.grad for leaf in leaves]
