"""Architectures of GGUF: their names, metadata and tensor layouts, by the model type of transformers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from horizon_lm.checkpoints.gguf_rotary import parameters_of, scaling_metadata

Layout = Callable[[torch.Tensor], torch.Tensor]

NUMBERS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_hidden_layers": "block_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
}


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF.

    Attributes:
        name: its name in a file.
        numbers: keys of a config and their names in the metadata, beside those that all architectures have.
        unread: keys that llama.cpp reads from a file, if they have an effect, and transformers' reader does not.
        assumed: function that returns settings that are not in a file, with the values with which llama.cpp computes.
        layouts: function that returns the layouts of a config's tensors, by their name in a block, such as ``attn_q``.
        scalings: types of scaled rotary embeddings that llama.cpp computes from what the file has.
        partial_rotary: whether a part of each head may be rotated.
        in_transformers: whether transformers reads such files.
    """

    name: str
    numbers: Mapping[str, str] = field(default_factory=dict)
    unread: frozenset[str] = frozenset()
    assumed: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    layouts: Callable[[Any], Mapping[str, Layout]] = lambda config: {}
    scalings: frozenset[str] = frozenset({"linear", "yarn"})
    partial_rotary: bool = False
    in_transformers: bool = True

    def metadata(self, config: Any) -> dict[str, Any]:
        """Return the metadata of a model, by names without that of the architecture."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        numbers = {name: getattr(config, key) for key, name in {**NUMBERS, **self.numbers}.items()}
        rotated = parameters_of(config).get("partial_rotary_factor", 1.0) if self.partial_rotary else 1.0
        return {
            **{name: value for name, value in numbers.items() if value is not None},
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.dimension_count": int(head_dim * rotated),
            "rope.freq_base": float(parameters_of(config)["rope_theta"]),
            **scaling_metadata(config),
        }


def _neighbours(config: Any) -> Mapping[str, Layout]:
    """Return the layouts of queries and keys: llama.cpp rotates pairs of neighbours, and transformers element i with D / 2 + i."""

    def interleaved(heads: int) -> Layout:
        """Return a function that interleaves the two halves of each head's rows."""

        def layout(tensor: torch.Tensor) -> torch.Tensor:
            halves = tensor.view(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:])
            return halves.swapaxes(1, 2).reshape(tensor.shape)

        return layout

    return {"attn_q": interleaved(config.num_attention_heads), "attn_k": interleaved(config.num_key_value_heads)}


def _flat_gate(config: Any) -> Mapping[str, Layout]:
    """Return the layout of the gate of shared experts, which is a vector in GGUF."""
    return {"ffn_gate_inp_shexp": lambda tensor: tensor.reshape(-1)}


def _offset_norms(config: Any) -> Mapping[str, Layout]:
    """Return the layouts of norms that scale by one plus their weight: GGUF has the sum, in float32."""
    names = ("attn", "attn_k", "attn_q", "ffn", "output", "post_attention", "post_ffw")
    return {f"{name}_norm": lambda tensor: tensor + 1 for name in names}


def _attention_scale(config: Any, num_layers_of_27b: int) -> Mapping[str, Any]:
    """Return the number by whose square root llama.cpp divides the scores of attention.

    It is the size of a head, but the mean size in the model of 27B, which llama.cpp recognizes by its number of layers.
    """
    mean_head_dim = config.hidden_size // config.num_attention_heads
    is_27b = config.num_hidden_layers == num_layers_of_27b
    return {"query_pre_attn_scalar": mean_head_dim if is_27b else config.head_dim}


_LLAMA_SCALINGS = frozenset({"linear", "llama3", "yarn"})
_WINDOW = {"sliding_window": "attention.sliding_window"}
_SOFTCAPS = {"attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping"}
_MIXTURE = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
_EXPERT_SIZE = {"moe_intermediate_size": "expert_feed_forward_length"}
_SHARED_EXPERT_SIZE = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}

ARCHITECTURES = {
    "gemma": Architecture(
        "gemma",
        assumed=lambda config: {
            "attention_bias": False,
            "hidden_act": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        layouts=_offset_norms,
        in_transformers=False,
    ),
    "gemma2": Architecture(
        "gemma2",
        numbers=_WINDOW | _SOFTCAPS,
        assumed=lambda config: {**_attention_scale(config, 46), "tie_word_embeddings": True},
        layouts=_offset_norms,
    ),
    "gemma3_text": Architecture(
        "gemma3", numbers=_WINDOW, assumed=lambda config: _attention_scale(config, 62), layouts=_offset_norms
    ),
    "granite": Architecture(
        "granite",
        numbers={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "logits_scaling": "logit_scale",
            "residual_multiplier": "residual_scale",
        },
        assumed=lambda config: {"attention_bias": False, "hidden_act": "silu", "mlp_bias": False},
        layouts=_neighbours,
        in_transformers=False,
    ),
    "llama": Architecture("llama", layouts=_neighbours, scalings=_LLAMA_SCALINGS),
    "mistral": Architecture(
        "llama",
        assumed=lambda config: {"model_type": "mistral", "sliding_window": None},
        layouts=_neighbours,
        scalings=_LLAMA_SCALINGS,
    ),
    "mixtral": Architecture(
        "llama",
        numbers={"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        assumed=lambda config: {"hidden_act": "silu", "sliding_window": None},
        layouts=_neighbours,
        scalings=_LLAMA_SCALINGS,
        in_transformers=False,
    ),
    "olmo2": Architecture(
        "olmo2", assumed=lambda config: {"attention_bias": False, "hidden_act": "silu"}, in_transformers=False
    ),
    "phi3": Architecture(
        "phi3",
        unread=frozenset({"original_max_position_embeddings"}),
        assumed=lambda config: {"sliding_window": None},
        scalings=frozenset({"longrope"}),  # transformers has no other for this type
        partial_rotary=True,
    ),
    "qwen2": Architecture("qwen2"),
    "qwen2_moe": Architecture(
        "qwen2moe",
        numbers=_MIXTURE | _EXPERT_SIZE | _SHARED_EXPERT_SIZE,
        unread=frozenset(_EXPERT_SIZE | _SHARED_EXPERT_SIZE),
        assumed=lambda config: {"tie_word_embeddings": False},  # llama.cpp wants a head
        layouts=_flat_gate,
    ),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture("qwen3moe", numbers=_MIXTURE | _EXPERT_SIZE, unread=frozenset(_EXPERT_SIZE)),
    "smollm3": Architecture(
        "smollm3",
        assumed=lambda config: {
            "attention_bias": False,
            "hidden_act": "silu",
            "layer_types": ["full_attention"] * config.num_hidden_layers,
            "mlp_bias": False,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)],
            "use_sliding_window": False,
        },
        layouts=_neighbours,
        in_transformers=False,
    ),
}
