"""The head: Hugging Face's own forward over all logits (``whole``), or its loss over chunks of tokens (``chunked``)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from horizon_lm.engine.engine import Engine
from horizon_lm.engine.handle import ForwardHandle
from horizon_lm.engine.replay import Surroundings, no_autocast_cache
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model.skeleton import meta_copy
from horizon_lm.schedule.ops import HEAD, Kind

IGNORED = -100
_LOGIT_BYTES = 64 * 2**20
_ROW_BLOCK = 4096  # rows of the head's gradient formed at once when it has another dtype than its buffer

ChunkLoss = Callable[[torch.Tensor], torch.Tensor]


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
        buffer = self.engine.head_weights[0]
        return {attribute: self._layout.view(buffer, name) for name, attribute in self._attributes.items()}

    def grads(self) -> dict[str, torch.Tensor]:
        """Views of the gradient buffer, likewise, for what is trained."""
        trainable = set(self.engine.trainable(HEAD))
        layout, buffer = self.engine.slabs(HEAD).grad_layout, self.engine.head_grads[0]
        return {a: layout.view(buffer, name) for name, a in self._attributes.items() if name in trainable}

    def zero_gaps(self) -> None:
        if self.grads():
            for gap in self.engine.slabs(HEAD).grad_layout.gaps(self.engine.head_grads[0]):
                gap.zero_()

    # Mode whole: the module is called once with all hidden states.

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits of all hidden states, differentiable when the forward records."""
        self.engine.require_forward(HEAD)
        handle = self.engine.handle
        if handle is not None and (hidden.requires_grad or self.engine.trainable(HEAD)):
            return _ProjectFunction.apply(_Projection(self, handle), hidden, self.engine.anchor)
        with self.engine.cursor.compute(Kind.FORWARD, HEAD), torch.no_grad(), no_autocast_cache():
            logits = self.run(self.weights(), hidden)
            self.engine.device.poison(self.engine.head_weights[0])
        return logits

    def run(self, weights: dict[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor:
        """The model's own head module with these weights."""
        self._module._parameters.update(weights)  # type: ignore[arg-type]
        return self._module.forward(hidden)


class _Projection:
    """One call of the head, with its graph but without the weights: they are streamed in again for the backward."""

    def __init__(self, head: Head, handle: ForwardHandle) -> None:
        self.head, self.handle = head, handle
        self.graph: tuple[torch.Tensor, torch.Tensor]  # (hidden leaf, logits)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        head, engine = self.head, self.head.engine
        buffer = engine.head_weights[0]
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
                weights[attribute].register_post_accumulate_grad_hook(self._landing(attribute))
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                logits = head.run(weights, leaf)
            self.graph = (leaf, logits)
            engine.device.poison(buffer)
        return logits.detach()

    def _landing(self, attribute: str) -> Callable[[torch.Tensor], None]:
        def take(leaf: torch.Tensor) -> None:
            with torch.no_grad():
                self.head.grads()[attribute].copy_(leaf.grad)
            leaf.grad = None

        return take

    def backward(self, grad: torch.Tensor) -> torch.Tensor | None:
        head, engine = self.head, self.head.engine
        leaf, logits = self.graph
        del self.graph
        with engine.cursor.compute(Kind.BACKWARD, HEAD):
            head.zero_gaps()
            with torch.enable_grad():
                torch.autograd.backward([logits], [grad])
            engine.device.poison(engine.head_weights[0])
        if head.grads():
            engine.landed(HEAD)
        return leaf.grad


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


# Mode chunked: the model's forward is called once per chunk of tokens, with a decoder that returns that chunk.


@dataclass(slots=True)
class LossInputs:
    """What the loss of a batch is made of, besides hidden states.

    Attributes:
        labels: (B, T), shifted: ``labels[b, t]`` is the target of hidden state ``[b, t]``.
        num_items: by what the sum over tokens is divided.
        options: further arguments of the model's loss function.
    """

    labels: torch.Tensor
    num_items: torch.Tensor | int
    options: dict[str, Any]


class ChunkedLoss:
    """The loss of a model over chunks of the trained tokens, so that logits never exist as a whole.

    ``call_model`` is the model's own forward. It is Hugging Face's code that scales and caps logits and computes the
    loss; only the decoder is replaced by one that returns hidden states.
    """

    def __init__(self, head: Head, call_model: Callable[..., Any]) -> None:
        self.head, self.engine, self._call_model = head, head.engine, call_model
        parts = self.engine.parts
        self._decoder, self._norm = parts.decoder, parts.final_norm
        weight = next(iter(head._attributes))
        if type(parts.head) is not nn.Linear or head._attributes[weight] != "weight":
            raise ModelNotSupportedError(
                f"the head is a {type(parts.head).__name__}, not a plain Linear; stream with head='whole'"
            )
        self.chunk_tokens = self.engine.options.head_chunk_tokens or max(64, _LOGIT_BYTES // (4 * head.vocabulary))
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
        norm = self._norm
        if norm is None:
            return []
        own = {id(p) for p in norm._parameters.values()}
        return [
            n for n, ref in self.engine.refs.items() if any(m is norm for m, _ in ref.places) or id(ref.param) in own
        ]

    def loss(self, inputs: LossInputs, norm_weights: list[torch.Tensor]) -> torch.Tensor:
        """The loss of the hidden states that the forward saw; differentiable when the forward records."""
        hidden, self.hidden = self.hidden, None
        assert hidden is not None
        handle = self.engine.handle
        run = _LossRun(self, inputs, handle)
        return _LossFunction.apply(run, self.engine.anchor, hidden, *norm_weights)

    # What stands in for modules while the model's forward runs

    def seen_by_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm is left to the chunks."""
        self.hidden = hidden
        return hidden

    def seen_by_head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Instead of logits: one row of zeros, for a loss without labels."""
        if self._chunk is not None:
            return self._chunk.project(hidden)
        if self._norm is None:
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
    """Some trained tokens on their way through norm and head."""

    def __init__(self, owner: ChunkedLoss, hidden: torch.Tensor, norm: dict[str, torch.Tensor], first: bool, with_grads: bool) -> None:  # fmt: skip
        self.owner, self.hidden, self.norm_weights = owner, hidden, norm
        self.first, self.with_grads = first, with_grads

    def normalise(self) -> torch.Tensor:
        norm = self.owner._norm
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
        grads = self.owner.head.grads() if self.with_grads else {}
        return _ChunkLinear.apply(hidden, weights["weight"], weights.get("bias"), grads, self.first)


class _ChunkLinear(torch.autograd.Function):
    """``F.linear`` whose weight gradient is added into a buffer instead of being returned, chunk after chunk."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, grads: dict[str, torch.Tensor], first: bool) -> torch.Tensor:  # fmt: skip
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


class _LossRun:
    """The chunked loss of one forward, and its gradients: made at once where the buffer is free, else recomputed."""

    def __init__(self, owner: ChunkedLoss, inputs: LossInputs, handle: ForwardHandle | None) -> None:
        self.owner, self.engine, self.inputs, self.handle = owner, owner.engine, inputs, handle
        self.surroundings = Surroundings(self.engine.device.torch_device.type)
        self.made: tuple[torch.Tensor, list[torch.Tensor]] | None = None  # gradients of hidden states and norm

    def forward(self, hidden: torch.Tensor, norm: list[torch.Tensor]) -> torch.Tensor:
        make_grads = self.handle is not None and self.handle.head_grads
        with self.engine.cursor.compute(Kind.FORWARD, HEAD):
            loss, self.made = self._compute(hidden, norm, make_grads)
            self.engine.device.poison(self.engine.head_weights[0])
        if make_grads:
            self.engine.take_head_buffer(self.handle)
        return loss

    def backward(self, grad: torch.Tensor, hidden: torch.Tensor, norm: list[torch.Tensor]) -> tuple[Any, ...]:
        assert self.handle is not None
        head, engine = self.owner.head, self.engine
        with engine.cursor.compute(Kind.BACKWARD, HEAD):
            if not self.handle.head_grads:  # never made, or evicted from the buffer by another backward
                _, self.made = self.surroundings.run(lambda: self._compute(hidden, norm, make_grads=True))
                engine.device.poison(engine.head_weights[0])
            (hidden_grad, norm_grads), self.made = self.made, None
            head.zero_gaps()
            if grad.device.type != "cpu" or grad != 1:  # reading it from an accelerator would cost a wait
                for tensor in (hidden_grad, *norm_grads, *head.grads().values()):
                    tensor.mul_(grad)
        if head.grads():
            engine.landed(HEAD)
        return hidden_grad, norm_grads

    def _compute(self, hidden: torch.Tensor, norm: list[torch.Tensor], make_grads: bool) -> Any:
        """Loss, and if asked for the gradients of hidden states and norm; those of the head go into its buffer."""
        owner = self.owner
        flat, labels = hidden.detach().reshape(-1, hidden.shape[-1]), self.inputs.labels.reshape(-1)
        trained = (labels != IGNORED).nonzero().squeeze(1)
        names = [n.rpartition(".")[2] for n in owner.norm_names]
        hidden_grad = torch.zeros_like(flat) if make_grads else None
        leaves = [w.detach().requires_grad_(make_grads) for w in norm]
        if make_grads and not len(trained):
            for tensor in owner.head.grads().values():
                tensor.zero_()
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.set_grad_enabled(make_grads), no_autocast_cache():
            for number, index in enumerate(trained.split(owner.chunk_tokens)):
                leaf = flat[index].requires_grad_(make_grads)
                chunk = _Chunk(owner, leaf[None], dict(zip(names, leaves, strict=True)), number == 0, make_grads)
                target = labels[index][None]
                with owner.computing(chunk):
                    loss = owner._call_model(labels=target, shift_labels=target, **self.inputs.options).loss
                if make_grads:
                    torch.autograd.backward([loss])
                    hidden_grad[index] = leaf.grad
                total = total + loss.detach()
        if not len(trained):
            total = total / self.inputs.num_items
        if not make_grads:
            return total, None
        grads = [torch.zeros_like(w) if w.grad is None else w.grad for w in leaves]
        return total, (hidden_grad.view(hidden.shape), grads)


class _LossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: _LossRun, anchor: torch.Tensor, hidden: torch.Tensor, *norm: torch.Tensor) -> torch.Tensor:  # fmt: skip
        ctx.run = run
        loss = run.forward(hidden, list(norm))
        ctx.save_for_backward(hidden, *norm)
        return loss

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        run: _LossRun = ctx.run
        assert run.handle is not None
        with run.engine.backward_of(run.handle):
            hidden, *norm = ctx.saved_tensors
            hidden_grad, norm_grads = run.backward(grad, hidden, norm)
        return None, None, hidden_grad, *norm_grads
