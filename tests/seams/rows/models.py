"""Models with unusual behavior."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import horizon_lm
from tests.seams.seam import EITHER, REJECTED, Case, row
from tests.seams.tiny import UNSHIFTED, tiny
from tests.seams.use import adamw, copied_weights, evaluated, gradients, is_streamed, loss, train
from tests.support import tiny_models

SECTION = "Models"


@row(
    "W2.unshifted",
    SECTION,
    "Train and evaluate a model whose own loss is not the shifted one, with the default head",
    cases={each: Case(partial(tiny, each)) for each in UNSHIFTED},
)
def unshifted(model: Any) -> Any:
    return [evaluated(model), gradients(model)]


@row(
    "W3.layers-before-the-head",
    SECTION,
    "A model with layers between its blocks and its head (rembert), with the default head",
    cases={
        "narrower": Case(partial(tiny, "rembert")),
        "as-wide": Case(partial(tiny, "rembert", output_embedding_size=32)),
    },
)
def layers_before_the_head(model: Any) -> Any:
    return [evaluated(model), gradients(model)]


@row(
    "W3.logprobs",
    SECTION,
    "`token_logprobs` of models with layers before the head, or with their own loss",
    cases={each: Case(partial(tiny, each)) for each in ("llama", "rembert", "bart", "whisper")}
    | {"as-wide": Case(partial(tiny, "rembert", output_embedding_size=32))},
)
def logprobs(model: Any) -> Any:
    batch = tiny_models.batch()
    labels = batch.pop("labels")
    if is_streamed(model):
        return horizon_lm.token_logprobs(model, labels=labels, **batch).logprobs[:, :-1]
    logprobs = model(**batch).logits.log_softmax(-1)[:, :-1]
    taken = logprobs.gather(-1, labels[:, 1:].clamp_min(0)[..., None])[..., 0]
    return taken.masked_fill(labels[:, 1:] == -100, 0)


class _Normed(nn.Embedding):
    """An embedding that normalises its rows after the lookup, so that its gradients depend on their values."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.normalize(super().forward(ids), dim=-1)


def _normed() -> Any:
    model = tiny_models.build("llama")
    model.model.embed_tokens.__class__ = _Normed
    return model


@row(
    "W4.normed-embedding",
    SECTION,
    "A model whose embedding changes the rows that it looks up",
    cases={"muse_glimmer": Case(partial(tiny, "muse_glimmer")), "muse_glimmer-whole": Case(partial(tiny, "muse_glimmer"), {"head": "whole"}),
           "muse_spark": Case(partial(tiny, "muse_spark"), {"head": "whole"}),
           "any": Case(_normed), "micro-batches": Case(_normed, {"device_micro_batch_size": 1})},
)  # fmt: skip
def normed_embedding(model: Any) -> Any:
    return [evaluated(model), gradients(model)]


@row(
    "W4.max-norm",
    SECTION,
    "An embedding with `max_norm`, which writes its table in the forward pass",
    EITHER,
    cases={"": Case(lambda: _set(tiny_models.build("llama"), "model.embed_tokens", "max_norm", 0.1))},
)
def max_norm(model: Any) -> Any:
    return [gradients(model), gradients(model), copied_weights(model)]


def _set(model: Any, module: str, attribute: str, value: Any) -> Any:
    setattr(model.get_submodule(module), attribute, value)
    return model


_STATES = ("llama", "qwen3", "gemma3_text", "phi3", "gpt2", "gpt_neox", "opt", "mixtral", "cohere2", "falcon")


@row(
    "W8.hidden-states",
    SECTION,
    "`output_hidden_states=True` with labels and the default head: the last one is normed, as in a plain model",
    cases={each: Case(partial(tiny_models.build, each)) for each in _STATES},
)
def hidden_states(model: Any) -> Any:
    output = model(**tiny_models.batch(), output_hidden_states=True)
    return [list(output.hidden_states), float(output.loss)]


@row(
    "W8.loss-on-hidden-states",
    SECTION,
    "A loss from hidden states and the model's own loss, with the default head",
    cases={
        f"{each}-{index}": Case(partial(tiny_models.build, each), arguments={"index": index})
        for each in _STATES
        for index in (-1, 1)
        if index == -1 or each in ("llama", "gpt2", "mixtral")
    },
)
def loss_on_hidden_states(model: Any, index: int) -> Any:
    output = model(**tiny_models.batch(), output_hidden_states=True)
    value = output.loss + output.hidden_states[index].pow(2).mean()
    value.backward()
    return [float(value), {name: p.grad for name, p in model.named_parameters()}]


@row("W8.attentions", SECTION, "`output_attentions=True` with labels", EITHER,
     cases={"": Case(partial(tiny_models.build, "llama", attn_implementation="eager"))})  # fmt: skip
def attentions(model: Any) -> Any:
    output = model(**tiny_models.batch(), output_attentions=True)
    output.loss.backward()
    return [list(output.attentions), float(output.loss), {name: p.grad for name, p in model.named_parameters()}]


class _Scale(nn.Module):
    """A module that multiplies by a number, which is stored in a given way."""

    def __init__(self, how: str, value: float) -> None:
        super().__init__()
        self.how = how
        self.stored: Any = _KEPT[how](value)
        if how == "private":
            self._hidden = value

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (self._hidden if self.how == "private" else _READ[self.how](self.stored))


class _Settings:
    def __init__(self, value: float) -> None:
        self.value = value


def _times(value: float) -> Callable[[], float]:
    return lambda: value


_KEPT: dict[str, Callable[[float], Any]] = {
    "list": lambda v: [v], "dict": lambda v: {"default": v}, "set": lambda v: {v}, "function": _times,
    "tensor": lambda v: torch.tensor(v), "private": lambda v: None, "config": _Settings, "tuple": lambda v: (v, [v]),
    "dtype": lambda v: torch.float16 if v > 1 else torch.float32, "method": lambda v: _Settings(v).__getattribute__,
    "partial": lambda v: partial(_times(v)),
}  # fmt: skip
_READ: dict[str, Callable[[Any], Any]] = {
    "list": lambda s: s[0], "dict": lambda s: s["default"], "set": lambda s: next(iter(s)), "function": lambda s: s(),
    "tensor": lambda s: s, "config": lambda s: s.value, "tuple": lambda s: s[1][0],
    "dtype": lambda s: 1.5 if s == torch.float16 else 0.5, "method": lambda s: s("value"), "partial": lambda s: s(),
}  # fmt: skip


def _differing(how: str) -> Any:
    """Return a model whose blocks differ in a number that is stored in a given way."""
    model = tiny_models.build("llama")
    for index, layer in enumerate(model.model.layers):
        layer.mlp = nn.Sequential(layer.mlp, _Scale(how, 0.5 + index))
    return model


@row(
    "W9.blocks-that-differ",
    SECTION,
    "Blocks that differ in a list, dict, set, function, tensor, private attribute or object of their own",
    cases={
        f"{how}-{size}": Case(partial(_differing, how), options)
        for how in _KEPT
        for size, options in (("whole", {"head": "whole"}), ("micro-batches", {"device_micro_batch_size": 2}))
        if size == "whole" or how in ("dict", "function")
    },
)
def blocks_that_differ(model: Any) -> Any:
    return [evaluated(model), gradients(model)]


@row(
    "W9.changed-later",
    SECTION,
    "Change a list, dict or object that a module in a block computes with, after `stream()`",
    cases={how: Case(partial(_differing, how)) for how in ("list", "dict", "config", "private", "function")},
)
def changed_later(model: Any) -> Any:
    first = evaluated(model)
    for index, layer in enumerate(model.model.layers):
        scale = layer.mlp[1]
        if scale.how in ("list", "dict"):
            scale.stored[0 if scale.how == "list" else "default"] = 2.0 - index
        elif scale.how == "config":
            scale.stored.value = 2.0 - index
        elif scale.how == "private":
            scale._hidden = 2.0 - index
        else:
            scale.stored = _times(2.0 - index)
    return [first, evaluated(model), gradients(model)]


@row("W12.own-mask", SECTION, "`attn_implementation='varlen'` for a model that makes its own masks (doge)", REJECTED,
     cases={"doge": Case(partial(tiny, "doge"), {"attn_implementation": "varlen"})}, survives=False)  # fmt: skip
def own_mask(model: Any) -> Any:
    return [evaluated(model), gradients(model)]


@row("W12.own-mask-later", SECTION, "`set_attn_implementation('varlen')` for a model that makes its own masks, after `stream()`", REJECTED,
     cases={"doge": Case(partial(tiny, "doge"))})  # fmt: skip
def own_mask_later(model: Any) -> Any:
    expected = evaluated(model)
    if is_streamed(model):
        try:
            model.set_attn_implementation("varlen")
            return evaluated(model)
        finally:
            model.set_attn_implementation("sdpa")
    return expected


@row(
    "models.doge",
    SECTION,
    "A model that makes its own masks (doge), with its own attention",
    cases={"doge": Case(partial(tiny, "doge"))},
)
def doge(model: Any) -> Any:
    return [train(model, adamw(model)), evaluated(model)]


def _biased(family: str) -> Any:
    """Return a model whose tied head has a bias."""
    model = tiny_models.build(family, tie_word_embeddings=True)
    head = model.get_output_embeddings()
    head.bias = nn.Parameter(torch.randn(head.out_features) * 0.1)
    return model


@row(
    "models.tied-bias",
    SECTION,
    "A head that is tied to the embedding and has a bias",
    cases={
        f"{family}-{name}": Case(partial(_biased, family), options)
        for family in ("llama", "gpt2")
        for name, options in (("chunked", {}), ("whole", {"head": "whole"}), ("resident", {"resident_blocks": 3}))
    },
)
def tied_bias(model: Any) -> Any:
    optimizer = adamw(model)
    first = gradients(model)
    optimizer.zero_grad()
    return [first, train(model, optimizer), evaluated(model)]


@row("models.sparse", SECTION, "An embedding with `sparse=True`", EITHER,
     cases={"": Case(lambda: _set(tiny_models.build("llama"), "model.embed_tokens", "sparse", True))})  # fmt: skip
def sparse(model: Any) -> Any:
    loss(model).backward()
    return {n: p.grad.to_dense() if p.grad.is_sparse else p.grad for n, p in model.named_parameters()}


def _loss_of_its_own(model: Any) -> Any:
    """Replace the loss function of a model, like a trainer."""

    def own(logits: torch.Tensor, labels: torch.Tensor, vocab_size: int, **kwargs: Any) -> torch.Tensor:
        return logits.float().pow(2).mean()

    model.loss_function = own
    return model


@row("models.loss-function", SECTION, "A custom `loss_function`, set before or after `stream()`", EITHER,
     cases={
         "before": Case(lambda: _loss_of_its_own(tiny_models.build("llama")), {}, {"later": False}),
         "before-whole": Case(lambda: _loss_of_its_own(tiny_models.build("llama")), {"head": "whole"}, {"later": False}),
         "after": Case(arguments={"later": True}),
         "after-whole": Case(options={"head": "whole"}, arguments={"later": True}),
     })  # fmt: skip
def loss_function(model: Any, later: bool) -> Any:
    if not later:
        return gradients(model)
    before = model.loss_function
    try:
        return gradients(_loss_of_its_own(model))
    finally:
        model.loss_function = before
