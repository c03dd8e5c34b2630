"""Configs of PEFT's methods and initialisations."""

from collections.abc import Callable
from typing import Any

import peft
from peft import LoraConfig

MODULES = ["q_proj", "v_proj", "down_proj"]
SQUARE = ["q_proj", "o_proj"]
CAUSAL = {"task_type": "CAUSAL_LM"}


def lora(**settings: Any) -> Callable[[], Any]:
    return lambda: LoraConfig(**({"r": 4, "lora_alpha": 8, "target_modules": MODULES} | settings))


def method(name: str, **settings: Any) -> Callable[[], Any]:
    return lambda: getattr(peft, f"{name}Config")(**({"target_modules": MODULES} | settings))


TOKENS = [40, 1, 7, 22, 5, 63, 13, 2, 3]
EMBEDDING: dict[str, Callable[[], Any]] = {
    "modules_to_save=embed_tokens": lora(modules_to_save=["embed_tokens"]),
    "modules_to_save=both": lora(modules_to_save=["lm_head", "embed_tokens"]),
    "target_modules=embed_tokens": lora(target_modules=[*MODULES, "embed_tokens"]),
    "trainable_token_indices": lora(trainable_token_indices=TOKENS),
    "TrainableTokens": lambda: peft.TrainableTokensConfig(token_indices=TOKENS, **CAUSAL),
}
# Work, whether they are added before or after.
WORK: dict[str, Callable[[], Any]] = {
    "gaussian": lora(init_lora_weights="gaussian"),
    "olora": lora(init_lora_weights="olora"),
    "pissa": lora(init_lora_weights="pissa"),
    "pissa_niter": lora(init_lora_weights="pissa_niter_4"),
    "mica": lora(init_lora_weights="mica"),
    "orthogonal": lora(init_lora_weights="orthogonal"),
    "eva": lora(init_lora_weights="eva", eva_config=peft.EvaConfig()),
    "modules_to_save=lm_head": lora(modules_to_save=["lm_head"]),
    "modules_to_save=norm": lora(modules_to_save=["norm"]),
    "target_modules=lm_head": lora(target_modules=[*MODULES, "lm_head"]),
    "lora_bias": lora(lora_bias=True),
    "alora": lora(alora_invocation_tokens=[31], **CAUSAL),  # by hooks that are gone in the backward pass
    "bias=all": lora(bias="all"),
    "layers_to_transform": lora(layers_to_transform=[1]),
    "AdaLora": method("AdaLora", init_r=4, target_r=2, total_step=10),
    "Adamss": method("Adamss"),
    "BOFT": method("BOFT", target_modules=SQUARE, boft_block_size=4),
    "Beft": method("Beft"),
    "C3A": method("C3A", target_modules=SQUARE, block_size=8),
    "Deft": method("Deft"),
    "Delora": method("Delora", r=4),
    "FourierFT": method("FourierFT", n_frequency=20, **CAUSAL),
    "Frod": method("Frod"),
    "Glora": method("Glora"),
    "Gralora": method("Gralora", r=4, gralora_k=2),
    "HRA": method("HRA", r=4),
    "Hira": method("Hira"),
    "IA3": method("IA3", target_modules=["k_proj", "v_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "LNTuning": method("LNTuning", target_modules=["input_layernorm"], **CAUSAL),
    "LoHa": method("LoHa", r=4, alpha=8),
    "LoKr": method("LoKr", r=4, alpha=8),
    "Miss": method("Miss", r=4),
    "OFT": method("OFT", oft_block_size=8, r=0),
    "Peanut": method("Peanut"),
    "Psoft": method("Psoft", r=4),
    "Pvera": method("Pvera"),
    "RandLora": method("RandLora", target_modules=SQUARE, r=4),
    "Road": method("Road", group_size=8),
    "Shira": method("Shira", r=2),
    "Vera": method("Vera", target_modules=SQUARE, r=8),
    "WaveFT": method("WaveFT", n_frequency=20),
    **EMBEDDING,
    "PromptTuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, **CAUSAL),
    "PromptEncoder": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, encoder_hidden_size=8, **CAUSAL),
}
