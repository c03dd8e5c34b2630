"""Norm and head in chunks of tokens (head mode ``chunked``), so that logits never exist as a whole.

The model's own forward is called once per chunk, with a decoder that returns that chunk's hidden states: it is Hugging
Face's code that scales and caps logits and computes the loss.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from horizon_lm.device.base import send
from horizon_lm.engine.head import Head
from horizon_lm.engine.replay import Surroundings, no_autocast_cache
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model.parts import ModelParts

IGNORED = -100  # label of a token that is not trained, as in torch.nn.functional.cross_entropy
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
            shifted = F.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        trained = (shifted.reshape(-1) != IGNORED).nonzero().squeeze(1)
        num_items = call.pop("num_items_in_batch", None)
        num_items = len(trained) if num_items is None else num_items
        if isinstance(num_items, torch.Tensor):
            num_items = send(num_items, device)
        return cls(send(shifted, device), send(trained, device), num_items)


def require_chunkable(parts: ModelParts) -> None:
    """ModelNotSupportedError if a model's loss cannot be cut into chunks of tokens."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    name, remedy = type(parts.model).__name__, "stream with head='whole'"
    if type(parts.head) is not nn.Linear:
        raise ModelNotSupportedError(f"{name}: the head is a {type(parts.head).__name__}, not a plain Linear; {remedy}")
    arguments = inspect.signature(type(parts.model).forward).parameters.values()
    if parts.model.loss_function is not ForCausalLMLoss or not any(p.kind == p.VAR_KEYWORD for p in arguments):
        raise ModelNotSupportedError(
            f"{name} computes its loss in a way of its own, which cannot be cut into chunks; {remedy}"
        )


class ChunkedHead:
    """Norm, head and loss of a model over chunks of its trained tokens. ``call_model`` is the model's own forward."""

    def __init__(self, head: Head, call_model: Callable[..., Any]) -> None:
        self.head, self.engine, self.call_model = head, head.engine, call_model
        parts = self.engine.parts
        self._decoder, self.norm = parts.decoder, parts.final_norm
        self.chunk_tokens = self.engine.options.head_chunk_tokens
        self.decoder_output: Any = None  # class of what the decoder returns, seen in the forward
        self.hidden: torch.Tensor | None = None  # what the norm was given, seen in the forward
        self._chunk: _Chunk | None = None

    @property
    def in_chunk(self) -> bool:
        """Whether the model's forward is computing a chunk."""
        return self._chunk is not None

    @property
    def norm_names(self) -> list[str]:
        """Full names of the final norm's parameters."""
        norm = self.norm
        if norm is None:
            return []
        own = {id(p) for p in norm._parameters.values()}
        return [
            n for n, ref in self.engine.refs.items() if any(m is norm for m, _ in ref.places) or id(ref.param) in own
        ]

    def compute(self, run: "ChunkedRun", norm_weights: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """What ``run`` makes of the hidden states that the forward saw; differentiable when the forward records."""
        hidden, self.hidden = self.hidden, None
        assert hidden is not None
        return _HeadFunction.apply(run, self.engine.anchor, hidden, *norm_weights)

    # What stands in for modules while the model's forward runs

    def seen_by_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm is left to the chunks."""
        self.hidden = hidden
        return hidden

    def seen_by_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Instead of logits: one row of zeros, for a loss without labels."""
        if self._chunk is not None:
            return self._chunk.project(hidden)
        if self.norm is None:
            self.hidden = hidden
        elif self.hidden is None or hidden.shape != self.hidden.shape or hidden.data_ptr() != self.hidden.data_ptr():
            raise ModelNotSupportedError(
                f"{type(self._decoder).__name__} does more between its final norm and the head than the norm, so the "
                "head cannot be computed in chunks; stream with head='whole'"
            )
        return hidden.new_zeros((1, 1, self.head.vocabulary))

    @contextmanager
    def computing(self, chunk: "_Chunk") -> Iterator[None]:
        """Inside, the model's forward computes this chunk."""
        before = self._decoder.__dict__.get("forward")
        self._chunk = chunk
        self._decoder.forward = lambda *args, **kwargs: self.decoder_output(  # type: ignore[method-assign]
            last_hidden_state=chunk.normalise()
        )
        try:
            yield
        finally:
            self._chunk = None
            if before is None:
                del self._decoder.forward
            else:
                self._decoder.forward = before  # type: ignore[method-assign]


class _Chunk:
    """Some trained tokens (1, n, H) on their way through norm and head; ``grads`` takes the head's gradients."""

    def __init__(
        self, owner: ChunkedHead, hidden: torch.Tensor, norm: dict[str, torch.Tensor], grads: dict[str, torch.Tensor],
        first: bool,
    ) -> None:  # fmt: skip
        self.owner, self.hidden, self.norm_weights = owner, hidden, norm
        self.grads, self.first = grads, first

    def normalise(self) -> torch.Tensor:
        norm = self.owner.norm
        if norm is None:
            return self.hidden
        before = dict(norm._parameters)
        norm._parameters.update(self.norm_weights)  # type: ignore[arg-type]
        try:
            return type(norm).forward(norm, self.hidden)
        finally:
            norm._parameters.update(before)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        weights = self.owner.head.weights()
        return _ChunkLinear.apply(hidden, weights["weight"], weights.get("bias"), self.grads, self.first)


class _ChunkLinear(torch.autograd.Function):
    """``F.linear`` whose weight gradient is added into a buffer instead of being returned, chunk after chunk."""

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
        if "bias" in ctx.grads:
            bias = ctx.grads["bias"]
            bias.copy_(flat.sum(0) if ctx.first else bias + flat.sum(0))
        return grad.matmul(weight.to(grad.dtype)), None, None, None, None


def _add_product(total: torch.Tensor, grad: torch.Tensor, inputs: torch.Tensor, first: bool) -> None:
    """``total (+)= grad^T inputs`` with grad (n, V) and inputs (n, H); without a second (V, H) tensor."""
    if total.dtype == grad.dtype == inputs.dtype:
        torch.addmm(total, grad.t(), inputs, beta=0 if first else 1, out=total)
        return
    for start in range(0, total.shape[0], _ROW_BLOCK):
        rows = total[start : start + _ROW_BLOCK]
        product = grad[:, start : start + _ROW_BLOCK].t().matmul(inputs)
        rows.copy_(product) if first else rows.add_(product)


Grads = tuple[torch.Tensor, list[torch.Tensor]]  # of hidden states, and of the norm's parameters


class ChunkedRun(ABC):
    """Chunks of one forward's trained tokens. ``options``: further arguments of the model's own forward."""

    def __init__(self, owner: ChunkedHead, inputs: LossInputs, options: dict[str, Any]) -> None:
        self.owner, self.engine, self.inputs, self.handle = owner, owner.engine, inputs, owner.engine.handle
        self._options = options
        self.surroundings = Surroundings(self.engine.device.torch_device.type)

    @abstractmethod
    def forward(self, hidden: torch.Tensor, norm: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """From hidden states (B, T, H) and the norm's parameters."""

    @abstractmethod
    def backward(self, grads: Sequence[torch.Tensor | None], hidden: torch.Tensor, norm: list[torch.Tensor]) -> Grads:
        """From the gradients of what `forward` returned."""

    def chunks(self) -> tuple[torch.Tensor, ...]:
        """Positions of tokens that are computed together."""
        return self.inputs.trained.split(self.owner.chunk_tokens) if len(self.inputs.trained) else ()

    def call_model(
        self, hidden: torch.Tensor, norm: list[torch.Tensor], grads: dict[str, torch.Tensor] | None, first: bool,
        **arguments: Any,
    ) -> Any:  # fmt: skip
        """What the model makes of hidden states (n, H). The head's gradients will go into ``grads``."""
        names = [name.rpartition(".")[2] for name in self.owner.norm_names]
        chunk = _Chunk(self.owner, hidden[None], dict(zip(names, norm, strict=True)), grads or {}, first)
        with self.owner.computing(chunk):
            return self.owner.call_model(**arguments, **self._options)

    def differentiate(self, hidden: torch.Tensor, norm: list[torch.Tensor], of_chunk: Callable[..., None]) -> Grads:
        """Run ``of_chunk(leaf, index, norm_leaves, head_grads, first)``, which calls backward, for each chunk."""
        flat, grads = hidden.detach().reshape(-1, hidden.shape[-1]), self.owner.head.grads()
        chunks = self.chunks()
        for tensor in grads.values() if not chunks else ():
            tensor.zero_()
        hidden_grad = torch.zeros_like(flat)
        leaves = [w.detach().requires_grad_() for w in norm]
        with torch.enable_grad(), no_autocast_cache():
            for number, index in enumerate(chunks):
                leaf = flat[index].requires_grad_()
                of_chunk(leaf, index, leaves, grads, number == 0)
                hidden_grad[index] = leaf.grad if leaf.grad is not None else 0
        norm_grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in leaves]
        return hidden_grad.view(hidden.shape), norm_grads


class _HeadFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: ChunkedRun, anchor: torch.Tensor, hidden: torch.Tensor, *norm: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        values = run.forward(hidden, list(norm))
        ctx.save_for_backward(hidden, *norm)
        return values

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        run: ChunkedRun = ctx.run
        assert run.handle is not None
        with run.engine.backward_of(run.handle):
            hidden, *norm = ctx.saved_tensors
            hidden_grad, norm_grads = run.backward(grads, hidden, norm)
        return None, None, hidden_grad, *norm_grads
