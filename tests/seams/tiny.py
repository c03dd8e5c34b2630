"""Tiny models of types that are missing from tests/support/tiny_models.py."""

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support import tiny_models

_BART: dict[str, Any] = {
    "d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 48,
    "encoder_layers": 2, "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "max_position_embeddings": 64,
    "dropout": 0.0, "decoder_start_token_id": 2,
}  # fmt: skip
_BERT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "is_decoder": True}

_VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "pos_emb_height": 4,
    "pos_emb_width": 4, "max_position_embeddings": 16,
}  # fmt: skip

_PROJECTOR = {"out_hidden_size": 32, "projector_hidden_size": 32}

_TYPES: dict[str, dict[str, Any]] = {
    # decoders of encoder-decoder models, whose loss is not shifted
    **dict.fromkeys(("bart", "blenderbot", "blenderbot-small", "mbart", "mvp", "pegasus", "plbart", "trocr"), _BART),
    "marian": _BART | {"decoder_vocab_size": tiny_models.VOCABULARY},
    "bigbird_pegasus": _BART | {"attention_type": "original_full"},
    "whisper": _BART | {"max_target_positions": 64, "max_source_positions": 32, "num_mel_bins": 8},
    # types with layers between blocks and head
    "rembert": _BERT | {"input_embedding_size": 16, "output_embedding_size": 24},
    # types whose embeddings are normalised after the lookup
    "muse_glimmer": {**_PROJECTOR, "text_config": {"head_dim": 8, "sliding_window": 6}},
    "muse_spark": {
        **_PROJECTOR,
        "text_config": {
            "head_dim": 8, "sliding_window": 6, "num_local_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "moe_hidden_size": 24,
        },
        "audio_config": {"hidden_sizes": (8, 8), "patch_sizes": (2, 2), "depths": (1, 1), "num_hidden_layers": 2, "out_hidden_size": 32},
    },
    # types that make their own masks
    "doge": {"keep_window_size": 4},
    # types whose positions are counted from the mask
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "num_heads": 4, "window_size": 6},
    "gpt_bigcode": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 48},
    "xglm": {
        "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48, "dropout": 0.0, "attention_dropout": 0.0,
    },
    "hunyuan_v1_dense": {"head_dim": 8},
}  # fmt: skip
UNSHIFTED = (
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus", "plbart",
    "trocr", "whisper",
)  # fmt: skip


def tiny(model_type: str, seed: int = 0, **overrides: Any) -> Any:
    """Return a small causal language model of a type, with weights large enough for visible gradients everywhere."""
    if model_type in tiny_models.FAMILIES:
        return tiny_models.build(model_type, seed, **overrides)
    settings = tiny_models._COMMON | {"num_hidden_layers": 2} | _TYPES[model_type] | overrides
    auto_class = AutoModelForCausalLM
    if "text_config" in settings:
        text = tiny_models._COMMON | {"num_hidden_layers": 2} | settings["text_config"]
        settings = _TYPES[model_type] | overrides | {"text_config": text, "vision_config": _VISION}
        auto_class = AutoModelForImageTextToText
    attention = settings.pop("attn_implementation", None)
    if "d_model" in settings:
        for name in ("num_hidden_layers", "num_attention_heads", "hidden_size"):
            settings.pop(name, None)
    config = AutoConfig.for_model(model_type, **settings)
    torch.manual_seed(seed)
    model = auto_class.from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    return model.train()
