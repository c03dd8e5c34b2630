"""Computations over the chunks of each batch of a pass, as one autograd node: losses, or log-probabilities.

Shapes: B batch rows, T tokens of a row, N tokens of a chunk, H hidden size, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from horizon_lm.engine.passes.ambient import RecomputeAmbient, no_autocast_cache
from horizon_lm.engine.units.chunked_lm_head import Chunk, ChunkedLmHead
from horizon_lm.engine.units.loss_inputs import LossInputs
from horizon_lm.engine.units.node import UnitNode
from horizon_lm.engine.units.token_statistics import TokenStatistics
from horizon_lm.errors import TokenError
from horizon_lm.ranges import pieces
from horizon_lm.schedule.ops import Kind
from horizon_lm.units import HEAD

Grads = tuple[torch.Tensor, list[torch.Tensor]]  # of hidden states (B, T, H), and of outer parameters


class ChunkedRun(ABC):
    """A computation over the chunks of one batch: a loss, or log-probabilities.

    Args:
        owner: the chunked head.
        inputs: labels and the like.
        options: further arguments of the model's forward method.
        statistics: collects statistics of the tokens in the forward pass; None for none.

    Attributes:
        context: autocast and the like in the forward pass.
    """

    def __init__(
        self,
        owner: ChunkedLmHead,
        inputs: LossInputs,
        options: dict[str, Any],
        statistics: TokenStatistics | None = None,
    ) -> None:
        self.owner, self.engine, self.inputs, self.forward_state = owner, owner.engine, inputs, owner.engine.recording
        self.outer_names = owner.outer_names()
        self._options, self.statistics = options, statistics
        if statistics is not None:
            statistics.begin(inputs.labels, self.engine.options.compile)
        self.context = RecomputeAmbient()

    @abstractmethod
    def forward(self, hidden: torch.Tensor, outer: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Compute all chunks from hidden states (B, T, H) and the outer parameters of `outer_names`."""

    @abstractmethod
    def backward(
        self, grads: Sequence[torch.Tensor | None], hidden: torch.Tensor, outer: list[torch.Tensor], overwrite: bool
    ) -> Grads:
        """Return the gradients of the arguments of `forward` from the gradients of its results. Those of the head go to its buffers.

        Args:
            grads: the gradient of each result; None for a result that no loss depends on.
            hidden, outer: the arguments of `forward`.
            overwrite: overwrite the buffers of the head's gradients, because no other batch has written to them.
        """

    def chunks(self) -> tuple[torch.Tensor, ...]:
        """Return the positions of each chunk's tokens in the flattened batch, each of shape (N,)."""
        return self.inputs.trained.split(self.owner.chunk_tokens) if len(self.inputs.trained) else ()

    def call_model(
        self, hidden: torch.Tensor, outer: list[torch.Tensor], grads: dict[str, torch.Tensor] | None, overwrite: bool,
        **arguments: Any,
    ) -> Any:  # fmt: skip
        """Run the model's forward method on the hidden states (N, H) of a chunk.

        Args:
            hidden: the chunk's hidden states.
            outer: the outer parameters of `outer_names`.
            grads: the buffers to which a backward pass adds the head's gradients; None if there is no backward pass.
            overwrite: overwrite these buffers instead.
            arguments: arguments of the forward method.
        """
        by_name = dict(zip(self.outer_names, outer, strict=True))
        with self.owner.computing(Chunk(self.owner, hidden[None], by_name, grads or {}, overwrite)):
            return self.owner.call_model(**arguments, **self._options)

    def differentiate(
        self, hidden: torch.Tensor, outer: list[torch.Tensor], differentiate_chunk: Callable[..., None], overwrite: bool
    ) -> Grads:
        """Compute and differentiate chunk by chunk, so that only one chunk's logits and graph exist at a time. Return the gradients
        of the hidden states and of the outer parameters.

        Args:
            hidden: hidden states (B, T, H).
            outer: the outer parameters of `outer_names`.
            differentiate_chunk: called with hidden states (N, H), positions (N,), outer parameters, the head's gradient
                buffers, and whether to overwrite them; computes the chunk and calls backward.
            overwrite: overwrite the head's gradient buffers with the first chunk.
        """
        flat, grads = hidden.detach().reshape(-1, hidden.shape[-1]), self.owner.head.grads()  # (B * T, H)
        chunks = self.chunks()
        if overwrite and not chunks:  # there is no first chunk that would
            for tensor in grads.values():
                tensor.zero_()
        hidden_grad = torch.zeros_like(flat)  # zero for tokens in no chunk
        # One leaf for all chunks, so that their gradients are summed.
        leaves = [w.detach().requires_grad_() for w in outer]
        with torch.enable_grad(), no_autocast_cache():
            for number, index in enumerate(chunks):
                # A copy of the chunk's rows, and the leaf of its graph, which ends here.
                leaf = flat[index].requires_grad_()  # (N, H)
                differentiate_chunk(leaf, index, leaves, grads, overwrite and number == 0)
                hidden_grad[index] = leaf.grad if leaf.grad is not None else 0
        outer_grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in leaves]
        return hidden_grad.view(hidden.shape), outer_grads


def compute(
    runs: Sequence[ChunkedRun], hidden: Sequence[torch.Tensor], outer: dict[str, torch.Tensor]
) -> list[tuple[torch.Tensor, ...]]:
    """Compute the chunks of all batches. Differentiable if the forward pass records.

    Args:
        runs: the computation of each batch's chunks.
        hidden: the hidden states (B, T, H) of each batch.
        outer: the outer parameters on the device, by full name.

    Returns:
        The results of each run.
    """
    for run, states in zip(runs, hidden, strict=True):
        if states.shape[:2] != run.inputs.labels.shape:
            raise TokenError(
                f"labels have shape {tuple(run.inputs.labels.shape)}, but the model computed "
                f"{tuple(states.shape[:2])} tokens"
            )
    # They are inputs of the node, so that autograd hands their gradients to the node of the outer parameters.
    used = [outer[name] for name in runs[0].outer_names]
    values = _ChunkedPass(runs).compute(*used, *hidden)
    per_run = len(values) // len(runs)
    return [values[part] for part in pieces(len(values), per_run)]


class _ChunkedPass(UnitNode):
    """The chunks of all batches of a forward pass.

    Args:
        runs: those of all batches, at least one. They share engine, head, forward state and outer parameters.
    """

    def __init__(self, runs: Sequence[ChunkedRun]) -> None:
        first = runs[0]
        super().__init__(first.engine, first.forward_state)
        self.runs, self.head, self.num_outer = runs, first.owner.head, len(first.outer_names)

    def forward(self, inputs: Sequence[torch.Tensor], needs_grad: Sequence[bool]) -> tuple[torch.Tensor, ...]:
        """Compute all runs, given the outer parameters and then the hidden states (B, T, H) of each batch."""
        outer, hidden = list(inputs[: self.num_outer]), inputs[self.num_outer :]
        with self.engine.cursor.compute(Kind.FORWARD, HEAD):
            values = [run.forward(states, outer) for run, states in zip(self.runs, hidden, strict=True)]
            self.engine.poison_weights(HEAD)
        return tuple(value for each in values for value in each)

    def kept(self, inputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        return inputs

    def backward(self, grads: Sequence[torch.Tensor | None], kept: Sequence[Any]) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the inputs of `forward` from the gradients of its results."""
        outer, hidden = list(kept[: self.num_outer]), kept[self.num_outer :]
        per_run = len(grads) // len(self.runs)
        written = False  # the buffers of the head's gradients
        outer_grads: list[torch.Tensor] = []
        hidden_grads: list[torch.Tensor | None] = []
        with self.engine.cursor.compute(Kind.BACKWARD, HEAD):
            # All runs share the buffers of the head's gradients. Each run overwrites them until one has had chunks.
            for number, (run, states) in enumerate(zip(self.runs, hidden, strict=True)):
                part = grads[number * per_run : (number + 1) * per_run]
                if all(grad is None for grad in part):
                    hidden_grads.append(None)
                    continue
                hidden_grad, more = run.backward(part, states, outer, overwrite=not written)
                hidden_grads.append(hidden_grad)
                outer_grads = [a + b for a, b in zip(outer_grads, more, strict=True)] if outer_grads else more
                written = written or bool(run.chunks())
            assert self.forward_state is not None
            if not self.forward_state.has_head_grads:  # otherwise this pass has not streamed them in
                self.engine.poison_weights(HEAD)
            # Where a loss depends on no result, the weights have no gradient either, as in plain autograd.
            self.head.note_written(set() if all(grad is None for grad in grads) else None)
        no_grads: list[torch.Tensor | None] = [None] * self.num_outer
        return [*(outer_grads or no_grads), *hidden_grads]
