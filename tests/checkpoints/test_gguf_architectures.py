"""Files whose content only llama.cpp reads have the names, layouts and metadata of its converter."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from horizon_lm.errors import ConfigError
from horizon_lm.model.files.checkpoint_reader import Checkpoint
from horizon_lm.tools.gguf import export as gguf_export
from tests.e2e.command import run
from tests.support.gguf_files import GEMMA, LLAMA3, MIXTURE, PADDED, YARN, metadata, save, tensors

gguf = pytest.importorskip("gguf")


def factors_of_llama_3(dim: int, scaling: dict[str, Any]) -> list[float]:
    """Return what llama.cpp's converter divides frequencies by: 1 for short waves, the factor for long ones, a ramp between."""
    factors = []
    for index in range(dim // 2):
        turns = scaling["original_max_position_embeddings"] / (2 * math.pi * scaling["rope_theta"] ** (2 * index / dim))
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        ramp = min(max((turns - low) / (high - low), 0.0), 1.0)
        factors.append(1 / ((1 - ramp) / scaling["factor"] + ramp))
    return factors


def test_scaling_of_llama_3(tmp_path: Path) -> None:
    """The factors are those of llama.cpp's converter, and frequencies divided by them those of transformers."""
    source = save(tmp_path / "model", "llama", head_dim=32, rope_parameters=LLAMA3, max_position_embeddings=512)
    result = run("export", source, tmp_path / "out", "--format", "gguf")
    assert result.exit_code == 0, result.output
    note = (
        "Horizon-LM and llama.cpp read the rotary scaling (llama3) from the file, but transformers' reader ignores it"
    )
    assert f"note: {note}" in result.stdout.splitlines()
    factors = tensors(tmp_path / "out" / "model.gguf")["rope_freqs.weight"]
    assert torch.allclose(factors, torch.tensor(factors_of_llama_3(32, LLAMA3)), rtol=1e-5)
    assert {1.0, 8.0} < set(factors.tolist())  # and some between

    rotary = AutoModelForCausalLM.from_pretrained(source).model.rotary_emb
    plain = 5e5 ** -(torch.arange(0, 32, 2) / 32)
    assert torch.allclose(plain / factors, rotary.inv_freq, rtol=1e-6)
    assert not torch.allclose(plain, rotary.inv_freq, rtol=1e-2)

    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    assert torch.allclose(read.model.rotary_emb.inv_freq, plain)  # as the note says


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_scalings_in_metadata(tmp_path: Path, model_type: str) -> None:
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2}
    notes = gguf_export.export_gguf(
        save(tmp_path / "linear", model_type, rope_parameters=linear), tmp_path / "linear-out"
    ).notes
    assert len([note for note in notes if "(linear)" in note]) == 1
    found = metadata(tmp_path / "linear-out" / "model.gguf")
    assert found[f"{model_type}.rope.scaling.type"] == "linear"
    assert found[f"{model_type}.rope.scaling.factor"] == 2.0

    yarn = YARN | {
        "type": "yarn",
        "beta_fast": 32,
        "beta_slow": 1.0,
        "truncate": True,
        "mscale": None,
    }  # as llama.cpp assumes
    gguf_export.export_gguf(save(tmp_path / "yarn", model_type, rope_parameters=yarn), tmp_path / "yarn-out")
    found = metadata(tmp_path / "yarn-out" / "model.gguf")
    assert {name: value for name, value in found.items() if ".rope.scaling." in name} == {
        f"{model_type}.rope.scaling.type": "yarn",
        f"{model_type}.rope.scaling.factor": 4.0,
        f"{model_type}.rope.scaling.original_context_length": 64,
    }
    assert "rope_freqs.weight" not in tensors(tmp_path / "yarn-out" / "model.gguf")


def test_scaling_of_long_phi(tmp_path: Path) -> None:
    """Factors for short and for long contexts, of a part of each head."""
    scaling = {
        "rope_type": "longrope", "rope_theta": 1e4, "partial_rotary_factor": 0.75, "original_max_position_embeddings": 64,
        "long_factor": [1.0, 1.5, 4.0], "short_factor": [1.0, 1.25, 2.0],
    }  # fmt: skip
    settings = PADDED | {"rope_parameters": scaling, "original_max_position_embeddings": 64, "sliding_window": None}
    exported = gguf_export.export_gguf(save(tmp_path / "model", "phi3", **settings), tmp_path / "out")
    assert [note.split(":")[0] for note in exported.notes] == [
        "original_max_position_embeddings",
        "Horizon-LM and llama.cpp read the rotary scaling (longrope) from the file, but transformers' reader ignores it",
        "llama.cpp takes the factors for long texts if its context is larger than 64, however long the text is",
    ]
    found, read = metadata(tmp_path / "out" / "model.gguf"), tensors(tmp_path / "out" / "model.gguf")
    assert found["phi3.rope.dimension_count"] == 6
    assert found["phi3.rope.scaling.original_context_length"] == 64
    assert math.isclose(found["phi3.rope.scaling.attn_factor"], math.sqrt(1 + math.log(4) / math.log(64)), rel_tol=1e-6)
    assert read["rope_factors_long.weight"].tolist() == [1.0, 1.5, 4.0]
    assert read["rope_factors_short.weight"].tolist() == [1.0, 1.25, 2.0]


ATTENTION = {f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"} | {"self_attn.o_proj": "attn_output"}
FEED_FORWARD = {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
NORMS_OF_OLMO = {
    "post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
}  # fmt: skip
SCALES = {
    "attention_multiplier": "attention.scale", "embedding_multiplier": "embedding_scale",
    "logits_scaling": "logit_scale", "residual_multiplier": "residual_scale",
}  # fmt: skip


def neighbours(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return the rows of queries or keys with the halves of each head interleaved, as llama.cpp's converter does."""
    return weight.view(heads, 2, -1, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)


@pytest.mark.parametrize(
    ("model_type", "settings", "norms"),
    [
        ("gemma", {"head_dim": 16, "tie_word_embeddings": True}, NORMS),
        ("granite", {key: 0.5 + index for index, key in enumerate(SCALES)}, NORMS),
        ("olmo2", {}, NORMS_OF_OLMO),
        ("smollm3", PADDED, NORMS),
    ],
)
def test_types_that_transformers_does_not_read(
    tmp_path: Path, model_type: str, settings: dict[str, Any], norms: dict[str, str]
) -> None:
    """A Gemma is multiplied by norms that include the one; Granite and SmolLM3 rotate neighbours, as a Llama does."""
    source = save(tmp_path / "model", model_type, **settings)
    exported = gguf_export.export_gguf(source, tmp_path / "out")
    assert exported.notes == [
        f"Horizon-LM and llama.cpp read the file, but transformers' reader does not know models of type {model_type}"
    ]
    found, read = metadata(tmp_path / "out" / "model.gguf"), tensors(tmp_path / "out" / "model.gguf")
    assert found["general.architecture"] == model_type
    assert found[f"{model_type}.attention.key_length"] == settings.get("head_dim", 8)
    if model_type == "granite":
        assert {key: found[f"granite.{name}"] for key, name in SCALES.items()} == settings
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    names |= {} if model_type == "gemma" else {"lm_head": "output"}
    names |= {
        f"model.layers.{index}.{name}": f"blk.{index}.{other}"
        for index in range(2)
        for name, other in (ATTENTION | FEED_FORWARD | norms).items()
    }
    assert read.keys() == {f"{name}.weight" for name in names.values()}
    weights = Checkpoint(source).read([f"{name}.weight" for name in names])
    for name, other in names.items():
        weight = weights[f"{name}.weight"]
        if model_type == "gemma" and "norm" in name:
            weight = weight + 1
        if model_type in ("granite", "smollm3") and name.endswith(("q_proj", "k_proj")):
            weight = neighbours(weight, 4 if name.endswith("q_proj") else 2)
        assert torch.equal(read[f"{other}.weight"], weight), name


@pytest.mark.parametrize(("model_type", "num_layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_scores_of_gemma_27b(tmp_path: Path, model_type: str, num_layers: int) -> None:
    """llama.cpp knows the models of 27B by their layers, and transformers' reader does not."""
    settings = GEMMA | {"head_dim": 16, "num_hidden_layers": num_layers, "query_pre_attn_scalar": 8}
    exported = gguf_export.export_gguf(save(tmp_path / "model", model_type, **settings), tmp_path / "out")
    assert exported.notes == [
        "query_pre_attn_scalar: Horizon-LM and llama.cpp compute with 8, but transformers' reader takes 256",
    ]


def test_experts(tmp_path: Path) -> None:
    """A Mixtral, which transformers does not read from GGUF, has the names and the layouts of llama.cpp's converter."""
    source = save(tmp_path / "model", "mixtral", **MIXTURE)
    result = run("export", source, tmp_path / "out", "--format", "gguf")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        f"The model is in {tmp_path / 'out' / 'model.gguf'}. Try it:",
        f'  horizon-lm generate {tmp_path / "out"} "..." --gguf-file model.gguf',
        "note: Horizon-LM and llama.cpp read the file, but transformers' reader does not know models of type mixtral",
    ]
    found, read = metadata(tmp_path / "out" / "model.gguf"), tensors(tmp_path / "out" / "model.gguf")
    assert found["general.architecture"] == "llama"
    assert (found["llama.expert_count"], found["llama.expert_used_count"]) == (4, 2)
    weights = Checkpoint(source).read(Checkpoint(source).names)
    expected = {
        "token_embd": weights["model.embed_tokens.weight"],
        "output": weights["lm_head.weight"],
        "output_norm": weights["model.norm.weight"],
    }
    for layer in range(2):
        own, moe = f"model.layers.{layer}", f"model.layers.{layer}.block_sparse_moe"
        for name, heads in (("q", 4), ("k", 2)):
            expected[f"blk.{layer}.attn_{name}"] = neighbours(weights[f"{own}.self_attn.{name}_proj.weight"], heads)
        expected |= {
            f"blk.{layer}.attn_v": weights[f"{own}.self_attn.v_proj.weight"],
            f"blk.{layer}.attn_output": weights[f"{own}.self_attn.o_proj.weight"],
            f"blk.{layer}.attn_norm": weights[f"{own}.input_layernorm.weight"],
            f"blk.{layer}.ffn_norm": weights[f"{own}.post_attention_layernorm.weight"],
            f"blk.{layer}.ffn_gate_inp": weights[f"{moe}.gate.weight"],
        }
        for name, part in (("w1", "gate"), ("w2", "down"), ("w3", "up")):
            experts = [weights[f"{moe}.experts.{index}.{name}.weight"] for index in range(4)]
            expected[f"blk.{layer}.ffn_{part}_exps"] = torch.stack(experts)
    assert read.keys() == {f"{name}.weight" for name in expected}
    assert [name for name, value in expected.items() if not torch.equal(value, read[f"{name}.weight"])] == []


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_in_one_tensor(tmp_path: Path, model_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They give the same file as experts in modules of their own, and one expert is in memory at a time."""
    settings = {"norm_topk_prob": True} if model_type == "qwen3_moe" else {}
    source = save(tmp_path / "model", model_type, torch.bfloat16, **MIXTURE, **settings)
    notes = gguf_export.export_gguf(source, tmp_path / "modules").notes
    if model_type == "qwen3_moe":
        assert notes == [
            "moe_intermediate_size: Horizon-LM and llama.cpp compute with 24, but transformers' reader takes 768"
        ]

    model = AutoModelForCausalLM.from_pretrained(source)
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, source / "model.safetensors")
    read, sizes = Checkpoint.read, []

    def watched(checkpoint: Checkpoint, names: list[str], rows: slice | None = None) -> Any:
        found = read(checkpoint, names, rows)
        sizes.extend(value.shape[0] for name, value in found.items() if "experts." in name)
        return found

    monkeypatch.setattr(Checkpoint, "read", watched)
    gguf_export.export_gguf(source, tmp_path / "fused")
    assert set(sizes) == {1}
    modules, fused = tensors(tmp_path / "modules" / "model.gguf"), tensors(tmp_path / "fused" / "model.gguf")
    assert modules.keys() == fused.keys()
    assert [name for name, value in modules.items() if not torch.equal(value, fused[name])] == []
    kinds = {each.name: each.tensor_type.name for each in gguf.GGUFReader(tmp_path / "fused" / "model.gguf").tensors}
    assert {kind for name, kind in kinds.items() if "_exps." in name} == {"BF16"}
    assert {kind for name, kind in kinds.items() if "ffn_gate_inp." in name} == {"F32"}


def test_a_missing_expert(tmp_path: Path) -> None:
    source = save(tmp_path / "model", "mixtral", **MIXTURE)
    weights = Checkpoint(source).read(Checkpoint(source).names)
    del weights["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    save_file(weights, source / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.1\.block_sparse_moe\.experts\.w3 of expert 2 is missing"):
        gguf_export.export_gguf(source, tmp_path / "out")
