"""The head: the output projection, called once with all hidden states (mode ``whole``, and wherever logits are wanted)."""

from collections.abc import Callable
from typing import Any

import torch

from horizon_lm.engine.engine import Engine
from horizon_lm.engine.handle import ForwardHandle
from horizon_lm.engine.replay import no_autocast_cache
from horizon_lm.model.skeleton import meta_copy
from horizon_lm.schedule.ops import HEAD, Kind


class Head:
    """Streams the output projection of a model."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        parts = engine.parts
        self._module = meta_copy(parts.head)
        self._layout = engine.slabs(HEAD).layout
        self._attributes = {
            name: attribute
            for name in self._layout
            for module, attribute in engine.refs[name].places
            if module is parts.head
        }
        self.vocabulary = self._layout.entries[next(iter(self._attributes))].shape[0]

    def weights(self) -> dict[str, torch.Tensor]:
        """Views of the streamed weights, by the attribute of the head module."""
        buffer = self.engine.memory.head_weights[0]
        return {attribute: self._layout.view(buffer, name) for name, attribute in self._attributes.items()}

    def grads(self) -> dict[str, torch.Tensor]:
        """Views of the gradient buffer, likewise, for what is trained."""
        trainable = set(self.engine.trainable(HEAD))
        if not trainable:
            return {}
        layout, buffer = self.engine.slabs(HEAD).grad_layout, self.engine.memory.head_grads[0]
        return {a: layout.view(buffer, name) for name, a in self._attributes.items() if name in trainable}

    def zero_gaps(self) -> None:
        if self.grads():
            for gap in self.engine.slabs(HEAD).grad_layout.gaps(self.engine.memory.head_grads[0]):
                gap.zero_()

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of all hidden states, differentiable when the forward records."""
        self.engine.require_forward(HEAD)
        handle = self.engine.handle
        if handle is not None and (hidden.requires_grad or self.engine.trainable(HEAD)):
            return _ProjectFunction.apply(_Projection(self, handle), hidden, self.engine.anchor)
        with self.engine.cursor.compute(Kind.FORWARD, HEAD), torch.no_grad(), no_autocast_cache():
            logits = self.run(self.weights(), hidden)
            self.engine.device.poison(self.engine.memory.head_weights[0])
        return logits

    def run(self, weights: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """The model's own head module with these weights, which it does not keep."""
        self._module._parameters.update(weights)  # type: ignore[arg-type]
        try:
            return self._module.forward(hidden)
        finally:
            self._module._parameters.update(dict.fromkeys(weights))


class _Projection:
    """One call of the head, with its graph but without the weights: they are streamed in again for the backward."""

    def __init__(self, head: Head, handle: ForwardHandle) -> None:
        self.head, self.handle = head, handle
        self.graph: tuple[torch.Tensor, torch.Tensor]  # (hidden leaf, logits)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
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
            leaf = hidden.detach().requires_grad_()
            trained = head.grads()
            weights = {a: w.detach().requires_grad_(a in trained) for a, w in head.weights().items()}
            for attribute in trained:
                weights[attribute].register_post_accumulate_grad_hook(_landing(head, attribute))
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                logits = head.run(weights, leaf)
            self.graph = (leaf, logits)
            engine.device.poison(buffer)
        return logits.detach()

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        head, engine = self.head, self.head.engine
        leaf, logits = self.graph
        del self.graph
        with engine.cursor.compute(Kind.BACKWARD, HEAD):
            head.zero_gaps()
            with torch.enable_grad():
                torch.autograd.backward([logits], [grad])
            engine.device.poison(engine.memory.head_weights[0])
        if head.grads():
            engine.landed(HEAD)
        return leaf.grad


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
    def forward(ctx: Any, projection: _Projection, hidden: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.projection = projection
        return projection.forward(hidden)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        projection: _Projection = ctx.projection
        with projection.head.engine.backward_of(projection.handle):
            hidden_grad = projection.backward(grad)
        return None, hidden_grad, None
