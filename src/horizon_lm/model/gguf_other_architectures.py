"""Architectures of GGUF that are read, and not written."""

from collections.abc import Mapping
from typing import Any

import torch

from horizon_lm.model.gguf_architectures import (
    EXPERT_SIZE,
    LAYER_NORM,
    MIXTURE,
    PLUS_ONE,
    QUERY_BIAS,
    RMS_NORM,
    SHARED_EXPERT_SIZE,
    Architecture,
    Layout,
    flat_gate,
    weight_and_bias,
)  # fmt: skip
from horizon_lm.model.gguf_keys import Keys

_NO_FULL_WIDTH = {"intermediate_size": None}  # of mixtures that have no other feed-forward layers
_SQUEEZED = Layout(write=lambda tensor: tensor.squeeze(1), read=lambda tensor: tensor.unsqueeze(1))
_NEGATIVE_EXP = Layout(write=lambda tensor: -tensor.exp(), read=lambda tensor: (-tensor).log())
_TRANSPOSED = Layout(write=torch.t, read=torch.t)


def _chain(first: Layout, second: Layout) -> Layout:
    """Return the layout that writes a tensor by a first layout, and the result by a second; reading goes the other way round."""
    return Layout(
        write=lambda tensor: second.write(first.write(tensor)), read=lambda tensor: first.read(second.read(tensor))
    )  # fmt: skip


def _swapped(outer: int, inner: int, start: int = 0, axis: int = 0) -> Layout:
    """Return a layout in which the parts of an axis have another order.

    From element ``start`` on, transformers has ``outer`` groups of ``inner`` parts each; a file has ``inner`` groups of ``outer`` parts.
    """

    def swapped(tensor: torch.Tensor, groups: int, parts: int) -> torch.Tensor:
        moved = tensor.movedim(axis, 0)
        rest = moved[start:]
        rest = rest.reshape(groups, parts, -1, *rest.shape[1:]).swapaxes(0, 1).reshape(rest.shape)
        return torch.cat([moved[:start], rest]).movedim(0, axis)

    return Layout(write=lambda tensor: swapped(tensor, outer, inner), read=lambda tensor: swapped(tensor, inner, outer))


def _bloom_layouts(config: Any) -> Mapping[str, Layout]:
    """Return the layouts of queries, keys and values, which transformers has grouped by their heads."""
    return weight_and_bias("attn_qkv", _swapped(config.num_attention_heads, 3))


def _gpt2_layouts(config: Any) -> Mapping[str, Layout]:
    """Return the layouts of matrices, which transformers has transposed."""
    return {f"{name}.weight": _TRANSPOSED for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")}


def _nemotron_layouts(config: Any) -> Mapping[str, Layout]:
    """Return the layouts of norms that scale by one plus their weight."""
    return {f"{name}_norm.weight": PLUS_ONE for name in ("attn", "ffn", "output")}


def _mamba_settings(keys: Keys) -> Mapping[str, Any]:
    """Return the width of a Mamba as a multiple of its hidden size."""
    return {"expand": keys.require("ssm.inner_size") // keys.require("embedding_length")}


def _lfm2_settings(keys: Keys) -> Mapping[str, Any]:
    """Return the types of the layers of an LFM2, and its heads of keys: a layer without such heads is a convolution."""
    heads = keys.take("attention.head_count_kv")  # of each layer: 0, or the same number
    if not isinstance(heads, list) or len(heads) != keys.require("block_count") or len({0, *heads}) != 2:
        raise keys.rejected("attention.head_count_kv")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if number else "conv" for number in heads],
    }


def _qwen35_settings(keys: Keys) -> Mapping[str, Any]:
    """Return the settings of the linear attention of a Qwen3.5, and of its rotary embeddings in several dimensions."""
    num_layers = keys.require("block_count") - keys.take("nextn_predict_layers", 0)
    value_heads, key_heads = keys.require("ssm.time_step_rank"), keys.require("ssm.group_count")
    if not isinstance(key_heads, int) or key_heads < 1 or value_heads % key_heads:
        raise keys.rejected("ssm.group_count")
    interval, is_linear = keys.take("full_attention_interval", 4), keys.take("attention.recurrent_layers")
    if is_linear is None:
        if not isinstance(interval, int) or interval < 1:
            raise keys.rejected("full_attention_interval")
        is_linear = [(layer + 1) % interval != 0 for layer in range(num_layers)]
    if not isinstance(is_linear, list) or len(is_linear) < num_layers:
        raise keys.rejected("attention.recurrent_layers")
    sections = keys.take("rope.dimension_sections")
    if not isinstance(sections, list) or len(sections) < 3 or any(sections[3:]):  # at position 0 in llama.cpp
        raise keys.rejected("rope.dimension_sections")
    return {
        "num_hidden_layers": num_layers,
        "layer_types": ["linear_attention" if linear else "full_attention" for linear in is_linear[:num_layers]],
        "linear_conv_kernel_dim": keys.require("ssm.conv_kernel"),
        "linear_key_head_dim": keys.require("ssm.state_size"),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": keys.require("ssm.inner_size") // value_heads,
        "rope_parameters": {
            "mrope_section": sections[:3],  # of time, height and width
            "mrope_interleaved": True,
        },
    }


def _qwen35_layouts(config: Any) -> Mapping[str, Layout]:
    """Return the layouts of a Qwen3.5: norms with an offset, and value heads, which transformers alone groups by their key heads."""
    groups = config.linear_num_key_heads, config.linear_num_value_heads // config.linear_num_key_heads
    of_values = _swapped(*groups)
    # For tensors that have the queries and keys before the values.
    of_last_values = _swapped(*groups, start=2 * config.linear_num_key_heads * config.linear_key_head_dim)
    names = ("attn", "attn_k", "attn_q", "output", "post_attention")
    return {
        **flat_gate(config),
        **{f"{name}_norm.weight": PLUS_ONE for name in names},
        "attn_gate.weight": of_values,
        "attn_qkv.weight": of_last_values,
        "ssm_a": _chain(_NEGATIVE_EXP, of_values),
        "ssm_alpha.weight": of_values,
        "ssm_beta.weight": of_values,
        "ssm_conv1d.weight": _chain(_SQUEEZED, of_last_values),
        "ssm_dt.bias": of_values,
        "ssm_out.weight": _swapped(*groups, axis=1),
    }


# llama.cpp uses the epsilon of all norms for the norms of queries and keys in linear attention, too; transformers always has 1e-6 there.
_QWEN35_NORMS = {"attention.layer_norm_rms_epsilon": 1e-6}

OTHER_ARCHITECTURES = {
    "bloom": Architecture(
        "bloom", numbers={"layer_norm_epsilon": LAYER_NORM}, layouts=_bloom_layouts, has_rotary=False
    ),
    "falcon": Architecture(
        "falcon",
        numbers={
            "ffn_hidden_size": "feed_forward_length",
            "layer_norm_epsilon": LAYER_NORM,
            "num_kv_heads": "attention.head_count_kv",
        },
        switches={
            "attention.head_count_kv": 1,
            "tensor_data_layout": "jploski",
        },  # as in Falcon 7B; others have other layouts
    ),
    "gpt2": Architecture(
        "gpt2",
        numbers={"layer_norm_epsilon": LAYER_NORM, "n_inner": "feed_forward_length"},
        layouts=_gpt2_layouts,
        has_rotary=False,
    ),
    "lfm2": Architecture(
        "lfm2",
        numbers={"conv_L_cache": "shortconv.l_cache", "norm_eps": "attention.layer_norm_rms_epsilon"},
        assumed=lambda config: {"block_auto_adjust_ff_dim": False},
        of_tensors={"conv_bias": "blk.0.shortconv.in_proj.bias"},
        layouts=lambda config: {"shortconv.conv.weight": _SQUEEZED},
        read=_lfm2_settings,
    ),
    "mamba": Architecture(
        "mamba",
        numbers={
            "conv_kernel": "ssm.conv_kernel",
            "intermediate_size": "ssm.inner_size",
            "layer_norm_epsilon": "attention.layer_norm_rms_epsilon",
            "state_size": "ssm.state_size",
            "time_step_rank": "ssm.time_step_rank",
        },
        layouts=lambda config: {"ssm_a": _NEGATIVE_EXP, "ssm_conv1d.weight": _SQUEEZED},
        read=_mamba_settings,
        has_rotary=False,
    ),
    "nemotron": Architecture(
        "nemotron",
        numbers={"norm_eps": LAYER_NORM},
        of_tensors={"attention_bias": QUERY_BIAS, "mlp_bias": "blk.0.ffn_up.bias"},
        layouts=_nemotron_layouts,
        partial_rotary=True,
    ),
    "qwen3_5_moe_text": Architecture(
        "qwen35moe",
        numbers=RMS_NORM | MIXTURE | EXPERT_SIZE | SHARED_EXPERT_SIZE,
        absent=_NO_FULL_WIDTH,
        layouts=_qwen35_layouts,
        switches=_QWEN35_NORMS,
        read=_qwen35_settings,
        partial_rotary=True,
    ),
    "qwen3_5_text": Architecture(
        "qwen35", layouts=_qwen35_layouts, switches=_QWEN35_NORMS, read=_qwen35_settings, partial_rotary=True
    ),
    "stablelm": Architecture(
        "stablelm",
        numbers={"layer_norm_eps": LAYER_NORM, "use_parallel_residual": "use_parallel_residual"},
        absent={"use_parallel_residual": False},
        of_tensors={"use_qkv_bias": QUERY_BIAS},
        partial_rotary=True,
    ),
    "starcoder2": Architecture("starcoder2", numbers={"norm_epsilon": LAYER_NORM}, of_tensors={"use_bias": QUERY_BIAS}),
}
