"""The loss in chunks of tokens (head mode ``chunked``), so that logits never exist as a whole.

The model's own forward is called once per chunk, with a decoder that returns that chunk's hidden states: it is Hugging
Face's code that scales and caps logits and computes the loss.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from horizon_lm.engine.handle import ForwardHandle
from horizon_lm.engine.head import Head
from horizon_lm.engine.replay import Surroundings, no_autocast_cache
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model.parts import ModelParts
from horizon_lm.schedule.ops import HEAD, Kind

IGNORED = -100  # label of a token that is not trained, as in torch.nn.functional.cross_entropy
_ROW_BLOCK = 4096  # rows of the head's gradient formed at once when it has another dtype than its buffer


@dataclass(slots=True)
class LossInputs:
    """What the loss of a batch is made of, besides hidden states.

    Attributes:
        labels: (B, T), shifted: ``labels[b, t]`` is the target of hidden state ``[b, t]``.
        trained: (n,) positions in the flattened labels of those that are not ignored.
        num_items: by what the sum over tokens is divided.
        options: further arguments of the model's loss function.
    """

    labels: torch.Tensor
    trained: torch.Tensor
    num_items: torch.Tensor | int
    options: dict[str, Any]

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
        return cls(shifted.to(device, non_blocking=True), trained.to(device, non_blocking=True), num_items, {})


class TokenLogprobs(NamedTuple):
    """Values (B, T) in fp32 of the token that follows each position, 0 where it is not trained.

    Attributes:
        logprobs: natural logarithm of the token's probability.
        mean: of the log-probabilities of the whole vocabulary, for label smoothing; None unless asked for.
        entropy: of the distribution, in nats; None unless asked for.
    """

    logprobs: torch.Tensor
    mean: torch.Tensor | None
    entropy: torch.Tensor | None


def logprobs_of_logits(
    logits: torch.Tensor, labels: torch.Tensor, temperature: float, statistics: bool
) -> list[torch.Tensor]:
    """Per token the log-probability of its label, and on request the mean over the vocabulary and the entropy.

    Args:
        logits: (n, V).
        labels: (n,), none ignored.
    """
    logs = torch.log_softmax(logits.float() / temperature if temperature != 1 else logits.float(), dim=-1)
    values = [logs.gather(-1, labels[:, None]).squeeze(-1)]
    if statistics:
        values += [logs.mean(-1), -(logs.exp() * logs).sum(-1)]
    return values


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
        if self.norm is None:
            self.hidden = hidden
        elif self.hidden is None or hidden.shape != self.hidden.shape or hidden.data_ptr() != self.hidden.data_ptr():
            raise ModelNotSupportedError(
                f"{type(self._decoder).__name__} does more between its final norm and the head than the norm, so the "
                "head cannot be computed in chunks; stream with head='whole'"
            )
        return hidden.new_zeros((1, 1, self.head.vocabulary))

    def token_logprobs(
        self, inputs: LossInputs, norm_weights: list[torch.Tensor], temperature: float, statistics: bool
    ) -> TokenLogprobs:
        """Of the trained tokens of the hidden states that the forward saw; differentiable when the forward records."""
        hidden, self.hidden = self.hidden, None
        assert hidden is not None
        run = _LogprobRun(self, inputs, self.engine.handle, temperature, statistics)
        values = _LogprobFunction.apply(run, self.engine.anchor, hidden, *norm_weights)
        whole = [v.view(inputs.labels.shape) for v in values]
        return TokenLogprobs(*whole) if statistics else TokenLogprobs(whole[0], None, None)

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


class _Run:
    """Chunks of one forward's trained tokens."""

    def __init__(self, owner: ChunkedHead, inputs: LossInputs, handle: ForwardHandle | None) -> None:
        self.owner, self.engine, self.inputs, self.handle = owner, owner.engine, inputs, handle
        self.surroundings = Surroundings(self.engine.device.torch_device.type)

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
            return self.owner.call_model(**arguments, **self.inputs.options)

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


class _LossRun(_Run):
    """The chunked loss of one forward, and its gradients: made at once where the buffer is free, else recomputed."""

    made: Grads | None = None

    def forward(self, hidden: torch.Tensor, norm: list[torch.Tensor]) -> torch.Tensor:
        handle = self.handle
        with self.engine.cursor.compute(Kind.FORWARD, HEAD):
            if handle is not None and handle.head_grads:
                loss, self.made = self._loss_and_grads(hidden, norm)
                self.engine.take_head_buffer(handle)
            else:
                loss = self._loss(hidden, norm)
            self.engine.device.poison(self.engine.memory.head_weights[0])
        return loss

    def backward(self, grad: torch.Tensor, hidden: torch.Tensor, norm: list[torch.Tensor]) -> Grads:
        assert self.handle is not None
        head, engine = self.owner.head, self.engine
        with engine.cursor.compute(Kind.BACKWARD, HEAD):
            if self.made is None or not self.handle.head_grads:  # never made, or evicted by another backward
                _, self.made = self.surroundings.run(lambda: self._loss_and_grads(hidden, norm))
                engine.device.poison(engine.memory.head_weights[0])
            (hidden_grad, norm_grads), self.made = self.made, None
            head.zero_gaps()
            if grad.device.type != "cpu" or grad != 1:  # reading it from an accelerator would cost a wait
                for tensor in (hidden_grad, *norm_grads, *head.grads().values()):
                    tensor.mul_(grad)
        if head.grads():
            engine.landed(HEAD)
        return hidden_grad, norm_grads

    def _loss(self, hidden: torch.Tensor, norm: list[torch.Tensor]) -> torch.Tensor:
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with torch.no_grad(), no_autocast_cache():
            for index in self.chunks():
                total = total + self._of_chunk(flat[index], index, norm, None, first=False)
        return total if len(self.inputs.trained) else total / self.inputs.num_items

    def _loss_and_grads(self, hidden: torch.Tensor, norm: list[torch.Tensor]) -> tuple[torch.Tensor, Grads]:
        """Also the gradients for a loss gradient of one; those of the head go into its buffer."""
        losses = [torch.zeros((), dtype=torch.float32, device=hidden.device)]

        def of_chunk(*chunk: Any) -> None:
            loss = self._of_chunk(*chunk)
            torch.autograd.backward([loss])
            losses[0] = losses[0] + loss.detach()

        grads = self.differentiate(hidden, norm, of_chunk)
        return losses[0] if len(self.inputs.trained) else losses[0] / self.inputs.num_items, grads

    def _of_chunk(
        self, hidden: torch.Tensor, index: torch.Tensor, norm: list[torch.Tensor],
        grads: dict[str, torch.Tensor] | None, first: bool,
    ) -> torch.Tensor:  # fmt: skip
        """The loss of the tokens at ``index``, whose hidden states (n, H) are given."""
        target = self.inputs.labels.reshape(-1)[index][None]
        return self.call_model(
            hidden, norm, grads, first, labels=target, shift_labels=target, num_items_in_batch=self.inputs.num_items
        ).loss


class _LossFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: _LossRun, anchor: torch.Tensor, hidden: torch.Tensor, *norm: torch.Tensor
    ) -> torch.Tensor:
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


class _LogprobRun(_Run):
    """Log-probabilities of one forward's trained tokens; logits are made again for the backward."""

    def __init__(
        self, owner: ChunkedHead, inputs: LossInputs, handle: ForwardHandle | None, temperature: float, statistics: bool
    ) -> None:
        super().__init__(owner, inputs, handle)
        self._temperature, self._statistics = temperature, statistics

    def forward(self, hidden: torch.Tensor, norm: list[torch.Tensor]) -> list[torch.Tensor]:
        flat = hidden.detach().reshape(-1, hidden.shape[-1])
        values = [flat.new_zeros(flat.shape[0], dtype=torch.float32) for _ in range(3 if self._statistics else 1)]
        with self.engine.cursor.compute(Kind.FORWARD, HEAD), torch.no_grad(), no_autocast_cache():
            for index in self.chunks():
                for whole, part in zip(values, self._of_chunk(flat[index], index, norm, None, False), strict=True):
                    whole[index] = part
            self.engine.device.poison(self.engine.memory.head_weights[0])
        return values

    def backward(self, grads: Sequence[torch.Tensor | None], hidden: torch.Tensor, norm: list[torch.Tensor]) -> Grads:
        head, engine = self.owner.head, self.engine

        def of_chunk(leaf: torch.Tensor, index: torch.Tensor, *rest: Any) -> None:
            pairs = zip(self._of_chunk(leaf, index, *rest), grads, strict=True)
            wanted = [(value, grad[index]) for value, grad in pairs if grad is not None]
            torch.autograd.backward([value for value, _ in wanted], [grad for _, grad in wanted])

        with engine.cursor.compute(Kind.BACKWARD, HEAD):
            result = self.surroundings.run(lambda: self.differentiate(hidden, norm, of_chunk))
            head.zero_gaps()
            engine.device.poison(engine.memory.head_weights[0])
        if head.grads():
            engine.landed(HEAD)
        return result

    def _of_chunk(
        self, hidden: torch.Tensor, index: torch.Tensor, norm: list[torch.Tensor],
        grads: dict[str, torch.Tensor] | None, first: bool,
    ) -> list[torch.Tensor]:  # fmt: skip
        logits = self.call_model(hidden, norm, grads, first).logits[0]
        return logprobs_of_logits(logits, self.inputs.labels.reshape(-1)[index], self._temperature, self._statistics)


class _LogprobFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: _LogprobRun, anchor: torch.Tensor, hidden: torch.Tensor, *norm: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        values = run.forward(hidden, list(norm))
        ctx.save_for_backward(hidden, *norm)
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[Any, ...]:
        run: _LogprobRun = ctx.run
        assert run.handle is not None
        with run.engine.backward_of(run.handle):
            hidden, *norm = ctx.saved_tensors
            hidden_grad, norm_grads = run.backward(grads, hidden, norm)
        return None, None, hidden_grad, *norm_grads
