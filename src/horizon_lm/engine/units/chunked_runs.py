"""Losses and log-probabilities over chunks of tokens, which avoids computing all logits of a batch.

Shapes: B batch rows, T tokens of a row, N tokens of a chunk, H hidden size, V vocabulary.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from horizon_lm.engine.passes.ambient import RecomputeAmbient, no_autocast_cache
from horizon_lm.engine.units.chunked_lm_head import Chunk, ChunkedLmHead
from horizon_lm.engine.units.grad_sink import GradSlot
from horizon_lm.engine.units.lm_head import Grads, HeadRun, Outer
from horizon_lm.engine.units.loss_inputs import LossInputs
from horizon_lm.engine.units.token_statistics import TokenStatistics
from horizon_lm.model.compiling import compiled_loss
from horizon_lm.model.functional import logprobs_of_logits


class ChunkedRun(HeadRun):
    """A computation over the chunks of one batch: a loss, or log-probabilities.

    Args:
        owner: the chunked head.
        inputs: labels and the like.
        options: further arguments of the model's forward method.
        statistics: collects statistics of the tokens in the forward pass; None for none.
    """

    def __init__(
        self, owner: ChunkedLmHead, inputs: LossInputs, options: dict[str, Any], statistics: TokenStatistics | None = None
    ) -> None:  # fmt: skip
        self.owner, self.inputs, self._options, self.statistics = owner, inputs, options, statistics
        self.forward_state, self.is_compiled = owner.engine.recording, owner.engine.options.compile
        if statistics is not None:
            statistics.begin(inputs.labels, self.is_compiled)
        self.context = RecomputeAmbient()  # autocast and the like in the forward pass
        self._results: list[torch.Tensor] = []  # of the running forward pass

    @abstractmethod
    def chunk_values(self, chunk: Chunk, index: torch.Tensor, names: Sequence[str]) -> list[torch.Tensor]:
        """Compute a chunk. Return its values in the order of ``names``, all from the same logits; a `LossRun` has one value, the loss.

        Args:
            chunk: the chunk.
            index: the positions (N,) of its tokens in the flattened batch.
            names: the names of the values.
        """

    @abstractmethod
    def collect(self, index: torch.Tensor, values: list[torch.Tensor]) -> None:
        """Add the values of a chunk to the results of the running forward pass. In the backward pass there are no results."""

    def take_results(self) -> tuple[torch.Tensor, ...]:
        """Return the results, and forget them, because autograd lets them refer to this run."""
        results, self._results = self._results, []
        self.statistics = None  # collected once: the backward pass may compute the same logits again
        return tuple(results)

    def call_model(self, chunk: Chunk, **arguments: Any) -> Any:
        """Run the model's forward method on a chunk."""
        with self.owner.computing(chunk):
            return self.owner.call_model(**arguments, **self._options)

    def compute(self, hidden: torch.Tensor, outer: Outer, names: Sequence[str]) -> None:
        """Compute named values of all chunks from hidden states (B, T, H), without gradients."""
        flat = hidden.detach().reshape(-1, hidden.shape[-1])  # (B * T, H)
        with torch.no_grad(), no_autocast_cache():
            for index in self._chunks():
                # All values of a chunk come from the same logits, which are gone after it.
                self.collect(index, self.chunk_values(Chunk(self.owner, flat[index][None], outer, None), index, names))

    def differentiate(
        self, hidden: torch.Tensor, outer: Outer, slot: GradSlot | None, grads: Mapping[str, torch.Tensor | None]
    ) -> Grads:
        """Compute and differentiate chunk by chunk, so that only one chunk's logits and graph exist at a time.

        Args:
            hidden, outer, slot: as in `HeadRun.forward`.
            grads: the gradient of each value, by name: one for each token (B * T,), or a scalar for a sum over all chunks. None stands
                for a scalar of 1.
        """
        flat, chunks = hidden.detach().reshape(-1, hidden.shape[-1]), self._chunks()  # (B * T, H)
        if not chunks and slot is not None:  # no token is trained: the head's gradient is zero, and not missing
            for target, adds in map(slot.write, slot.trained):
                if not adds:
                    target.zero_()
        hidden_grad = torch.zeros_like(flat)  # zero for tokens in no chunk
        # One leaf for all chunks, so that their gradients are summed.
        outer_leaves = {name: tensor.detach().requires_grad_() for name, tensor in outer.items()}
        with torch.enable_grad(), no_autocast_cache():
            for index in chunks:
                # A copy of the chunk's rows, and the leaf of its graph, which ends here.
                chunk_leaf = flat[index].requires_grad_()  # (N, H)
                values = self.chunk_values(Chunk(self.owner, chunk_leaf[None], outer_leaves, slot), index, list(grads))
                pairs = zip(grads.values(), values, strict=True)
                torch.autograd.backward(values, [_grad_of_chunk(grad, index, value.dtype) for grad, value in pairs])
                hidden_grad[index] = chunk_leaf.grad if chunk_leaf.grad is not None else 0
                self.collect(index, [value.detach() for value in values])
        outer_grads: list[torch.Tensor | None] = [
            torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in outer_leaves.values()
        ]
        return hidden_grad.view(hidden.shape), outer_grads

    def _chunks(self) -> tuple[torch.Tensor, ...]:
        """Return the positions of each chunk's tokens in the flattened batch, each of shape (N,)."""
        return self.inputs.trained.split(self.owner.chunk_tokens) if len(self.inputs.trained) else ()


def _grad_of_chunk(grad: torch.Tensor | None, index: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
    """Return the gradient of a chunk's value: the entries of its tokens, at positions (N,), or the scalar gradient of a sum over chunks."""
    if grad is None:
        return None
    # A model's own loss may have another dtype than the sum.
    return (grad if grad.ndim == 0 else grad[index]).to(dtype)


class LossRun(ChunkedRun):
    """The loss of one forward pass over chunks, and its gradients.

    If the head's gradient buffer is free, the forward pass also computes the gradients, which saves the backward pass a
    second pass over the chunks, as long as several blocks. Otherwise the backward pass recomputes the chunks.

    Attributes:
        computed: gradients for a loss gradient of one, once they are computed.
    """

    computed: Grads | None = None

    def forward(self, hidden: torch.Tensor, outer: Outer, slot: GradSlot | None) -> tuple[torch.Tensor, ...]:
        """Return the loss as the only result, and compute the gradients if the head's gradient buffer is free."""
        engine, forward_state = self.owner.engine, self.forward_state
        # In float32, as the loss of transformers, which upcasts the logits.
        self._results = [torch.zeros((), dtype=torch.float32, device=hidden.device)]
        if forward_state is not None and forward_state.has_head_grads:
            # The gradient of the loss is not known yet: gradients are computed for 1, and `backward` scales them.
            self.computed = self.differentiate(hidden, outer, slot, {"loss": None})
            # From now on the buffer holds these gradients. A forward pass that begins before this one's backward pass
            # finds it taken, and computes none.
            engine.between.head_grads_lease.take(forward_state)
        else:
            self.compute(hidden, outer, ["loss"])
        # The losses of chunks are divided already. Without a chunk their sum is 0, and 0 / 0 is NaN, as in Hugging Face.
        (total,) = self.take_results()
        return (total if len(self.inputs.trained) else total / self.inputs.num_items,)

    def backward(
        self, grads: Sequence[torch.Tensor | None], hidden: torch.Tensor, outer: Outer, slot: GradSlot | None
    ) -> Grads:
        """Return the gradients that the forward pass has computed, multiplied by the gradient of the loss, or compute them again."""
        (grad,) = grads
        assert grad is not None
        assert self.forward_state is not None
        # Computed now if the forward pass has not done it, or if another backward pass has overwritten the head's gradients.
        if self.computed is None or not self.forward_state.has_head_grads:
            return self.context.run(lambda: self.differentiate(hidden, outer, slot, {"loss": grad}))
        # The loss that the caller keeps holds this node: gradients (B, T, H) must not stay with it.
        (hidden_grad, outer_grads), self.computed = self.computed, None
        # Reading the loss gradient from an accelerator would make the host wait, so there the product is always
        # computed.
        if grad.device.type != "cpu" or grad != 1:
            of_head = [] if slot is None else map(slot.view, slot.trained)
            for tensor in (hidden_grad, *outer_grads, *of_head):
                if tensor is not None:
                    tensor.mul_(grad)
        return hidden_grad, outer_grads

    def chunk_values(self, chunk: Chunk, index: torch.Tensor, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the chunk's share of the batch's loss, as the only value: the sum of its tokens' losses, divided by the number of items of
        the whole batch.
        """
        # transformers computes a loss if there are `labels`, and shifts none if there are `shift_labels`: tokens of a
        # chunk need not follow each other.
        target = self.inputs.labels.reshape(-1)[index][None]  # (1, N)
        loss_inputs = {"labels": target, "shift_labels": target, "num_items_in_batch": self._num_items()}
        with compiled_loss(self.owner.engine.parts.model) if self.is_compiled else nullcontext():
            output = self.call_model(chunk, **loss_inputs)
        if self.statistics is not None:
            # Here, while the logits exist: what this takes is freed before the chunk's backward pass, whose peak is higher.
            self.statistics.add(index, output.logits[0])
        return [output.loss]

    def collect(self, index: torch.Tensor, values: list[torch.Tensor]) -> None:
        self._results = [total + value for total, value in zip(self._results, values, strict=False)]

    def _num_items(self) -> torch.Tensor | int:
        """Return the divisor of the batch's loss; for compiled code as a tensor, since it is compiled again for another number."""
        num_items = self.inputs.num_items
        if isinstance(num_items, int) and self.is_compiled:
            return torch.full((), num_items, device=self.inputs.labels.device)
        return num_items


class LogprobRun(ChunkedRun):
    """The log-probabilities of the trained tokens in one forward pass. The backward pass recomputes the logits by chunk.

    Args:
        owner, inputs, options, statistics: as in `ChunkedRun`.
        temperature: divides the logits.
        names: the values that are wanted, fields of `TokenLogprobs`.
    """

    def __init__(
        self, owner: ChunkedLmHead, inputs: LossInputs, options: dict[str, Any], temperature: float, names: Sequence[str],
        statistics: TokenStatistics | None = None,
    ) -> None:  # fmt: skip
        super().__init__(owner, inputs, options, statistics)
        self._temperature, self._names = temperature, names

    def forward(self, hidden: torch.Tensor, outer: Outer, slot: GradSlot | None) -> tuple[torch.Tensor, ...]:
        """Return each of the named values for all tokens, (B * T,) in float32; 0 for tokens that are not trained."""
        self._results = [hidden.new_zeros(hidden.shape[:2].numel(), dtype=torch.float32) for _ in self._names]
        self.compute(hidden, outer, self._names)
        return self.take_results()

    def backward(
        self, grads: Sequence[torch.Tensor | None], hidden: torch.Tensor, outer: Outer, slot: GradSlot | None
    ) -> Grads:
        """Return the gradients. The logits of each chunk are computed again."""
        # Values that no loss uses are not recomputed: entropy alone takes two more tensors (N, V).
        grad_of = {name: grad for name, grad in zip(self._names, grads, strict=True) if grad is not None}
        return self.context.run(lambda: self.differentiate(hidden, outer, slot, grad_of))

    def chunk_values(self, chunk: Chunk, index: torch.Tensor, names: Sequence[str]) -> list[torch.Tensor]:
        """Return the named values of the tokens of a chunk, (N,) each."""
        logits = self.call_model(chunk).logits[0]  # (N, V)
        if self.statistics is not None:
            self.statistics.add(index, logits)
        labels = self.inputs.labels.reshape(-1)[index]  # (N,)
        return logprobs_of_logits(logits, labels, self._temperature, names, self.is_compiled)

    def collect(self, index: torch.Tensor, values: list[torch.Tensor]) -> None:
        for whole, part in zip(self._results, values, strict=False):
            whole[index] = part  # (B * T,) at (N,); not strict, because the backward pass has no results
