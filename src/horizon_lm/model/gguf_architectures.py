"""Architectures of GGUF: their names, metadata and tensor layouts, by the model type of transformers.

The same table serves for writing a file and for reading one.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from horizon_lm.model.gguf_keys import Keys
from horizon_lm.model.gguf_rotary import FACTORS, FREQUENCIES, parameters_of, scaling_metadata

NUMBERS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_hidden_layers": "block_count",
    "num_key_value_heads": "attention.head_count_kv",
    "vocab_size": "vocab_size",
}
RMS_NORM = {"rms_norm_eps": "attention.layer_norm_rms_epsilon"}
LAYER_NORM = "attention.layer_norm_epsilon"


class Layout(NamedTuple):
    """A pair of functions that convert a tensor from transformers' layout to the file's, and back."""

    write: Callable[[torch.Tensor], torch.Tensor]
    read: Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF.

    Attributes:
        name: its name in a file.
        numbers: keys of a config and their names in the metadata, beside those that all architectures have.
        absent: the numbers that a file may lack, with the values that llama.cpp assumes for them.
        assumed: function that returns the settings that no file has, with the values that llama.cpp computes with. It takes a
            config, or any object with its numbers and its ``head_dim``.
        of_tensors: settings that are true if a file has a tensor, with the tensor's name.
        layouts: function that returns the layouts of a config's tensors, by their names without that of the block, such as
            ``attn_q.weight``.
        factors: tensors of factors of rotary frequencies that llama.cpp reads.
        switches: metadata that must have this value, if it is there.
        window_pattern: of every so many layers, the last one has full attention and the others a window; None for no windows.
        window_theta: base of the rotary embeddings of layers with windows, which are not scaled; None if all layers have the same ones.
        read: function that returns settings of a file that are not single numbers of it.
        has_rotary: whether there are rotary embeddings.
        partial_rotary: whether a part of each head may be rotated.
        only_longrope: whether transformers has no other scaling of rotary embeddings for this type.
        in_transformers: whether transformers reads such files.
    """

    name: str
    numbers: Mapping[str, str] = field(default_factory=lambda: RMS_NORM)
    absent: Mapping[str, Any] = field(default_factory=dict)
    assumed: Callable[[Any], Mapping[str, Any]] = lambda config: {}
    of_tensors: Mapping[str, str] = field(default_factory=dict)
    layouts: Callable[[Any], Mapping[str, Layout]] = lambda config: {}
    factors: frozenset[str] = frozenset()
    switches: Mapping[str, Any] = field(default_factory=dict)
    window_pattern: int | None = None
    window_theta: float | None = None
    read: Callable[[Keys], Mapping[str, Any]] = lambda keys: {}
    has_rotary: bool = True
    partial_rotary: bool = False
    only_longrope: bool = False
    in_transformers: bool = True

    def metadata(self, config: Any) -> dict[str, Any]:
        """Return the metadata of a model, by names without the architecture's name before them."""
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


def in_block(name: str) -> str:
    """Return the name of a tensor of a file without that of its block: ``attn_q.weight`` of ``blk.0.attn_q.weight``."""
    return re.sub(r"^blk\.\d+\.", "", name)


def weight_and_bias(name: str, layout: Layout) -> dict[str, Layout]:
    """Return the same layout for the weight and the bias of a layer."""
    return {f"{name}.weight": layout, f"{name}.bias": layout}


def _interleaved_heads(config: Any) -> Mapping[str, Layout]:
    """Return the layouts of the projections of queries and keys, whose rows a file has in another order within each head.

    Rotary embeddings rotate pairs of elements: neighbours in llama.cpp, and element i with D / 2 + i in transformers.
    """

    def interleaved(heads: int) -> Layout:
        """Return the layout in which the two halves of each head's rows are interleaved."""

        def swapped(tensor: torch.Tensor, *shape: int) -> torch.Tensor:
            """Transpose the rows of each head, as a matrix of this shape: (2, D / 2) turns halves into neighbours, (D / 2, 2) back."""
            return tensor.view(heads, *shape, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)

        return Layout(write=lambda tensor: swapped(tensor, 2, -1), read=lambda tensor: swapped(tensor, -1, 2))

    return {
        **weight_and_bias("attn_q", interleaved(config.num_attention_heads)),
        **weight_and_bias("attn_k", interleaved(config.num_key_value_heads)),
    }


def flat_gate(config: Any) -> Mapping[str, Layout]:
    """Return the layout of the gate of shared experts, which is a vector in GGUF."""
    layout = Layout(write=lambda tensor: tensor.reshape(-1), read=lambda tensor: tensor.reshape(1, -1))
    return {"ffn_gate_inp_shexp.weight": layout}


PLUS_ONE = Layout(write=lambda tensor: tensor + 1, read=lambda tensor: tensor - 1)


def _offset_norms(config: Any) -> Mapping[str, Layout]:
    """Return the layouts of norms that scale by one plus their weight: GGUF has the sum, in float32."""
    names = ("attn", "attn_k", "attn_q", "ffn", "output", "post_attention", "post_ffw")
    return {f"{name}_norm.weight": PLUS_ONE for name in names}


def _attention_scale(config: Any, num_layers_of_27b: int) -> Mapping[str, Any]:
    """Return the number by whose square root llama.cpp divides the scores of attention: the dimension of a head.

    For Gemma's model of 27B, which llama.cpp recognizes by its number of layers, it is the hidden size divided by the number of heads,
    which differs from the dimension of a head there.
    """
    mean_head_dim = config.hidden_size // config.num_attention_heads
    is_27b = config.num_hidden_layers == num_layers_of_27b
    return {"query_pre_attn_scalar": mean_head_dim if is_27b else config.head_dim}


def _square_heads(config: Any) -> Mapping[str, Any]:
    """Return the head dimension with which all heads together are as wide as the model, which llama.cpp demands of some architectures."""
    return {"head_dim": config.hidden_size // config.num_attention_heads}


_WINDOW = {"sliding_window": "attention.sliding_window"}
_FINAL_SOFTCAP = {"final_logit_softcapping": "final_logit_softcapping"}
_SOFTCAPS = {"attn_logit_softcapping": "attn_logit_softcapping", **_FINAL_SOFTCAP}
MIXTURE = {"num_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
EXPERT_SIZE = {"moe_intermediate_size": "expert_feed_forward_length"}
SHARED_EXPERT_SIZE = {"shared_expert_intermediate_size": "expert_shared_feed_forward_length"}
QUERY_BIAS = "blk.0.attn_q.bias"
_BIASES = {"attention_bias": QUERY_BIAS, "mlp_bias": "blk.0.ffn_up.bias"}
_NO_BIASES = {"attention_bias": False, "mlp_bias": False}

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
        numbers=RMS_NORM | _WINDOW | _SOFTCAPS,
        absent={"sliding_window": 4_096, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        assumed=lambda config: {**_attention_scale(config, 46), "tie_word_embeddings": True},
        layouts=_offset_norms,
        window_pattern=2,
    ),
    "gemma3_text": Architecture(
        "gemma3",
        numbers=RMS_NORM | _WINDOW | _FINAL_SOFTCAP,
        absent={"sliding_window": 0, "final_logit_softcapping": None},
        assumed=lambda config: _attention_scale(config, 62),
        layouts=_offset_norms,
        window_pattern=6,
        window_theta=10_000.0,
    ),
    "granite": Architecture(
        "granite",
        numbers=RMS_NORM
        | {
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "logits_scaling": "logit_scale",
            "residual_multiplier": "residual_scale",
        },
        assumed=lambda config: {"hidden_act": "silu", **_NO_BIASES},
        layouts=_interleaved_heads,
        factors=FACTORS,
        switches={"rope.scaling.finetuned": True},  # without it, llama.cpp rotates nothing
        in_transformers=False,
    ),
    "llama": Architecture("llama", of_tensors=_BIASES, layouts=_interleaved_heads, factors=FACTORS),
    "mistral": Architecture(
        "llama",
        assumed=lambda config: {"model_type": "mistral", "sliding_window": None},
        layouts=_interleaved_heads,
        factors=FACTORS,
    ),
    "mixtral": Architecture(
        "llama",
        numbers=RMS_NORM | {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"},
        assumed=lambda config: {"hidden_act": "silu", "sliding_window": None},
        layouts=_interleaved_heads,
        factors=FACTORS,
        in_transformers=False,
    ),
    "olmo2": Architecture(
        "olmo2",
        assumed=lambda config: {"attention_bias": False, "hidden_act": "silu", **_square_heads(config)},
        in_transformers=False,
    ),
    "phi3": Architecture(
        "phi3",
        numbers=RMS_NORM | _WINDOW | {"original_max_position_embeddings": "rope.scaling.original_context_length"},
        absent={"sliding_window": 0, "original_max_position_embeddings": 4_096},
        assumed=lambda config: {"sliding_window": None, **_square_heads(config)},
        factors=FACTORS - {FREQUENCIES},
        partial_rotary=True,
        only_longrope=True,
    ),
    "qwen2": Architecture("qwen2", assumed=_square_heads),
    "qwen2_moe": Architecture(
        "qwen2moe",
        numbers=RMS_NORM | MIXTURE | EXPERT_SIZE | SHARED_EXPERT_SIZE,
        assumed=lambda config: {"tie_word_embeddings": False, **_square_heads(config)},  # llama.cpp wants a head
        layouts=flat_gate,
    ),
    "qwen3": Architecture("qwen3"),
    "qwen3_moe": Architecture(
        "qwen3moe",
        numbers=RMS_NORM | MIXTURE | EXPERT_SIZE,
        assumed=lambda config: {"norm_topk_prob": True},
    ),
    "smollm3": Architecture(
        "smollm3",
        assumed=lambda config: {
            **_NO_BIASES,
            "hidden_act": "silu",
            "layer_types": ["full_attention"] * config.num_hidden_layers,
            "no_rope_layer_interval": 4,
            "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(config.num_hidden_layers)],
            "use_sliding_window": False,
        },
        layouts=_interleaved_heads,
        in_transformers=False,
    ),
}
