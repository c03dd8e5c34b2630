"""The LM head: its weights, its node in autograd's graph, and the logits of all hidden states (``head="whole"``, and forward passes
whose caller needs logits).

Shapes: B batch rows, T tokens of a row, H hidden size, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from horizon_lm.common.ranges import pieces
from horizon_lm.common.units import HEAD
from horizon_lm.engine.passes.ambient import no_autocast_cache
from horizon_lm.engine.passes.executor import Engine
from horizon_lm.engine.passes.forward_pass import require_forward
from horizon_lm.engine.passes.forward_state import ForwardState
from horizon_lm.engine.passes.lockstep import batched_call
from horizon_lm.engine.units.grad_sink import GradSlot, fresh_leaves
from horizon_lm.engine.units.node import UnitNode
from horizon_lm.model.functional import in_place
from horizon_lm.schedule.ops import Kind


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
        return GradSlot(engine.part_of(HEAD).grad_layout, trained)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (B, T, V) of hidden states (B, T, H). Differentiable if the forward pass records."""
        require_forward(self.engine, "the head")
        logits: torch.Tensor = batched_call("head", hidden, self._project_all)
        return logits

    def _project_all(self, hidden: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Return the logits (B, T, V) of the hidden states (B, T, H) of each batch of the pass."""
        engine = self.engine
        forward_state, outer = engine.recording, self.outer_weights()
        needs_grad = any(t.requires_grad for t in (*hidden, *outer.values()))
        if forward_state is not None and (needs_grad or engine.trained_names(HEAD)):
            runs = [LogitsRun(self) for _ in hidden]
            return [logits for (logits,) in compute_runs(self, forward_state, runs, hidden, outer)]
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


Outer = dict[str, torch.Tensor]
"""Outer parameters that the head computes with, by full name: those of the norm, or the bias of a tied head."""
Grads = tuple[torch.Tensor | None, list[torch.Tensor | None]]
"""Gradients of hidden states (B, T, H), and of each of the outer parameters."""


class HeadRun(ABC):
    """The computation of the head for one batch of a pass: logits, a loss, or log-probabilities."""

    @abstractmethod
    def forward(self, hidden: torch.Tensor, outer: Outer, slot: GradSlot | None) -> tuple[torch.Tensor, ...]:
        """Return the results, from hidden states (B, T, H).

        Args:
            hidden, outer: what the results are computed from.
            slot: the slot of the gradients of the head's weights; None if they are frozen, or if no backward pass can follow.
        """

    @abstractmethod
    def backward(
        self, grads: Sequence[torch.Tensor | None], hidden: torch.Tensor, outer: Outer, slot: GradSlot | None
    ) -> Grads:
        """Return the gradients of hidden states and outer parameters. Gradients of the head's weights go to the slot.

        Args:
            grads: the gradient of each result; None for a result that no loss depends on. At least one is not None.
            hidden, outer, slot: the arguments of `forward`.
        """


def compute_runs(
    head: LmHead, forward_state: ForwardState | None, runs: Sequence[HeadRun], hidden: Sequence[torch.Tensor], outer: Outer
) -> list[tuple[torch.Tensor, ...]]:  # fmt: skip
    """Compute the head for all batches of a pass, whose hidden states are (B, T, H), and return the results of each run.

    Args:
        head: the head.
        forward_state: the state of the forward pass; None if no backward pass can follow.
        runs: the computation of each batch.
        hidden, outer: what they compute with.
    """
    # Outer parameters are inputs of the node, so that autograd hands their gradients to the node of the outer parameters.
    values = _HeadNode(head, forward_state, runs, list(outer)).compute(*outer.values(), *hidden)
    # All runs of a pass have the same number of results.
    return [values[part] for part in pieces(len(values), len(values) // len(runs))]


class _HeadNode(UnitNode):
    """The computations of the head in one pass, one for each batch, whose weights share a gradient slot.

    Args:
        head, forward_state, runs: as in `compute_runs`.
        outer: the names of the outer parameters, which are the first inputs, before the hidden states (B, T, H) of each batch.
    """

    def __init__(
        self, head: LmHead, forward_state: ForwardState | None, runs: Sequence[HeadRun], outer: Sequence[str]
    ) -> None:
        super().__init__(head.engine, forward_state)
        self._runs, self._outer = runs, outer
        self._slot = None if forward_state is None else head.grad_slot()

    def _split(self, inputs: Sequence[Any]) -> tuple[Outer, Sequence[torch.Tensor]]:
        """Return the outer parameters by name, and the hidden states of each batch."""
        count = len(self._outer)
        return dict(zip(self._outer, inputs[:count], strict=True)), inputs[count:]

    def forward(self, inputs: Sequence[torch.Tensor], needs_grad: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        outer, hidden = self._split(inputs)
        with self.engine.cursor.compute(Kind.FORWARD, HEAD):
            if self._slot is not None and self.forward_state is not None and self.forward_state.has_head_grads:
                self._slot.buffers = self.engine.memory.grads_of(HEAD)
            results = [run.forward(states, outer, self._slot) for run, states in zip(self._runs, hidden, strict=True)]
            self.engine.poison_weights(HEAD)
        return tuple(value for each in results for value in each)

    def kept(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return inputs

    def backward(self, grads: Sequence[torch.Tensor | None], kept: Sequence[Any]) -> Sequence[torch.Tensor | None]:
        engine, (outer, hidden) = self.engine, self._split(kept)
        assert self.forward_state is not None
        # The loss that the caller keeps holds this node, whose slot must not stay with it.
        slot, runs, self._slot, self._runs = self._slot, self._runs, None, ()
        outer_grads: list[torch.Tensor | None] = [None] * len(outer)
        hidden_grads: list[torch.Tensor | None] = []
        with engine.cursor.compute(Kind.BACKWARD, HEAD):
            if slot is not None:
                slot.buffers = engine.memory.grads_of(HEAD)
                # Weights that no loss depends on have no gradient, as in plain autograd, even if the forward pass has computed one.
                if not self.forward_state.has_head_grads or all(grad is None for grad in grads):
                    slot.written = set()
            for run, states, part in zip(runs, hidden, pieces(len(grads), len(grads) // len(runs)), strict=True):
                if all(grad is None for grad in grads[part]):
                    hidden_grads.append(None)
                    continue
                hidden_grad, new_outer_grads = run.backward(grads[part], states, outer, slot)
                hidden_grads.append(hidden_grad)
                outer_grads = list(map(_sum_of_grads, outer_grads, new_outer_grads))
            if not self.forward_state.has_head_grads:  # otherwise this pass has not streamed them in
                engine.poison_weights(HEAD)
            if slot is not None:
                slot.zero_the_rest()
                engine.backward.note_written(HEAD, slot.names_written())
        return [*outer_grads, *hidden_grads]


def _sum_of_grads(one: torch.Tensor | None, other: torch.Tensor | None) -> torch.Tensor | None:
    """Return the sum of two gradients, of which None is zero."""
    return other if one is None else one if other is None else one + other


class LogitsRun(HeadRun):
    """The logits of one batch. Their graph is kept without the weights, which are streamed in again for the backward pass."""

    def __init__(self, head: LmHead) -> None:
        self._head = head
        self._graph: tuple[list[torch.Tensor], torch.Tensor] | None = None  # leaves over the inputs, and the logits

    def forward(self, hidden: torch.Tensor, outer: Outer, slot: GradSlot | None) -> tuple[torch.Tensor, ...]:
        """Return the logits (B, T, V), and keep their graph."""
        head = self._head
        pack, unpack = _without_weights(head.engine.memory.weights_of(HEAD))
        with torch.enable_grad(), no_autocast_cache():
            # A graph apart from autograd's, because its weights are in a buffer that other units will use. Hidden states are the last leaf.
            leaves = [each.detach().requires_grad_(each.requires_grad) for each in (*outer.values(), hidden)]
            weights = fresh_leaves(head.weights(), [] if slot is None else [slot])
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                logits = head.run(weights | dict(zip(outer, leaves, strict=False)), leaves[-1])
        self._graph = leaves, logits
        return (logits.detach(),)

    def backward(
        self, grads: Sequence[torch.Tensor | None], hidden: torch.Tensor, outer: Outer, slot: GradSlot | None
    ) -> Grads:
        assert self._graph is not None
        # Graph and logits (B, T, V) are dropped here, as autograd drops what it has saved.
        (leaves, logits), self._graph = self._graph, None
        with torch.enable_grad():
            torch.autograd.backward([logits], list(grads))
        *outer_grads, hidden_grad = [leaf.grad for leaf in leaves]
        return hidden_grad, outer_grads


class _ViewOfWeights(NamedTuple):
    """The geometry of a view of weights in a buffer, which is identified by the address of its storage."""

    storage: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


def _without_weights(
    buffers: Sequence[torch.Tensor],
) -> tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]:
    """Return the hooks (pack, unpack) for the tensors that a graph saves. Of a view of weights in these buffers only the geometry is kept.

    Other units use the buffers until the backward pass, for which the same weights are streamed into the same places again.
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
