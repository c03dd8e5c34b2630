"""Tiny models with adapters of many kinds."""

import gc
from functools import partial
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

import horizon_lm
from tests.support import tiny_models

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "mixed": {"rank_pattern": {r"layers\.0\..*": 2, r"h\.0\..*": 2}, "alpha_pattern": {r"layers\.1\..*": 3, r"h\.1\..*": 3}},
    "upper": {},  # adapters of the first block are frozen
    "dropout": {"lora_dropout": 0.1},
    "experts": {"target_modules": ["q_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
}  # fmt: skip
MIXTURES = ("mixtral", "qwen3_moe")


def adapted(family: str, kind: str = "lora", **config: Any) -> Any:
    """Return a model with adapters that are not zero, the same each time."""
    no_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0) if family == "gpt2" else {}
    model = tiny_models.build(family, **no_dropout, **config)
    targets: Any = ["q_proj", "v_proj", "o_proj"] if family in MIXTURES else "all-linear"
    settings: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": targets} | KINDS[kind]
    torch.manual_seed(1)
    model = get_peft_model(model, LoraConfig(**settings))
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "lora_B" in name:
                param.normal_(std=0.02)
            if kind == "upper" and (".layers.0." in name or ".h.0." in name):
                param.requires_grad_(False)
    return model


def train_a_step(model: Any) -> None:
    """Train a model for one step, with an optimizer that is dropped afterwards."""
    optimizer = horizon_lm.AdamW(model, lr=1e-2)
    model(**tiny_models.batch(padding="none")).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    horizon_lm.synchronize(model)


def trained_with_adapters(late: bool, **settings: Any) -> Any:
    """Return a streamed model after a step with adapters, which it had from the beginning or got after another step."""
    model = tiny_models.build("llama")
    add = partial(get_peft_model, peft_config=LoraConfig(r=4, target_modules="all-linear"))
    stream = partial(horizon_lm.stream, precision="float32", activation_checkpoints="host", compile=False, **settings)
    if late:
        model = stream(model)
        train_a_step(model)
        gc.collect()  # the optimizer, whose parameters the adapters would freeze
        model = add(model)
    else:
        model = stream(add(model))
    train_a_step(model)
    return model
