"""Model shapes of the accelerator benchmarks, and the arithmetic of their steps."""

from typing import Any

import torch
from torch import nn

from horizon_lm.model.skeletons import build_skeleton

_QWEN25: dict[str, Any] = {"model_type": "qwen2", "vocab_size": 151_936, "tie_word_embeddings": True}
_QWEN25_1_5B = _QWEN25 | {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2,
}  # fmt: skip

# Shapes from the config.json of these models; weights are random.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _QWEN25 | {
        "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
        "num_key_value_heads": 2,
    },
    "qwen2.5-1.5b": _QWEN25_1_5B,
    "qwen2.5-3b": _QWEN25 | {
        "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 2,
    },
    "qwen2.5-7b": _QWEN25 | {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False,
    },
    "qwen2.5-14b": _QWEN25 | {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 152_064, "tie_word_embeddings": False,
    },
    "llama-3.1-8b": {
        "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128_256, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    },
    # Eight of the 48 blocks of Qwen3-30B-A3B.
    "qwen3-30b-a3b, 8 blocks": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "vocab_size": 151_936, "tie_word_embeddings": False,
    },
}  # fmt: skip

_TOY = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 199, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
}  # fmt: skip


def wider(times: int, num_layers: int) -> dict[str, Any]:
    """Return the 1.5B model with a multiple of its width and another depth."""
    scaled = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    return _QWEN25_1_5B | {name: times * _QWEN25_1_5B[name] for name in scaled} | {"num_hidden_layers": num_layers}


def toy(settings: dict[str, Any]) -> dict[str, Any]:
    """Return a model of the same family that is small enough for a CPU. Deeper models stay deeper."""
    layers = max(2, settings["num_hidden_layers"] // 16)
    return settings | {k: v for k, v in _TOY.items() if k in settings} | {"num_hidden_layers": layers}


def make_config(settings: dict[str, Any], length: int) -> Any:
    """Return the transformers config for rows of this length."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**settings, max_position_embeddings=length)


def count_parameters(config: Any) -> tuple[int, int]:
    """Return the number of all parameters, and of those active per token: no embedding lookup, only a token's experts."""
    model = build_skeleton(config)
    table = model.get_input_embeddings().weight
    active = 0.0
    for name, param in model.named_parameters():
        if param is table and not config.tie_word_embeddings:
            continue
        share = config.num_experts_per_tok / config.num_experts if ".experts." in name else 1.0
        active += share * param.numel()
    return sum(p.numel() for p in model.parameters()), round(active)


def model_flops(config: Any, tokens: int, length: int) -> float:
    """Return the operations of a training step without recomputation.

    6·N·T with N active parameters per token, and causal attention: 6·L·T·length·heads·head_dim, which is half of all scores
    and weighted values, forward and twice that backward.
    """
    _, active = count_parameters(config)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = config.num_hidden_layers * length * config.num_attention_heads * head_dim
    return 6.0 * tokens * (active + attention)


def random_model(config: Any, dtype: torch.dtype, device: torch.device, home: torch.device) -> nn.Module:
    """Return the plain Hugging Face model, with weights drawn on ``device`` module by module and stored on ``home``."""
    model = build_skeleton(config)
    kept: dict[int, nn.Parameter] = {}
    for module in model.modules():
        own = {name: param for name, param in module._parameters.items() if param is not None}
        if not own:
            continue
        for name, param in own.items():
            module._parameters[name] = nn.Parameter(torch.zeros(param.shape, dtype=dtype, device=device))
        model._init_weights(module)
        for name, param in own.items():
            if id(param) not in kept:
                kept[id(param)] = nn.Parameter(module._parameters[name].detach().to(home))
            module._parameters[name] = kept[id(param)]
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    return model.train()
