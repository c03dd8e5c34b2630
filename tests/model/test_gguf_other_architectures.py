"""Files of architectures that are read alone are opened as the models that llama.cpp's converter writes them from."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from horizon_lm.errors import ConfigError
from horizon_lm.model.gguf_weights import load_gguf
from tests.support.gguf_files import MIXTURE, change

gguf = pytest.importorskip("gguf")

SIZES = {
    "vocab_size": 90, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None,
}  # fmt: skip
IDS = torch.arange(40).view(2, 20)
SHARED = {
    "context_length": 64, "embedding_length": 32, "block_count": 4, "feed_forward_length": 48, "attention.head_count": 4,
    "vocab_size": 90,
}  # fmt: skip
EPS, RMS_EPS = {"attention.layer_norm_epsilon": 1e-3}, {"attention.layer_norm_rms_epsilon": 1e-3}
TWO = {"attention.head_count_kv": 2}
HALF = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
LINEAR_ATTENTION = {
    "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 6, "linear_value_head_dim": 5,
    "rms_norm_eps": 1e-6, "rope_parameters": HALF | {"mrope_section": [1, 1, 0], "mrope_interleaved": True},
}  # fmt: skip
LINEAR_KEYS = TWO | {
    "attention.layer_norm_rms_epsilon": 1e-6, "attention.key_length": 8, "rope.dimension_count": 4, "rope.dimension_sections": [1, 1, 0, 0], "rope.freq_base": 1e4,
    "ssm.conv_kernel": 4, "ssm.state_size": 6, "ssm.group_count": 2, "ssm.time_step_rank": 4, "ssm.inner_size": 20,
    "full_attention_interval": 4,
}  # fmt: skip
Tensor = torch.Tensor
Change = Callable[[Tensor], Tensor]


def plus_one(tensor: Tensor) -> Tensor:
    return tensor + 1


def by_kind(tensor: Tensor) -> Tensor:
    """Return queries, keys and values of all heads, of those of each head."""
    heads = tensor.view(4, 3, 8, *tensor.shape[1:])
    return torch.cat([heads[:, kind].reshape(32, *tensor.shape[1:]) for kind in range(3)])


def tiled(tensor: Tensor) -> Tensor:
    """Return value heads of alternating key heads, of those of one key head after those of the other."""
    return torch.cat([tensor.chunk(4)[head] for head in (0, 2, 1, 3)])


def tiled_values(tensor: Tensor) -> Tensor:
    return torch.cat([tensor[:24], tiled(tensor[24:])])


NORMS = {f"{name}_norm.weight": plus_one for name in ("attn", "attn_k", "attn_q", "ffn", "output", "post_attention")}
LINEAR_CHANGES: Mapping[str, Change] = NORMS | {
    "attn_gate.weight": tiled, "attn_qkv.weight": tiled_values, "ssm_a": lambda tensor: tiled(-tensor.exp()),
    "ssm_alpha.weight": tiled, "ssm_beta.weight": tiled, "ssm_dt.bias": tiled,
    "ssm_conv1d.weight": lambda tensor: tiled_values(tensor).squeeze(1), "ssm_out.weight": lambda tensor: tiled(tensor.T).T,
    "ffn_gate_inp_shexp.weight": torch.flatten,
}  # fmt: skip
MAMBA = {
    "expand": 2,
    "intermediate_size": 64,
    "state_size": 8,
    "time_step_rank": 3,
    "conv_kernel": 3,
    "layer_norm_epsilon": 1e-3,
}
MAMBA_KEYS = RMS_EPS | {
    "attention.head_count": 0, "feed_forward_length": 0, "ssm.conv_kernel": 3, "ssm.inner_size": 64, "ssm.state_size": 8,
    "ssm.time_step_rank": 3,
}  # fmt: skip
MIXTURE_KEYS = {
    "expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 24, "expert_shared_feed_forward_length": 40,
}  # fmt: skip

# Settings of a model, the metadata of its file, and what llama.cpp's converter does to tensors.
CASES: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], Mapping[str, Change]]] = {
    "bloom": ("bloom", "bloom", {"n_head": 4, "n_layer": 4, "layer_norm_epsilon": 1e-3}, EPS | {"feed_forward_length": 128}, {
        "attn_qkv.weight": by_kind, "attn_qkv.bias": by_kind,
    }),
    "falcon": ("falcon", "falcon", {"ffn_hidden_size": 48, "layer_norm_epsilon": 1e-3}, EPS | {
        "attention.head_count_kv": 1, "tensor_data_layout": "jploski",
    }, {}),
    "gpt2": ("gpt2", "gpt2", {"n_inner": 48, "layer_norm_epsilon": 1e-3}, EPS, {
        f"{name}.weight": torch.t for name in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
    }),
    "lfm2": ("lfm2", "lfm2", {
        "layer_types": ["conv", "full_attention", "conv", "conv"], "block_auto_adjust_ff_dim": False, "norm_eps": 1e-3,
    }, RMS_EPS | {"attention.head_count_kv": [0, 2, 0, 0], "shortconv.l_cache": 3, "rope.freq_base": 1e6}, {
        "shortconv.conv.weight": lambda tensor: tensor.squeeze(1),
    }),
    "mamba": ("mamba", "mamba", MAMBA, MAMBA_KEYS, {
        "ssm_a": lambda tensor: -tensor.exp(), "ssm_conv1d.weight": lambda tensor: tensor.squeeze(1),
    }),
    "nemotron": ("nemotron", "nemotron", {"norm_eps": 1e-3, "rope_parameters": HALF}, EPS | TWO | {"rope.dimension_count": 4}, {
        name: change for name, change in NORMS.items() if name.startswith(("attn_norm", "ffn_norm", "output_norm"))
    }),
    "qwen3_5": ("qwen3_5_text", "qwen35", LINEAR_ATTENTION, LINEAR_KEYS, LINEAR_CHANGES),
    "qwen3_5_moe": (
        "qwen3_5_moe_text", "qwen35moe", LINEAR_ATTENTION | MIXTURE | {"shared_expert_intermediate_size": 40},
        LINEAR_KEYS | MIXTURE_KEYS | {"feed_forward_length": None}, LINEAR_CHANGES,
    ),
    "stablelm": ("stablelm", "stablelm", {
        "use_qkv_bias": True, "use_parallel_residual": True, "layer_norm_eps": 1e-3, "rope_parameters": HALF,
    }, EPS | TWO | {"rope.dimension_count": 4, "use_parallel_residual": True}, {}),
    "starcoder2": ("starcoder2", "starcoder2", {"norm_epsilon": 1e-3}, EPS | TWO, {}),
}  # fmt: skip


def write(file: Path, model: Any, name: str, metadata: Mapping[str, Any], changes: Mapping[str, Change]) -> None:
    """Write a model as llama.cpp's converter does."""
    writer = gguf.GGUFWriter(file, name)
    writer.add_string("general.name", "a model")
    for key, value in (SHARED | dict(metadata)).items():
        if isinstance(value, list):
            writer.add_array(f"{name}.{key}", value)
        elif value is not None:
            writer.add_key_value(f"{name}.{key}", value, gguf.GGUFValueType.get_type(value))
    kind = next(kind for kind, other in gguf.MODEL_ARCH_NAMES.items() if other == name)
    names = gguf.get_tensor_name_map(kind, 4)
    tied = model.config.tie_word_embeddings
    for own, tensor in model.state_dict().items():
        parts = {own: tensor}
        if own.endswith("experts.gate_up_proj"):
            halves = zip(("gate_proj.weight", "up_proj.weight"), tensor.chunk(2, dim=1), strict=True)
            parts = {own.replace("gate_up_proj", half): value for half, value in halves}
        for part, value in parts.items():
            if part == "lm_head.weight" and tied:
                continue
            stem = (
                part.removeprefix("transformer.").replace(".dt_bias", ".dt_proj.bias").replace("down_proj", "down_proj")
            )
            found = names.get_name(stem, try_suffixes=(".weight", ".bias")) or names.get_name(
                part, try_suffixes=(".weight", ".bias")
            )
            found = f"{found}.weight" if own.endswith("experts.down_proj") else found
            in_block = found.split(".", 2)[2] if found.startswith("blk.") else found
            converted = changes.get(in_block, lambda tensor: tensor)(value)
            writer.add_tensor(found, converted.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def build(model_type: str, settings: Mapping[str, Any]) -> Any:
    config = AutoConfig.for_model(model_type, **SIZES | dict(settings))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for parameter in model.parameters():
        parameter.data.normal_(std=0.5)
    return model


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_opened_as_it_was_written(tmp_path: Path, case: str) -> None:
    model_type, name, settings, metadata, changes = CASES[case]
    model = build(model_type, settings)
    write(tmp_path / "model.gguf", model, name, metadata, changes)
    found = load_gguf(tmp_path, "model.gguf", torch.float32)
    assert type(found) is type(model)
    assert torch.allclose(found(IDS).logits, model(IDS).logits, rtol=1e-3, atol=1e-3)
    dropped = next(iter(changes), None)
    if dropped is not None:  # the control
        write(tmp_path / "model.gguf", model, name, metadata, {**changes, dropped: lambda tensor: tensor})
        try:
            other = load_gguf(tmp_path, "model.gguf", torch.float32)(IDS).logits
        except ConfigError as error:
            assert "is of shape" in str(error) or "NaN" in str(error)  # noqa: PT017
        else:
            assert not torch.allclose(other, model(IDS).logits, rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_blocks_that_predict_further_tokens(tmp_path: Path) -> None:
    """They come after those of the model, and change nothing of the next token."""
    model_type, name, settings, metadata, changes = CASES["qwen3_5"]
    model, file = build(model_type, settings), tmp_path / "model.gguf"
    write(file, model, name, metadata, changes)
    change(file, weights={"blk.4.nextn.eh_proj.weight": torch.ones(8, 8)})
    with pytest.raises(ConfigError, match=r"tensor blk\.4\.nextn\.eh_proj\.weight is not supported"):
        load_gguf(tmp_path, "model.gguf", torch.float32)
    change(file, {"qwen35.block_count": 5, "qwen35.nextn_predict_layers": 1})
    found = load_gguf(tmp_path, "model.gguf", torch.float32)
    assert torch.allclose(found(IDS).logits, model(IDS).logits, rtol=1e-3, atol=1e-3)


def test_falcon_with_several_key_heads(tmp_path: Path) -> None:
    model_type, name, settings, metadata, changes = CASES["falcon"]
    write(tmp_path / "model.gguf", build(model_type, settings), name, metadata | TWO, changes)
    with pytest.raises(ConfigError, match=r"falcon\.attention\.head_count_kv: 2 is not supported"):
        load_gguf(tmp_path, "model.gguf", torch.float32)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.layer_norm_rms_epsilon", 1e-2), ("ssm.group_count", 0), ("ssm.group_count", 3), ("full_attention_interval", 0),
        ("full_attention_interval", "4"), ("rope.dimension_sections", [0, 1, 1, 2]),
    ],
    ids=str,
)  # fmt: skip
def test_qwen3_5_with_other_keys(tmp_path: Path, key: str, value: Any) -> None:
    """They are rejected by name; the interval counts only in files that do not name the layers."""
    model_type, name, settings, metadata, changes = CASES["qwen3_5"]
    file = tmp_path / "model.gguf"
    write(file, build(model_type, settings), name, metadata, changes)
    change(file, {"qwen35.attention.recurrent_layers": None, f"qwen35.{key}": value})
    with pytest.raises(ConfigError, match=rf"qwen35\.{key}: "):
        load_gguf(tmp_path, "model.gguf", torch.float32)
    if key == "full_attention_interval":
        change(file, {"qwen35.attention.recurrent_layers": [True, True, True, False]})
        load_gguf(tmp_path, "model.gguf", torch.float32)
