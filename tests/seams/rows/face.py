"""A streamed model as an object: its class, calls of single modules, copies, and memory left after it is dropped."""

import copy
import gc
import inspect
import io
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import psutil
import torch
import transformers
from packaging.version import Version
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

import horizon_lm
from tests.seams.seam import EITHER, REJECTED, Case, row
from tests.seams.use import adamw, copied_gradients, evaluated, gradients, is_streamed, loss, train
from tests.support import tiny_models

SECTION = "The model's modules"
OBJECT = "The model as an object"


@row("face.signature", OBJECT, "`inspect.signature` of the model's `forward` and of its class")
def signature(model: Any) -> Any:
    init = list(inspect.signature(type(model).__init__).parameters)
    return [str(inspect.signature(model.forward)), list(inspect.signature(type(model).forward).parameters), init]


@row("face.class", OBJECT, "`isinstance`, the class's name and module, `dtype`, `device`, `num_parameters()`, `config`")
def its_class(model: Any) -> Any:
    return [
        isinstance(model, LlamaForCausalLM), type(model).__name__, type(model).__module__, str(model.dtype),
        str(model.device), model.num_parameters(), model.config.to_dict(), model.can_generate(), model.training,
        [name for name, _ in model.named_parameters()], [name for name, _ in model.named_modules()],
    ]  # fmt: skip


@row("face.footprint", OBJECT, "`get_memory_footprint()`, and sizes of parameters: `numel`, `element_size`, `nbytes`")
def footprint(model: Any) -> Any:
    return [model.get_memory_footprint(), [(p.numel(), p.element_size(), p.nbytes) for p in model.parameters()]]


@row(
    "face.another",
    OBJECT,
    "Make a second model of the class: `type(model)(model.config)`",
    EITHER,
)
def another(model: Any) -> Any:
    torch.manual_seed(5)
    other = type(model)(model.config)
    return [evaluated(other), float(other(**tiny_models.batch()).loss)]


@row("face.positional", OBJECT, "Positional arguments, and `model.forward(...)` instead of `model(...)`")
def positional(model: Any) -> Any:
    batch = tiny_models.batch()
    first = model(batch["input_ids"], batch["attention_mask"], labels=batch["labels"]).loss
    second = model.forward(**batch).loss
    (first + second).backward()
    return [float(first), float(second), copied_gradients(model)]


@row("face.unknown-argument", OBJECT, "An argument that the model does not have", EITHER,
     cases={"llama": Case(), "gpt2": Case(partial(tiny_models.build, "gpt2"))})  # fmt: skip
def unknown_argument(model: Any) -> Any:
    return float(model(**tiny_models.batch(), unknown_argument=1).loss)


@row("face.tuple", OBJECT, "`return_dict=False`, and unpacking the output: `output[0]`, `output.to_tuple()`",
     cases={"whole": Case(options={"head": "whole"}), "chunked": Case()})  # fmt: skip
def as_tuple(model: Any) -> Any:
    output = model(**tiny_models.batch())
    return [float(model(**tiny_models.batch(), return_dict=False)[0]), float(output[0]), float(output["loss"])]


@row("face.logits", OBJECT, "Read `output.logits` of a call with labels",
     EITHER, cases={"whole": Case(options={"head": "whole"}), "chunked": Case()})  # fmt: skip
def logits(model: Any) -> Any:
    output = model(**tiny_models.batch())
    return [float(output.loss), output.logits.argmax(-1)]


@row("face.own-loss", OBJECT, "A custom loss on logits, without labels")
def own_loss(model: Any) -> Any:
    batch = tiny_models.batch()
    labels = batch.pop("labels")
    value = F.cross_entropy(model(**batch).logits.flatten(0, 1).float(), labels.flatten())
    value.backward()
    return [float(value), copied_gradients(model)]


@row("face.logits-to-keep", OBJECT, "`logits_to_keep` without labels, in training and in evaluation")
def logits_to_keep(model: Any) -> Any:
    batch = tiny_models.batch()
    batch.pop("labels")
    value = model(**batch, logits_to_keep=3).logits
    value.float().pow(2).mean().backward()
    return [value, copied_gradients(model)]


@row("face.use-cache", OBJECT, "`use_cache=True` in training, or in the config", EITHER,
     cases={"argument": Case(arguments={"how": "argument"}), "config": Case(arguments={"how": "config"})})  # fmt: skip
def use_cache(model: Any, how: str) -> Any:
    if how == "argument":
        return float(loss(model, use_cache=True))
    model.config.use_cache = True
    return gradients(model)


@row("face.cache", OBJECT, "`past_key_values`, or `cache` since transformers 5.24, in training", EITHER,
     cases={"empty": Case(arguments={"num_before": 0}), "prefix": Case(arguments={"num_before": 4}),
            "newer name": Case(arguments={"num_before": 4, "name": "cache"})})  # fmt: skip
def cache(model: Any, num_before: int, name: str = "past_key_values") -> Any:
    past = DynamicCache(config=model.config)
    ids = tiny_models.batch(padding="none")["input_ids"]
    if Version(transformers.__version__) < Version("5.24"):
        name = "past_key_values"
    if num_before:
        with torch.no_grad():
            model(input_ids=ids[:, :num_before], use_cache=True, **{name: past})
    ids = ids[:, num_before:]
    return gradients(model, input_ids=ids, labels=ids, attention_mask=None, **{name: past})


@row("face.gradient-checkpointing", OBJECT, "`gradient_checkpointing_enable()`, which every trainer calls, and `is_gradient_checkpointing`",
     cases={"called": Case(), "before": Case(lambda: _checkpointed())})  # fmt: skip
def gradient_checkpointing(model: Any) -> Any:
    states, values = [model.is_gradient_checkpointing], []
    takes_arguments = (
        "gradient_checkpointing_kwargs" in inspect.signature(model.gradient_checkpointing_enable).parameters
    )
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    states.append(model.is_gradient_checkpointing)
    calls: list[Any] = []
    with model.model.layers[1].self_attn.q_proj.register_forward_hook(lambda *args: calls.append(None)):
        values.append(gradients(model))
    model.gradient_checkpointing_disable()
    states.append(model.is_gradient_checkpointing)
    return [values, gradients(model), states, len(calls), takes_arguments]


def _checkpointed() -> Any:
    model = tiny_models.build("llama")
    model.gradient_checkpointing_enable()
    return model


@row("face.embeds", OBJECT, "`inputs_embeds=model.get_input_embeddings()(ids).detach()`, also changed in place",
     cases={"llama": Case(), "gpt2": Case(partial(tiny_models.build, "gpt2"))})  # fmt: skip
def detached_embeds(model: Any) -> Any:
    batch = tiny_models.batch()
    ids = batch.pop("input_ids")
    embeds = model.get_input_embeddings()(ids)
    embeds[:, 0] = 0.5
    needs_gradient = embeds.requires_grad
    return [needs_gradient, gradients(model, input_ids=None, inputs_embeds=embeds.detach())]


@row("face.input-grads", OBJECT, "`enable_input_require_grads()`", EITHER)
def input_grads(model: Any) -> Any:
    model.enable_input_require_grads()
    try:
        return gradients(model)
    finally:
        model.disable_input_require_grads()


@row("face.tie-weights", OBJECT, "`tie_weights()`, `set_input_embeddings(get_input_embeddings())`",
     cases={family: Case(partial(tiny_models.build, family)) for family in ("llama", "gpt2")})  # fmt: skip
def tie_weights(model: Any) -> Any:
    model.tie_weights()
    model.set_input_embeddings(model.get_input_embeddings())
    model.set_output_embeddings(model.get_output_embeddings())
    return gradients(model)


@row("face.init-weights", OBJECT, "`init_weights()` or `apply(init)` after `stream()`", EITHER,
     cases={how: Case(arguments={"how": how}) for how in ("apply", "init_weights")})  # fmt: skip
def init_weights(model: Any, how: str) -> Any:
    def draw(module: Any) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)

    torch.manual_seed(8)
    model.apply(draw) if how == "apply" else model.init_weights()
    return gradients(model)


@row("face.resize", OBJECT, "`resize_token_embeddings(n)`", REJECTED, says="before|first",
     cases={str(n): Case(arguments={"size": n}) for n in (96, 104)})  # fmt: skip
def resize(model: Any, size: int) -> Any:
    model.resize_token_embeddings(size)
    return gradients(model)


@row("face.resize-same", OBJECT, "`resize_token_embeddings()` to the current size", EITHER)
def resize_same(model: Any) -> Any:
    model.resize_token_embeddings(tiny_models.VOCABULARY)
    return gradients(model)


# Single modules


def _ids() -> torch.Tensor:
    return tiny_models.batch(padding="none")["input_ids"]


def _hidden() -> torch.Tensor:
    return torch.randn(3, 11, 32, generator=torch.Generator().manual_seed(0))


def _rotary(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return model.model.rotary_emb(_hidden(), torch.arange(11)[None])


PARTS: dict[str, Callable[[Any], torch.Tensor]] = {
    "decoder": lambda model: model.model(_ids()).last_hidden_state,
    "decoder-of-embeddings": lambda model: model.model(inputs_embeds=_hidden()).last_hidden_state,
    "base-model": lambda model: model.base_model(_ids()).last_hidden_state,
    "head": lambda model: model.lm_head(_hidden()),
    "embedding": lambda model: model.get_input_embeddings()(_ids()),
    "norm": lambda model: model.model.norm(_hidden()),
    "block": lambda model: model.model.layers[1](_hidden(), position_embeddings=_rotary(model)),
    "linear": lambda model: model.model.layers[1].mlp.up_proj(_hidden()),
    "mlp": lambda model: model.model.layers[1].mlp(_hidden()),
    "head-of-decoder": lambda model: model.lm_head(model.model(_ids()).last_hidden_state),
    "weight": lambda model: _hidden() @ model.model.layers[1].mlp.up_proj.weight.t(),
    "head-weight": lambda model: F.linear(_hidden(), model.lm_head.weight),
}  # fmt: skip


@row(
    "face.part",
    SECTION,
    "Call single modules without gradients: `model.model(ids)`, `model.lm_head(h)`, `get_input_embeddings()(ids)`, a norm, "
    "a block or a linear layer",
    EITHER,
    cases={each: Case(arguments={"part": each}) for each in PARTS},
)
def part_alone(model: Any, part: str) -> Any:
    with torch.no_grad():
        return [PARTS[part](model), evaluated(model)]


@row("face.part-trained", SECTION, "Train through calls of single modules", EITHER, cases={each: Case(arguments={"part": each}) for each in PARTS})  # fmt: skip
def part_trained(model: Any, part: str) -> Any:
    PARTS[part](model).float().pow(2).mean().backward()
    return copied_gradients(model)


@row("face.part-between", SECTION, "Call single modules while an optimizer's updates are running", EITHER,
     cases={each: Case(arguments={"part": each}) for each in ("decoder", "head", "embedding", "norm", "mlp")},
     edits=True)  # fmt: skip
def part_between(model: Any, part: str) -> Any:
    optimizer = adamw(model)
    loss(model).backward()
    optimizer.step()
    with torch.no_grad():
        return [PARTS[part](model), evaluated(model)]


# Copies


def _torch_save(model: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": _torch_save,
    "deepcopy-in-a-list": lambda model: copy.deepcopy([model])[0],
}


@row("face.copy", OBJECT, "`copy.deepcopy`, pickle and `torch.save` of the model itself", REJECTED, says="state_dict|save_pretrained|load",
     cases={each: Case(arguments={"how": each}) for each in COPIES})  # fmt: skip
def copied(model: Any, how: str) -> Any:
    return evaluated(COPIES[how](model))


@row("face.copy-part", OBJECT, "`copy.deepcopy` or pickle of a module or of a parameter", EITHER,
     cases={"block": Case(arguments={"part": "model.layers.1.mlp"}), "norm": Case(arguments={"part": "model.norm"}),
            "head": Case(arguments={"part": "lm_head"})})  # fmt: skip
def copied_part(model: Any, part: str) -> Any:
    expected = evaluated(model)
    other = copy.deepcopy(model.get_submodule(part))
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    return [[p.detach().clone() for p in other.parameters()], evaluated(model) == expected]


@row("face.copy-parameter", OBJECT, "`copy.deepcopy`, `torch.save` or `p.clone()` of parameters", EITHER,
     cases={how: Case(arguments={"how": how}) for how in ("deepcopy", "save", "clone")})  # fmt: skip
def copied_parameter(model: Any, how: str) -> Any:
    def duplicate(param: Any) -> Any:
        if how == "save":
            buffer = io.BytesIO()
            torch.save(param, buffer)
            buffer.seek(0)
            return torch.load(buffer, weights_only=False)
        return copy.deepcopy(param) if how == "deepcopy" else param.detach().clone()

    copies = [duplicate(param) for param in model.parameters()]
    with torch.no_grad():
        model.model.norm.weight.mul_(0.5)
    return [[each.detach() for each in copies], evaluated(model)]


@row("face.shallow-copy", OBJECT, "`copy.copy(model)`", EITHER)
def shallow_copy(model: Any) -> Any:
    return [evaluated(copy.copy(model)), gradients(model)]


# Copies, second models, optimizers


def _large() -> Any:
    """Return a model of a few megabytes."""
    settings = tiny_models._COMMON | {"vocab_size": 8000, "hidden_size": 32, "num_hidden_layers": 2}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **settings))


def _use_and_drop(streamed: bool, trained: bool) -> weakref.ref[Any]:
    model = _large()
    if streamed:
        model = horizon_lm.stream(model, precision="float32")
    if trained:
        train(model, adamw(model), steps=1)
    else:
        evaluated(model)
    return weakref.ref(model)


@row("face.dropped", OBJECT, "Make, use and drop models one after the other: the last reference frees memory and threads",
     cases={"trained": Case(arguments={"trained": True}), "evaluated": Case(arguments={"trained": False})})  # fmt: skip
def dropped(model: Any, trained: bool) -> Any:
    streamed = is_streamed(model)
    gc.collect()
    gc.disable()
    try:
        _use_and_drop(streamed, trained)
        threads, before = threading.active_count(), psutil.Process().memory_info().rss
        left = [_use_and_drop(streamed, trained) for _ in range(15)]
        grown = psutil.Process().memory_info().rss - before
        for _ in range(100):  # threads end soon after their device
            if threading.active_count() <= threads:
                break
            time.sleep(0.05)
        return {
            "alive": sum(each() is not None for each in left),
            "threads": max(threading.active_count() - threads, 0),
            "MiB": grown // 2**20 if grown > 64 * 2**20 else 0,
        }
    finally:
        gc.enable()
        gc.collect()


@row("face.other-optimizer", OBJECT, "Make a second optimizer during training")
def other_optimizer(model: Any) -> Any:
    first = train(model, adamw(model))
    return first + train(model, adamw(model, lr=1e-3))
