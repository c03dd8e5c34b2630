"""Tiny models of every family that must be streamed exactly."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_lm.model import attention

attention.register()

VOCABULARY = 97

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "output_router_logits": True}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"max_window_layers": 2},
    "qwen3": {"head_dim": 8},
    "mistral": {"sliding_window": 6},
    "gemma2": {"head_dim": 8, "sliding_window": 6, "attn_implementation": "eager"},
    "gemma3_text": {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "phi3": {},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64, "n_inner": 48},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True},
    "qwen3_moe": {"head_dim": 8, **_MOE},
    "qwen3_next": {
        "head_dim": 8, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "shared_expert_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention"] * 2, **_MOE,
    },
    "gpt_oss": {
        "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6,
        "output_router_logits": True, "attn_implementation": "sinks",  # plain models compute as streamed ones do
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "granite": {"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.5},
    "cohere2": {"sliding_window": 6, "logit_scale": 0.5, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "olmo2": {},
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True, "ffn_hidden_size": 48},
    "deepseek_v3": {
        "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8,
        "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "moe_intermediate_size": 24, "n_shared_experts": 1,
    },
}  # fmt: skip
MOE_WITH_AUXILIARY_LOSS = ("mixtral", "qwen3_moe", "qwen3_next", "gpt_oss")


def build(family: str, seed: int = 0, model_class: Any = AutoModelForCausalLM, **overrides: Any) -> Any:
    """Build a Hugging Face model with random weights, large enough for visible gradients everywhere."""
    settings = _COMMON | FAMILIES[family] | overrides
    implementation = settings.pop("attn_implementation", "sdpa")
    if "layer_types" in settings:
        settings["num_hidden_layers"] = overrides.get("num_hidden_layers", len(settings["layer_types"]))
    config = AutoConfig.for_model(family, **settings)
    torch.manual_seed(seed)
    model = model_class.from_config(config, attn_implementation=implementation, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    return model.train()


def attending_as_streamed(model: Any) -> Any:
    """Return a plain model whose attention is computed as in a streamed one, by the same kernels if it has sinks."""
    attention.choose(model, None, prefers_varlen=False)
    return model


def batch(rows: int = 3, length: int = 11, padding: str = "right", seed: int = 1) -> dict[str, torch.Tensor]:
    """Return random tokens with one padded row; padded positions have no label."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[0, :4] = 0
    elif padding == "right":
        mask[0, -4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
