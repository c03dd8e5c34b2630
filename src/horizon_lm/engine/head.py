"""The head: the output projection, called once with all hidden states (mode ``whole``, and wherever logits are wanted)."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from horizon_lm.engine.engine import Engine
from horizon_lm.engine.handle import ForwardHandle
from horizon_lm.engine.replay import no_autocast_cache
from horizon_lm.model.places import in_place
from horizon_lm.schedule.ops import HEAD, Kind


class Head:
    """Streams the output projection of a model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.module = module = engine.parts.head
        self._layout = engine.slabs(HEAD).layout
        self._attributes = {
            name: attribute for name in self._layout for owner, attribute in engine.refs[name].places if owner is module
        }
        # A bias beside a tied weight is an outer parameter, which is on the device already.
        self.outer = {
            a: n for n, ref in engine.refs.items() for m, a in ref.places if m is module and n not in self._layout
        }
        self.vocabulary = self._layout.entries[next(iter(self._attributes))].shape[0]

    def weights(self) -> dict[str, torch.Tensor]:
        """Views of the streamed weights, by the attribute of the head module."""
        buffer = self.engine.memory.head_weights[0]
        return {attribute: self._layout.view(buffer, name) for name, attribute in self._attributes.items()}

    def weight_names(self) -> list[str]:
        """Attributes of the head module that are streamed."""
        return list(self._attributes.values())

    def outer_weights(self) -> dict[str, torch.Tensor]:
        """Outer parameters of the head module, as they are on the device in a forward."""
        return {attribute: self.module._parameters[attribute] for attribute in self.outer}  # type: ignore[misc]

    def grads(self) -> dict[str, torch.Tensor]:
        """Views of the gradient buffer, likewise, for what is trained."""
        trained = set(self.engine.trained(HEAD))
        if not trained:
            return {}
        layout, buffer = self.engine.slabs(HEAD).grad_layout, self.engine.memory.head_grads[0]
        return {a: layout.view(buffer, name) for name, a in self._attributes.items() if name in trained}

    def landed(self) -> None:
        """All gradients of the head are in their buffer."""
        if self.grads():
            for gap in self.engine.slabs(HEAD).grad_layout.gaps(self.engine.memory.head_grads[0]):
                gap.zero_()
            trained = set(self.engine.trained(HEAD))
            self.engine.landed(HEAD, [name for name in self._attributes if name in trained])

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of all hidden states, differentiable when the forward records."""
        engine = self.engine
        engine.require_forward("the head")
        handle, outer = engine.handle, self.outer_weights()
        needs_grad = hidden.requires_grad or any(t.requires_grad for t in outer.values())
        if handle is not None and (needs_grad or engine.trained(HEAD)):
            projection = _Projection(self, handle, list(outer))
            return _ProjectFunction.apply(projection, engine.anchor, hidden, *outer.values())
        with engine.cursor.compute(Kind.FORWARD, HEAD), torch.no_grad(), no_autocast_cache():
            logits = self.run(self.weights(), hidden)
            engine.device.poison(engine.memory.head_weights[0])
        return logits

    def run(self, weights: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """The model's own head module with these weights."""
        with in_place((self.module, attribute, weight) for attribute, weight in weights.items()):
            logits: torch.Tensor = type(self.module).forward(self.module, hidden)
        return logits


class _Projection:
    """One call of the head, with its graph but without the weights: they are streamed in again for the backward."""

    def __init__(self, head: Head, handle: ForwardHandle, outer: list[str]) -> None:
        self.head, self.handle, self._outer = head, handle, outer
        self.graph: tuple[list[torch.Tensor], torch.Tensor]  # input leaves, logits

    def forward(self, needs_grad: tuple[bool, ...], hidden: torch.Tensor, *outer: torch.Tensor) -> torch.Tensor:
        head, engine = self.head, self.head.engine
        buffer = engine.memory.head_weights[0]
        storage = buffer.untyped_storage().data_ptr()

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.untyped_storage().data_ptr() != storage:
                return tensor
            return tensor.size(), tensor.stride(), tensor.storage_offset()

        def unpack(saved: Any) -> torch.Tensor:
            return torch.as_strided(buffer, *saved) if isinstance(saved, tuple) else saved

        with engine.cursor.compute(Kind.FORWARD, HEAD), torch.enable_grad(), no_autocast_cache():
            leaves = [t.detach().requires_grad_(need) for t, need in zip((hidden, *outer), needs_grad, strict=True)]
            trained = head.grads()
            weights = {a: w.detach().requires_grad_(a in trained) for a, w in head.weights().items()}
            for attribute in trained:
                weights[attribute].register_post_accumulate_grad_hook(_landing(head, attribute))
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                logits = head.run(weights | dict(zip(self._outer, leaves[1:], strict=True)), leaves[0])
            self.graph = (leaves, logits)
            engine.device.poison(buffer)
        return logits.detach()

    def backward(self, grad: torch.Tensor) -> list[torch.Tensor | None]:
        head, engine = self.head, self.head.engine
        leaves, logits = self.graph
        del self.graph
        with engine.cursor.compute(Kind.BACKWARD, HEAD):
            with torch.enable_grad():
                torch.autograd.backward([logits], [grad])
            engine.device.poison(engine.memory.head_weights[0])
            head.landed()
        return [leaf.grad for leaf in leaves]


def _landing(head: Head, attribute: str) -> Callable[[torch.Tensor], None]:
    """A hook that moves a gradient into its buffer. It must not know the graph that knows it: nothing would free them."""

    def take(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        with torch.no_grad():
            head.grads()[attribute].copy_(leaf.grad)
        leaf.grad = None

    return take


class _ProjectFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, projection: _Projection, anchor: torch.Tensor, hidden: torch.Tensor, *outer: torch.Tensor
    ) -> torch.Tensor:
        ctx.projection = projection
        return projection.forward(ctx.needs_input_grad[2:], hidden, *outer)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        projection: _Projection = ctx.projection
        with projection.head.engine.backward_of(projection.handle):
            grads = projection.backward(grad)
        return None, None, *grads
