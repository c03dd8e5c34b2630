"""Final norm and LM head over chunks of tokens (``head="chunked"``), which avoids computing all logits of a batch.

The model's forward method runs once for the whole batch without the head, and then once per chunk with a trunk that
returns the hidden states of that chunk. This way, Hugging Face's own code scales and caps the logits and computes the
loss.

A pass with several batches runs the model once for each, and then the chunks of all of them, one batch after the other.

Shapes: B batch rows, T tokens of a row, N tokens of a chunk, H hidden size, V vocabulary. Logits of a chunk are (1, N, V); all
of them would be (B, T, V), often the largest tensor of a step. Only trained tokens, whose label is not ignored, are in chunks.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812

from horizon_lm.constants import IGNORE_INDEX
from horizon_lm.device.base import send
from horizon_lm.engine.passes.lockstep import place
from horizon_lm.engine.passes.recompute import RecomputeContext, no_autocast_cache
from horizon_lm.engine.units.lm_head import LmHead
from horizon_lm.engine.units.token_statistics import TokenStatistics
from horizon_lm.errors import StreamingError, TokenError
from horizon_lm.model.functional import in_place
from horizon_lm.model.head_path import ChunkedPath
from horizon_lm.model.outer_trial import Decoded, hidden_of, is_same
from horizon_lm.schedule.ops import Kind
from horizon_lm.units import HEAD

_ROW_BLOCK = 4096  # rows of the head's gradient (V, H) computed at a time if its buffer has another dtype


@dataclass(slots=True)
class LossInputs:
    """The inputs of a batch's loss, except for hidden states.

    Attributes:
        labels: the target of each hidden state, shape (B, T): already shifted by one.
        trained: positions of the labels that are not ignored, in the flattened labels; shape (trained tokens,).
        num_items: the divisor of the sum over tokens.
    """

    labels: torch.Tensor
    trained: torch.Tensor
    num_items: torch.Tensor | int

    @classmethod
    def of(cls, call: dict[str, Any], device: torch.device) -> "LossInputs":
        """Take ``labels`` or ``shift_labels`` (B, T) and ``num_items_in_batch`` from the arguments of a model call.

        The trained positions are found before labels are copied to the device, where the host would have to wait for
        their number.
        """
        labels, shifted = call.pop("labels", None), call.pop("shift_labels", None)
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=IGNORE_INDEX)[
                ..., 1:
            ]  # (B, T): the last token of a row has no target
        trained = (shifted.reshape(-1) != IGNORE_INDEX).nonzero().squeeze(1)
        num_items = call.pop("num_items_in_batch", None)
        num_items = len(trained) if num_items is None else num_items
        if isinstance(num_items, torch.Tensor):
            num_items = send(num_items, device)
        return cls(send(shifted, device), send(trained, device), num_items)


class ChunkedLmHead:
    """The final norm, head and loss of a model, computed over chunks of its trained tokens.

    Args:
        head: the streamed head.
        path: the way from hidden states to the loss in this model.
        call_model: the model's own forward.
    """

    def __init__(self, head: LmHead, path: ChunkedPath, call_model: Callable[..., Any]) -> None:
        self.head, self.engine, self.path, self.call_model = head, head.engine, path, call_model
        self.chunk_tokens = self.engine.options.head_chunk_tokens
        self._active = False  # the forward pass over the whole batch is running, without the head
        self._skips_norm = False  # the final norm is also skipped and left to the chunks
        self._norm_input: dict[int, torch.Tensor] = {}  # by place in the lock-step, (B, T, H)
        self._hidden: dict[int, torch.Tensor] = {}  # output of the trunk, (B, T, H)
        self._chunk: _Chunk | None = None  # the chunk that the model is computing
        self._vocabulary = self.engine.parts.sizes().vocabulary
        self._head_attributes = self._attributes_of(head.module)
        self.norm_attributes = self._attributes_of(self.engine.parts.final_norm)

    def _attributes_of(self, owner: Any) -> dict[str, str]:
        """Return the attributes of a module that are parameters, by the parameter's full name."""
        refs = self.engine.refs.items()
        return {name: attribute for name, ref in refs for module, attribute in ref.places if module is owner}

    @property
    def replaces_head(self) -> bool:
        """True while this object replaces the head's module."""
        return self._active or self._chunk is not None

    @contextmanager
    def without_head(self, with_norm: bool) -> Iterator[None]:
        """Context manager: run the model over the whole batch without its head and final norm.

        Args:
            with_norm: compute the final norm nevertheless, because the caller or a hook uses its output.
        """
        self._active, self._skips_norm = True, self.path.norm_is_last and not with_norm
        try:
            yield
        finally:
            self._active = False
            self._norm_input, self._hidden = {}, {}

    def take_hidden(self) -> torch.Tensor:
        """Return the hidden states (B, T, H) of the batch that this thread has run through the trunk."""
        self._norm_input.pop(place(), None)
        return self._hidden.pop(place())

    def outer_names(self) -> list[str]:
        """Return the full names of the outer parameters used by chunks: those of the norm, and the bias of a
        tied head.
        """
        norm = list(self.norm_attributes) if self._skips_norm else []
        return [*norm, *self.head.outer]

    def compute(
        self, runs: Sequence["ChunkedRun"], hidden: Sequence[torch.Tensor], outer: dict[str, torch.Tensor]
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
        anchor = self.engine.anchor if self.engine.recording is not None else hidden[0].new_empty(0)
        used = [outer[name] for name in self.outer_names()]
        values = _ChunkedHeadFunction.apply(_ChunkedPass(runs), anchor, *used, *hidden)
        per_run = len(values) // len(runs)
        return [values[start : start + per_run] for start in range(0, len(values), per_run)]

    # Replacements of modules' forwards

    def trunk_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the trunk over the whole batch, or return the hidden states of the current chunk."""
        if self._chunk is not None:
            return Decoded(self._chunk.normalise())
        output = forward(*args, **kwargs)
        if self._active:
            hidden, norm_input = hidden_of(output), self._norm_input.get(place())
            self._hidden[place()] = hidden
            # A norm that was skipped must have been the last operation, or chunks would apply it in the wrong place.
            if self._skips_norm and (norm_input is None or not is_same(hidden, norm_input)):
                raise StreamingError(
                    f"{type(self.path.trunk).__name__} does more after its final norm than when the model was streamed; stream "
                    "with head='whole'"
                )
        return output

    def norm_forward(self, forward: Callable[..., Any], hidden: torch.Tensor) -> Any:
        """Run the final norm, or skip it if it is left to the chunks, so that its float32 copy of (B, T, H) is never
        made.
        """
        if not (self._active and self._skips_norm):
            return forward(hidden)
        self._norm_input[place()] = hidden
        return hidden

    def head_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits of the current chunk (1, N, V), or zeros (1, 1, V) in the forward pass over the whole
        batch.

        The zeros represent one ignored token, for which the model computes only the auxiliary part of its loss.
        """
        if self._chunk is not None:
            return self._chunk.project(hidden)
        return hidden.new_zeros((1, 1, self._vocabulary))

    def by_attribute(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Rename tensors of the head from full names to the attributes of its Linear: ``weight`` and ``bias``."""
        return {self._head_attributes[name]: tensor for name, tensor in tensors.items()}

    @contextmanager
    def computing(self, chunk: "_Chunk") -> Iterator[None]:
        """Context manager: run the model's forward method for this chunk."""
        self._chunk = chunk
        try:
            yield
        finally:
            self._chunk = None


class _Chunk:
    """A chunk of trained tokens while it passes through norm and head.

    Args:
        owner: the chunked head.
        hidden: hidden states, shape (1, N, H): the model sees the chunk as a batch of one row.
        outer: the outer parameters of `ChunkedLmHead.outer_names`, by full name.
        grads: the buffers that the head's gradients are added to, by full name.
        first: the buffers are overwritten, because this is the first chunk.
    """

    def __init__(
        self, owner: ChunkedLmHead, hidden: torch.Tensor, outer: dict[str, torch.Tensor], grads: dict[str, torch.Tensor],
        first: bool,
    ) -> None:  # fmt: skip
        self.owner, self.hidden, self.outer, self.grads, self.first = owner, hidden, outer, grads, first

    def normalise(self) -> torch.Tensor:
        """Return the normed hidden states (1, N, H), or unchanged hidden states if the norm is not left to
        the chunks.
        """
        norm, attributes = self.owner.engine.parts.final_norm, self.owner.norm_attributes
        weights = {attributes[name]: tensor for name, tensor in self.outer.items() if name in attributes}
        if norm is None or not weights:
            return self.hidden
        with in_place((norm, attribute, weight) for attribute, weight in weights.items()):
            hidden: torch.Tensor = type(norm).forward(norm, self.hidden)  # type: ignore[attr-defined]
        return hidden

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the logits (1, N, V) of hidden states (1, N, H)."""
        head = self.owner.head
        weights = self.owner.by_attribute(head.weights() | {name: self.outer[name] for name in head.outer})
        grads = self.owner.by_attribute(self.grads)
        return _ChunkLinear.apply(hidden, weights["weight"], weights.get("bias"), grads, self.first)


class _ChunkLinear(torch.autograd.Function):
    """A replacement of ``F.linear`` whose backward pass adds the gradients of weight and bias to buffers.

    Autograd would compute a gradient (V, H) for each chunk and add it to the sum, which takes two more tensors of the
    head's size. The gradient of a bias without a buffer (an outer parameter, if the head is tied) is returned.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, grads: dict[str, torch.Tensor],
        first: bool,
    ) -> torch.Tensor:  # fmt: skip
        # Cast explicitly, because autocast does not apply inside of an autograd function.
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        ctx.save_for_backward(x, weight)
        ctx.grads, ctx.first = grads, first
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        flat, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])  # (N, V), (N, H)
        if "weight" in ctx.grads:
            _add_product(ctx.grads["weight"], flat, inputs, ctx.first)
        bias_grad = None
        if "bias" in ctx.grads:
            bias = ctx.grads["bias"]
            bias.copy_(flat.sum(0) if ctx.first else bias + flat.sum(0))
        elif ctx.needs_input_grad[2]:
            bias_grad = flat.sum(0)
        return grad.matmul(weight.to(grad.dtype)), None, bias_grad, None, None  # (1, N, V) x (V, H) -> (1, N, H)


def _add_product(total: torch.Tensor, grad: torch.Tensor, inputs: torch.Tensor, first: bool) -> None:
    """Add ``grad^T inputs`` to ``total`` (V, H), from grad (N, V) and inputs (N, H), without a second (V, H) tensor.

    Args:
        total: the sum over chunks.
        grad: gradient of the chunk's logits.
        inputs: inputs of the projection.
        first: overwrite ``total`` instead.
    """
    if total.dtype == grad.dtype == inputs.dtype:
        torch.addmm(total, grad.t(), inputs, beta=0 if first else 1, out=total)
        return
    # addmm cannot write to another dtype (a float32 sum of bfloat16 products), so products are computed some rows at a
    # time.
    for start in range(0, total.shape[0], _ROW_BLOCK):
        rows = total[start : start + _ROW_BLOCK]
        product = grad[:, start : start + _ROW_BLOCK].t().matmul(inputs)
        rows.copy_(product) if first else rows.add_(product)


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
        self.context = RecomputeContext(self.engine.device.torch_device.type)

    @abstractmethod
    def forward(self, hidden: torch.Tensor, outer: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Compute all chunks from hidden states (B, T, H) and the outer parameters of `outer_names`."""

    @abstractmethod
    def backward(
        self, grads: Sequence[torch.Tensor | None], hidden: torch.Tensor, outer: list[torch.Tensor], first: bool
    ) -> Grads:
        """Return the gradients of the arguments of `forward` from the gradients of its results.

        Args:
            grads: the gradient of each result; None for a result that no loss depends on.
            hidden, outer: the arguments of `forward`.
            first: no batch before this one has written the buffers of the head's gradients.
        """

    def chunks(self) -> tuple[torch.Tensor, ...]:
        """Return the positions of each chunk's tokens in the flattened batch, each of shape (N,)."""
        return self.inputs.trained.split(self.owner.chunk_tokens) if len(self.inputs.trained) else ()

    def call_model(
        self, hidden: torch.Tensor, outer: list[torch.Tensor], grads: dict[str, torch.Tensor] | None, first: bool,
        **arguments: Any,
    ) -> Any:  # fmt: skip
        """Run the model's forward method on the hidden states (N, H) of a chunk.

        Args:
            hidden: the chunk's hidden states.
            outer: the outer parameters of `outer_names`.
            grads: the buffers to which a backward pass adds the head's gradients; None if there is no backward pass.
            first: overwrite these buffers.
            arguments: arguments of the forward method.
        """
        by_name = dict(zip(self.outer_names, outer, strict=True))
        with self.owner.computing(_Chunk(self.owner, hidden[None], by_name, grads or {}, first)):
            return self.owner.call_model(**arguments, **self._options)

    def differentiate(
        self, hidden: torch.Tensor, outer: list[torch.Tensor], differentiate_chunk: Callable[..., None], first: bool
    ) -> Grads:
        """Compute and differentiate chunk by chunk, so that only one chunk's logits and graph exist at a time.

        Args:
            hidden: hidden states (B, T, H).
            outer: the outer parameters of `outer_names`.
            differentiate_chunk: called with hidden states (N, H), positions (N,), outer parameters, the head's gradient
                buffers, and whether to overwrite them; computes the chunk and calls backward.
            first: overwrite the head's gradient buffers.
        """
        flat, grads = hidden.detach().reshape(-1, hidden.shape[-1]), self.owner.head.grads()  # (B * T, H)
        chunks = self.chunks()
        if first and not chunks:  # no first chunk will overwrite the buffers
            for tensor in grads.values():
                tensor.zero_()
        hidden_grad = torch.zeros_like(flat)  # zero for tokens in no chunk
        leaves = [w.detach().requires_grad_() for w in outer]
        with torch.enable_grad(), no_autocast_cache():
            for number, index in enumerate(chunks):
                leaf = flat[index].requires_grad_()  # (N, H)
                differentiate_chunk(leaf, index, leaves, grads, first and number == 0)
                hidden_grad[index] = leaf.grad if leaf.grad is not None else 0
        outer_grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in leaves]
        return hidden_grad.view(hidden.shape), outer_grads


class _ChunkedPass:
    """The chunks of all batches of a forward pass."""

    def __init__(self, runs: Sequence[ChunkedRun]) -> None:
        self.runs = runs
        self.engine, self.head = runs[0].engine, runs[0].owner.head
        self.forward_state: Any = runs[0].forward_state
        self.num_outer = len(runs[0].outer_names)

    def forward(self, inputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Compute all runs, given the outer parameters and then the hidden states (B, T, H) of each batch."""
        outer, hidden = list(inputs[: self.num_outer]), inputs[self.num_outer :]
        with self.engine.cursor.compute(Kind.FORWARD, HEAD):
            values = [run.forward(states, outer) for run, states in zip(self.runs, hidden, strict=True)]
            self.engine.device.poison(self.engine.memory.head_weights[0])
        return tuple(value for each in values for value in each)

    def backward(
        self, grads: Sequence[torch.Tensor | None], inputs: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor | None]:
        """Return the gradients of the inputs of `forward` from the gradients of its results."""
        outer, hidden = list(inputs[: self.num_outer]), inputs[self.num_outer :]
        per_run, written = len(grads) // len(self.runs), False
        outer_grads: list[torch.Tensor] = []
        hidden_grads: list[torch.Tensor | None] = []
        with self.engine.cursor.compute(Kind.BACKWARD, HEAD):
            for number, (run, states) in enumerate(zip(self.runs, hidden, strict=True)):
                part = grads[number * per_run : (number + 1) * per_run]
                if all(grad is None for grad in part):
                    hidden_grads.append(None)
                    continue
                hidden_grad, more = run.backward(part, states, outer, not written)
                hidden_grads.append(hidden_grad)
                outer_grads = [a + b for a, b in zip(outer_grads, more, strict=True)] if outer_grads else more
                written = written or bool(run.chunks())
            if not self.forward_state.head_grads:  # otherwise the weights were not needed, and are not there
                self.engine.device.poison(self.engine.memory.head_weights[0])
            self.head.gradients_ready()
        return [*outer_grads, *hidden_grads]


class _ChunkedHeadFunction(torch.autograd.Function):
    """The autograd node of all chunks of a forward pass."""

    @staticmethod
    def forward(
        ctx: Any, chunks: _ChunkedPass, anchor: torch.Tensor, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.chunks = chunks
        ctx.set_materialize_grads(False)
        values = chunks.forward(inputs)
        ctx.save_for_backward(*inputs)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        chunks: _ChunkedPass = ctx.chunks
        with chunks.engine.backward_of(chunks.forward_state):
            input_grads = chunks.backward(grads, ctx.saved_tensors)
        return None, None, *input_grads
