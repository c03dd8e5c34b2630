"""The LM head over all hidden states: ``head="whole"``, and forward passes whose caller needs logits.

Shapes: B batch rows, T tokens of a row, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.forward_pass import require_forward
from horizon_lm.engine.passes.forward_state import ForwardState
from horizon_lm.engine.passes.lockstep import compute_jointly
from horizon_lm.engine.passes.recompute import no_autocast_cache
from horizon_lm.model.functional import in_place
from horizon_lm.schedule.ops import Kind
from horizon_lm.store.unit_slabs import SlabLayout
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
        streamed = [name for part in engine.store.parts_of(HEAD) for name in engine.slabs(part).layout]
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
        return {name: module._parameters[a] for name, ((module, a), *_) in self.outer_places.items()}  # type: ignore[misc]

    def grads(self) -> dict[str, torch.Tensor]:
        """Return views of the gradient buffers for the trained weights, by full name."""
        trained = set(self.engine.trained_names(HEAD))
        if not trained:
            return {}
        return {
            name: layout.view(buffer, name)
            for layout, buffer in self._grad_buffers()
            for name in layout
            if name in self._streamed_places and name in trained
        }

    def _grad_buffers(self) -> list[tuple[SlabLayout, torch.Tensor]]:
        """Return the buffers in which the head's gradients are computed, with their layouts."""
        engine = self.engine
        return [(engine.slabs(part).grad_layout, engine.memory.grads_of(part)) for part in engine.trained_parts(HEAD)]

    def gradients_ready(self, names: Collection[str] | None = None) -> None:
        """Record that the head's gradients are in their buffer, and zero the rest of the buffer.

        Args:
            names: full names of the weights that received a gradient; None for all trained weights.
        """
        grads = self.grads()
        if grads:
            unused = [grad for name, grad in grads.items() if names is not None and name not in names]
            gaps = [gap for layout, buffer in self._grad_buffers() for gap in layout.gaps(buffer)]
            for part in (*unused, *gaps):
                part.zero_()
            self.engine.backward.gradients_ready(HEAD, [name for name in grads if names is None or name in names])

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
            projection = _Projection(self, forward_state, list(outer))
            differentiable: tuple[torch.Tensor, ...] = _ProjectFunction.apply(
                projection, engine.anchor, *outer.values(), *hidden
            )
            return differentiable
        with engine.cursor.compute(Kind.FORWARD, HEAD), torch.no_grad(), no_autocast_cache():
            # Parameters, because matmul rounds a slice of hidden states, such as the last tokens of prompts, by another kernel if
            # the weight is none.
            weights = {
                name: nn.Parameter(view, engine.refs[name].param.requires_grad) for name, view in self.weights().items()
            }
            logits = [self.run(weights, each) for each in hidden]
            engine.poison_weights(HEAD)
        return logits

    def run(self, weights: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """Run the model's head module with these weights, given by full name."""
        # By the class, because the forward of the instance is the replaced one.
        places = self._streamed_places | self.outer_places
        with in_place((*place, weight) for name, weight in weights.items() for place in places[name]):
            logits: torch.Tensor = type(self.module).forward(self.module, hidden)
        return logits


class _Projection:
    """The calls of the head in a pass. Their graph is kept without the weights, which are streamed in again for the
    backward pass.
    """

    def __init__(self, head: LmHead, forward_state: ForwardState, outer: list[str]) -> None:
        self.head, self.forward_state, self._outer = head, forward_state, outer
        self.graph: tuple[list[torch.Tensor], list[torch.Tensor]]  # leaves over the inputs, and the logits
        self._written: set[str] = set()  # full names of the weights that received a gradient

    def forward(self, needs_grad: tuple[bool, ...], *inputs: torch.Tensor) -> list[torch.Tensor]:
        """Return the logits of each batch and keep their graph.

        Args:
            needs_grad: for each of the inputs, whether it needs a gradient.
            inputs: outer parameters of the head's modules, then the hidden states (B, T, H) of each batch.
        """
        head, engine = self.head, self.head.engine
        buffers = {
            buffer.untyped_storage().data_ptr(): buffer
            for buffer in (engine.memory.weights_of(part) for part in engine.store.parts_of(HEAD))
        }

        # Of saved weights only the geometry of the view is kept: the backward pass finds the same values in the same
        # buffer, which other units use in between.
        def pack(tensor: torch.Tensor) -> Any:
            storage = tensor.untyped_storage().data_ptr()
            if storage not in buffers:
                return tensor
            return storage, tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(saved: Any) -> torch.Tensor:
            return torch.as_strided(buffers[saved[0]], *saved[1:]) if isinstance(saved, tuple) else saved

        with engine.cursor.compute(Kind.FORWARD, HEAD), torch.enable_grad(), no_autocast_cache():
            # A separate graph, detached from autograd's: its weights are in a buffer that other units will use.
            leaves = [t.detach().requires_grad_(need) for t, need in zip(inputs, needs_grad, strict=True)]
            outer = dict(zip(self._outer, leaves, strict=False))  # after which the leaves of the hidden states follow
            trained = head.grads()
            weights = {name: w.detach().requires_grad_(name in trained) for name, w in head.weights().items()}
            for name in trained:
                weights[name].register_post_accumulate_grad_hook(_moving_hook(head, name, self._written))
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                logits = [head.run(weights | outer, hidden) for hidden in leaves[len(outer) :]]
            self.graph = (leaves, logits)
            engine.poison_weights(HEAD)
        return [each.detach() for each in logits]

    def backward(self, grads: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs, given the gradient of each batch's logits (B, T, V)."""
        head, engine = self.head, self.head.engine
        # The loss that the caller keeps holds this node; its graph and the logits (B, T, V) must end here, as what
        # autograd saves.
        leaves, logits = self.graph
        del self.graph
        with engine.cursor.compute(Kind.BACKWARD, HEAD):
            with torch.enable_grad():
                for each, grad in zip(logits, grads, strict=True):  # summed in this order
                    if grad is not None:
                        torch.autograd.backward([each], [grad])
            engine.poison_weights(HEAD)
            # A batch whose loss does not depend on its logits leaves weights without a gradient, as in plain
            # autograd.
            head.gradients_ready(self._written)
        return [leaf.grad for leaf in leaves]


def _moving_hook(head: LmHead, name: str, written: set[str]) -> Callable[[torch.Tensor], None]:
    """Return a hook that moves a gradient into the head's buffer.

    It refers only to the set of written names, not to the projection: the graph refers to the hook, and a reference
    back to the graph would close a cycle that is never freed.
    """

    def take(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        with torch.no_grad():
            total = head.grads()[name]
            total.add_(leaf.grad) if name in written else total.copy_(leaf.grad)
        written.add(name)
        leaf.grad = None

    return take


class _ProjectFunction(torch.autograd.Function):
    """The autograd node of the head."""

    @staticmethod
    def forward(
        ctx: Any, projection: _Projection, anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.projection = projection
        ctx.set_materialize_grads(False)
        return tuple(projection.forward(ctx.needs_input_grad[2:], *inputs))

    @staticmethod
    def backward(ctx: Any, *logit_grads: torch.Tensor | None) -> tuple[Any, ...]:
        projection: _Projection = ctx.projection
        with projection.head.engine.backward_of(projection.forward_state):
            grads = projection.backward(logit_grads)
        return None, None, *grads
