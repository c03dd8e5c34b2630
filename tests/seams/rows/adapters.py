"""PEFT adapters."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import torch
from safetensors.torch import load_file

from tests.seams.seam import EITHER, Case, row
from tests.seams.use import adamw, copied_weights, evaluated, gradients, train
from tests.support import tiny_models

SECTION = "PEFT"


def _config(**settings: Any) -> peft.LoraConfig:
    settings = {
        "r": 4,
        "lora_alpha": 16,
        "target_modules": ["q_proj", "up_proj"],
        "init_lora_weights": False,
    } | settings
    return peft.LoraConfig(task_type="CAUSAL_LM", **settings)


def _adapted(**settings: Any) -> Any:
    model = peft.get_peft_model(tiny_models.build("llama"), _config(**settings))
    return model.train()


def _two() -> Any:
    model = _adapted()
    model.add_adapter("second", _config(r=2, lora_alpha=32))
    return model.train()


_LORA = {"": Case(_adapted)}
_KINDS = {
    "lora": Case(_adapted),
    "mixed-ranks": Case(partial(_adapted, rank_pattern={"layers.1.mlp.up_proj": 8}, alpha_pattern={"layers.0.mlp.up_proj": 64})),
    "rslora": Case(partial(_adapted, use_rslora=True, rank_pattern={"layers.2.self_attn.q_proj": 2})),
    "one-layer": Case(partial(_adapted, layers_to_transform=[1])),
    "bias": Case(partial(_adapted, bias="lora_only")),
    "dora": Case(partial(_adapted, use_dora=True)),
    "saved-head": Case(partial(_adapted, modules_to_save=["lm_head"])),
    "embedding": Case(partial(_adapted, target_modules=["q_proj", "embed_tokens"])),
    "head": Case(partial(_adapted, target_modules=["q_proj", "lm_head"])),
    "whole": Case(_adapted, {"head": "whole"}),
    "micro-batches": Case(_adapted, {"device_micro_batch_size": 1}),
    "bf16": Case(_adapted, {"precision": "bf16"}),
}  # fmt: skip


@row("W20.train", SECTION, "Train `stream(get_peft_model(model))`, with different ranks and alphas", EITHER,
     cases={name: case for name, case in _KINDS.items() if name != "bf16"}, tolerance=1e-4)  # fmt: skip
def train_adapters(model: Any) -> Any:
    return [evaluated(model), gradients(model), train(model, adamw(model)), evaluated(model)]


@row("W20.ranks", SECTION, "Different ranks and alphas in blocks", cases={k: _KINDS[k] for k in ("lora", "mixed-ranks", "rslora", "one-layer")})  # fmt: skip
def ranks(model: Any) -> Any:
    return [evaluated(model), gradients(model)]


@row("W20.disable", SECTION, "`with model.disable_adapter():`", cases=_LORA | {"mixed": _KINDS["mixed-ranks"]})
def disable(model: Any) -> Any:
    first = evaluated(model)
    with model.disable_adapter():
        without = evaluated(model)
    return [first, without, evaluated(model), gradients(model)]


@row("W20.disable-before", SECTION, "`with model.disable_adapter():` before any other forward pass", cases=_LORA)
def disable_before(model: Any) -> Any:
    with model.disable_adapter():
        without = evaluated(model)
    return [without, evaluated(model)]


@row("W20.set", SECTION, "`set_adapter` with several adapters", EITHER, cases={"": Case(_two)})
def set_adapter(model: Any) -> Any:
    first = evaluated(model)
    model.set_adapter("second")
    try:
        return [first, evaluated(model), gradients(model)]
    finally:
        model.set_adapter("default")


@row("W20.add", SECTION, "`add_adapter` after `stream()`", cases=_LORA)
def add_adapter(model: Any) -> Any:
    first = evaluated(model)
    model.add_adapter("later", _config(r=2))
    try:
        model.set_adapter("later")
        return [first, evaluated(model), gradients(model)]
    finally:
        model.set_adapter("default")
        model.delete_adapter("later")


@row("W20.get", SECTION, "`get_peft_model(stream(model))`",
     cases={"train": Case(arguments={"training": True}), "evaluate": Case(arguments={"training": False})})  # fmt: skip
def get_peft_model(model: Any, training: bool) -> Any:
    adapted = peft.get_peft_model(model, _config())
    try:
        return gradients(adapted) if training else evaluated(adapted)
    finally:
        adapted.unload()
        model.requires_grad_(True)


def _in_bf16() -> Any:
    return tiny_models.build("llama").to(torch.bfloat16)


@row("W20.kbit", SECTION, "`prepare_model_for_kbit_training(model)` and `get_peft_model(model)`",
     cases={"float32": Case(), "bf16": Case(_in_bf16, {"precision": "bf16"}), "fp32_master": Case(_in_bf16, {"precision": "fp32_master"})},
     tolerance=1e-4)  # fmt: skip
def kbit(model: Any) -> Any:
    prepared = peft.prepare_model_for_kbit_training(model, gradient_checkpointing_kwargs={"use_reentrant": False})
    frozen = [param.requires_grad for param in prepared.parameters()]
    adapted = peft.get_peft_model(prepared, _config())
    for param in adapted.parameters():
        if param.requires_grad:  # in bfloat16 as in float32, whichever the base has
            param.data.copy_(torch.arange(param.numel()).remainder(7).sub(3).div(64).view(param.shape))
    try:
        return [frozen, gradients(adapted), adapted.get_nb_trainable_parameters()]
    finally:
        adapted.unload()
        model.requires_grad_(True)


@row("W20.merge", SECTION, "`merge_adapter()` and `unmerge_adapter()`", cases=_LORA, tolerance=1e-4)
def merge(model: Any) -> Any:
    first = evaluated(model)
    model.merge_adapter()
    merged, weights = evaluated(model), copied_weights(model)
    model.unmerge_adapter()
    return [first, merged, weights, evaluated(model), gradients(model)]


@row(
    "W20.merge-and-unload",
    SECTION,
    "`merge_and_unload()`, which removes the adapter modules",
    EITHER,
    cases=_LORA,
    edits=True,
    survives=False,
)
def merge_and_unload(model: Any) -> Any:
    return evaluated(model.merge_and_unload())


@row("W20.save", SECTION, "`save_pretrained` writes the adapter only, in PEFT's format", cases=_LORA)
def save(model: Any) -> Any:
    train(model, adamw(model))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        files = sorted(path.name for path in Path(folder).iterdir())
        loaded = peft.PeftModel.from_pretrained(tiny_models.build("llama"), folder)
        return [files, evaluated(loaded), evaluated(model)]


def _with_any_version() -> Any:
    """Return a context in which transformers' own adapters are used: 5.24 asks for a version of PEFT that is not published."""
    return patch("transformers.integrations.peft.check_peft_version")


def _transformers_own() -> Any:
    model = tiny_models.build("llama")
    torch.manual_seed(1)
    with _with_any_version():
        model.add_adapter(_config())
    return model.train()


_ARGUMENTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "state_dict": lambda model: {"state_dict": {name: value * 0.5 for name, value in model.state_dict().items()}},
    "as-trainer": lambda model: {"state_dict": None, "is_main_process": True},
    "other-process": lambda model: {"is_main_process": False},
    "max_shard_size": lambda model: {"max_shard_size": "5GB", "variant": None, "push_to_hub": False},
}


@row("W20.save-arguments", SECTION,
     "`save_pretrained` of adapters, of PEFT's models and of transformers' `add_adapter`, with `state_dict`, `is_main_process`, "
     "`max_shard_size`, `variant`, `push_to_hub=False`",
     cases={f"{kind}, {each}": Case(build, arguments={"which": each})
            for each in _ARGUMENTS for kind, build in (("add_adapter", _transformers_own), ("PEFT", _adapted))},
     edits=True)  # fmt: skip
def save_arguments(model: Any, which: str) -> Any:
    train(model, adamw(model), steps=1)
    with tempfile.TemporaryDirectory() as folder, _with_any_version():
        model.save_pretrained(folder, **_ARGUMENTS[which](model))
        files = sorted(path.name for path in Path(folder).iterdir())
        return {"files": files, "tensors": [load_file(path) for path in Path(folder).glob("*.safetensors")]}


@row("W20.generate", SECTION, "`generate` with adapters", EITHER, cases=_LORA)
def generate(model: Any) -> Any:
    ids = tiny_models.batch(rows=2, padding="none")["input_ids"]
    model.eval()
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=5, do_sample=False, pad_token_id=0
    )


@row("W20.optimizer", SECTION, "Train adapters with another optimizer", cases=_LORA)
def optimizer(model: Any) -> Any:
    return train(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2))
