"""Norm and head in chunks of tokens (head mode ``chunked``), so that logits never exist as a whole.

The model's own forward is called once per chunk, with a decoder that returns that chunk's hidden states: it is Hugging
Face's code that scales and caps logits and computes the loss.

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
from horizon_lm.engine.lm_head import LmHead
from horizon_lm.engine.recompute import RecomputeContext, no_autocast_cache
from horizon_lm.errors import StreamingError, TokenError
from horizon_lm.model.functional import in_place
from horizon_lm.model.head_path import ChunkedPath
from horizon_lm.model.outer_trial import Decoded, hidden_of, is_same

_ROW_BLOCK = 4096  # rows of the head's gradient formed at once when it has another dtype than its buffer


@dataclass(slots=True)
class LossInputs:
    """What the loss of a batch is made of, besides hidden states.

    Attributes:
        labels: (B, T), shifted: ``labels[b, t]`` is the target of hidden state ``[b, t]``.
        trained: (n,) positions in the flattened labels of those that are not ignored.
        num_items: by what the sum over tokens is divided.
    """

    labels: torch.Tensor
    trained: torch.Tensor
    num_items: torch.Tensor | int

    @classmethod
    def of(cls, call: dict[str, Any], device: torch.device) -> "LossInputs":
        """Take ``labels`` or ``shift_labels`` (B, T) and ``num_items_in_batch`` out of a call of the model.

        Which tokens are trained is found where the labels are: looking it up on an accelerator would wait for it.
        """
        labels, shifted = call.pop("labels", None), call.pop("shift_labels", None)
        if shifted is None:
            shifted = F.pad(labels, (0, 1), value=IGNORE_INDEX)[..., 1:]
        trained = (shifted.reshape(-1) != IGNORE_INDEX).nonzero().squeeze(1)
        num_items = call.pop("num_items_in_batch", None)
        num_items = len(trained) if num_items is None else num_items
        if isinstance(num_items, torch.Tensor):
            num_items = send(num_items, device)
        return cls(send(shifted, device), send(trained, device), num_items)


class ChunkedLmHead:
    """Norm, head and loss of a model over chunks of its trained tokens. ``call_model`` is the model's own forward."""

    def __init__(self, head: LmHead, path: ChunkedPath, call_model: Callable[..., Any]) -> None:
        self.head, self.engine, self.path, self.call_model = head, head.engine, path, call_model
        self.chunk_tokens = self.engine.options.head_chunk_tokens
        self._leaves_norm = False  # the running forward leaves the norm to the chunks
        self._given_to_norm: torch.Tensor | None = None
        self._hidden: torch.Tensor | None = None  # what the trunk returned
        self._active = False
        self._chunk: _Chunk | None = None
        self._vocabulary = self.engine.parts.sizes().vocabulary
        self._head_attributes = {
            name: attribute for name, ref in self.engine.refs.items() for m, attribute in ref.places if m is head.module
        }
        norm, refs = self.engine.parts.final_norm, self.engine.refs
        self._norm_attributes = {
            name: attribute for name, ref in refs.items() for module, attribute in ref.places if module is norm
        }

    @property
    def is_wanted(self) -> bool:
        """Whether the head's module is called for chunks now, or for a forward that leaves logits to them."""
        return self._active or self._chunk is not None

    @contextmanager
    def instead_of_logits(self, with_norm: bool) -> Iterator[None]:
        """Inside, the model's forward leaves the head to chunks. ``with_norm``: it computes the final norm all the same."""
        self._active, self._leaves_norm = True, self.path.norm_is_last and not with_norm
        try:
            yield
        finally:
            self._active = False

    def outer_names(self) -> list[str]:
        """Full names of the outer parameters that chunks compute with: the norm's, and a bias of a tied head."""
        norm = list(self._norm_attributes) if self._leaves_norm else []
        return [*norm, *self.head.outer]

    def compute(self, run: "ChunkedRun", outer: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What ``run`` makes of the hidden states that the forward saw; differentiable when the forward records."""
        hidden, self._hidden, self._given_to_norm = self._hidden, None, None
        assert hidden is not None
        if hidden.shape[:2] != run.inputs.labels.shape:
            raise TokenError(
                f"labels have the shape {tuple(run.inputs.labels.shape)}, but the model computed {tuple(hidden.shape[:2])} tokens"
            )
        anchor = self.engine.anchor if self.engine.recording is not None else hidden.new_empty(0)
        return _HeadFunction.apply(run, anchor, hidden, *outer)

    # What stands in for modules while the model's forward runs

    def trunk_forward(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In the place of the trunk's forward."""
        if self._chunk is not None:
            return Decoded(self._chunk.normalise())
        output = forward(*args, **kwargs)
        if self._active:
            self._hidden = hidden_of(output)
            if self._leaves_norm and (self._given_to_norm is None or not is_same(self._hidden, self._given_to_norm)):
                raise StreamingError(
                    f"{type(self.path.trunk).__name__} does more after its final norm than when the model was streamed; stream "
                    "with head='whole'"
                )
        return output

    def norm_forward(self, forward: Callable[..., Any], hidden: torch.Tensor) -> Any:
        """In the place of the final norm's: that is left to the chunks."""
        if not (self._active and self._leaves_norm):
            return forward(hidden)
        self._given_to_norm = hidden
        return hidden

    def head_forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Instead of logits of all tokens: those of a chunk, or one row of zeros for a loss without labels."""
        if self._chunk is not None:
            return self._chunk.project(hidden)
        return hidden.new_zeros((1, 1, self._vocabulary))

    def linear(self, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What a plain Linear calls these tensors of the head, which have their full names."""
        return {self._head_attributes[name]: tensor for name, tensor in tensors.items()}

    @contextmanager
    def computing(self, chunk: "_Chunk") -> Iterator[None]:
        """Inside, the model's forward computes this chunk."""
        self._chunk = chunk
        try:
            yield
        finally:
            self._chunk = None

    def chunk(
        self,
        names: list[str],
        hidden: torch.Tensor,
        outer: list[torch.Tensor],
        grads: dict[str, torch.Tensor],
        first: bool,
    ) -> "_Chunk":
        """Tokens (n, H) with the outer parameters of these names."""
        given = dict(zip(names, outer, strict=True))
        norm = {self._norm_attributes[name]: tensor for name, tensor in given.items() if name in self._norm_attributes}
        bias = {name: given[name] for name in self.head.outer}
        return _Chunk(self, hidden[None], norm, bias, grads, first)


class _Chunk:
    """Some trained tokens (1, n, H) on their way through norm and head; ``grads`` takes the head's gradients."""

    def __init__(
        self, owner: ChunkedLmHead, hidden: torch.Tensor, norm: dict[str, torch.Tensor], bias: dict[str, torch.Tensor],
        grads: dict[str, torch.Tensor], first: bool,
    ) -> None:  # fmt: skip
        self.owner, self.hidden, self.norm_weights, self.bias = owner, hidden, norm, bias
        self.grads, self.first = grads, first

    def normalise(self) -> torch.Tensor:
        norm = self.owner.engine.parts.final_norm
        if norm is None or not self.norm_weights:
            return self.hidden
        with in_place((norm, attribute, weight) for attribute, weight in self.norm_weights.items()):
            hidden: torch.Tensor = type(norm).forward(norm, self.hidden)  # type: ignore[attr-defined]
        return hidden

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = self.owner.linear(self.owner.head.weights() | self.bias)
        grads = self.owner.linear(self.grads)
        return _ChunkLinear.apply(hidden, weights["weight"], weights.get("bias"), grads, self.first)


class _ChunkLinear(torch.autograd.Function):
    """``F.linear`` whose gradients are added into a buffer instead of being returned, chunk after chunk.

    The gradient of a bias that has no place in the buffer is returned.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, grads: dict[str, torch.Tensor],
        first: bool,
    ) -> torch.Tensor:  # fmt: skip
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            x = x.to(torch.get_autocast_dtype(device_type))
        ctx.save_for_backward(x, weight)
        ctx.grads, ctx.first = grads, first
        return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        flat, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        if "weight" in ctx.grads:
            _add_product(ctx.grads["weight"], flat, inputs, ctx.first)
        bias_grad = None
        if "bias" in ctx.grads:
            bias = ctx.grads["bias"]
            bias.copy_(flat.sum(0) if ctx.first else bias + flat.sum(0))
        elif ctx.needs_input_grad[2]:
            bias_grad = flat.sum(0)
        return grad.matmul(weight.to(grad.dtype)), None, bias_grad, None, None


def _add_product(total: torch.Tensor, grad: torch.Tensor, inputs: torch.Tensor, first: bool) -> None:
    """``total (+)= grad^T inputs`` with grad (n, V) and inputs (n, H); without a second (V, H) tensor."""
    if total.dtype == grad.dtype == inputs.dtype:
        torch.addmm(total, grad.t(), inputs, beta=0 if first else 1, out=total)
        return
    for start in range(0, total.shape[0], _ROW_BLOCK):
        rows = total[start : start + _ROW_BLOCK]
        product = grad[:, start : start + _ROW_BLOCK].t().matmul(inputs)
        rows.copy_(product) if first else rows.add_(product)


Grads = tuple[torch.Tensor, list[torch.Tensor]]  # of hidden states, and of outer parameters


class ChunkedRun(ABC):
    """Chunks of one forward's trained tokens. ``options``: further arguments of the model's own forward."""

    def __init__(self, owner: ChunkedLmHead, inputs: LossInputs, options: dict[str, Any]) -> None:
        self.owner, self.engine, self.inputs, self.forward_state = owner, owner.engine, inputs, owner.engine.recording
        self.outer_names = owner.outer_names()
        self._options = options
        self.context = RecomputeContext(self.engine.device.torch_device.type)

    @abstractmethod
    def forward(self, hidden: torch.Tensor, outer: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """From hidden states (B, T, H) and the outer parameters of these names."""

    @abstractmethod
    def backward(self, grads: Sequence[torch.Tensor | None], hidden: torch.Tensor, outer: list[torch.Tensor]) -> Grads:
        """From the gradients of what `forward` returned."""

    def chunks(self) -> tuple[torch.Tensor, ...]:
        """Positions of tokens that are computed together."""
        return self.inputs.trained.split(self.owner.chunk_tokens) if len(self.inputs.trained) else ()

    def call_model(
        self, hidden: torch.Tensor, outer: list[torch.Tensor], grads: dict[str, torch.Tensor] | None, first: bool,
        **arguments: Any,
    ) -> Any:  # fmt: skip
        """What the model makes of hidden states (n, H). The head's gradients will go into ``grads``."""
        with self.owner.computing(self.owner.chunk(self.outer_names, hidden, outer, grads or {}, first)):
            return self.owner.call_model(**arguments, **self._options)

    def differentiate(self, hidden: torch.Tensor, outer: list[torch.Tensor], of_chunk: Callable[..., None]) -> Grads:
        """Run ``of_chunk(leaf, index, outer_leaves, head_grads, first)``, which calls backward, for each chunk."""
        flat, grads = hidden.detach().reshape(-1, hidden.shape[-1]), self.owner.head.grads()
        chunks = self.chunks()
        for tensor in grads.values() if not chunks else ():
            tensor.zero_()
        hidden_grad = torch.zeros_like(flat)
        leaves = [w.detach().requires_grad_() for w in outer]
        with torch.enable_grad(), no_autocast_cache():
            for number, index in enumerate(chunks):
                leaf = flat[index].requires_grad_()
                of_chunk(leaf, index, leaves, grads, number == 0)
                hidden_grad[index] = leaf.grad if leaf.grad is not None else 0
        outer_grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in leaves]
        return hidden_grad.view(hidden.shape), outer_grads


class _HeadFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: ChunkedRun, anchor: torch.Tensor, hidden: torch.Tensor, *outer: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        values = run.forward(hidden, list(outer))
        ctx.save_for_backward(hidden, *outer)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        run: ChunkedRun = ctx.run
        assert run.forward_state is not None
        with run.engine.backward_of(run.forward_state):
            hidden, *outer = ctx.saved_tensors
            hidden_grad, outer_grads = run.backward(grads, hidden, outer)
        return None, None, hidden_grad, *outer_grads
