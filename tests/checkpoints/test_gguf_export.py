"""A folder written as GGUF is read back by transformers' own reader as the same model and tokenizer, or rejected by name."""

import inspect
import json
import math
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Regex, pre_tokenizers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, masking_utils

from horizon_lm.checkpoints import gguf_export, gguf_reading, gguf_tokenizer
from horizon_lm.checkpoints.gguf_architectures import ARCHITECTURES
from horizon_lm.errors import ConfigError, ModelNotSupportedError
from horizon_lm.model.gguf_weights import load_gguf
from horizon_lm.store.checkpoint_reader import Checkpoint
from tests.e2e import tiny
from tests.e2e.command import run

gguf = pytest.importorskip("gguf")

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 256, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA = {"head_dim": 256, "tie_word_embeddings": True, "sliding_window": 8}
PHI3 = {"eos_token_id": 1, "pad_token_id": 1}
PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
OTHER_WINDOW_THETA = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}
TEXT = "It's 1234567 stars:\n\n  the keeper's ünïcode <|im_start|>user\r\n\t... don't"


def save(folder: Path, model_type: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    from transformers import AutoConfig

    tokenizer = tiny.build_tokenizer()
    config = AutoConfig.for_model(model_type, **SIZES | {"vocab_size": len(tokenizer) + 3} | settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for param in model.parameters():
        param.data.normal_()  # also norms and biases, which begin as ones and zeros
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, wide heads, a tied head": ("llama", {"head_dim": 16, "tie_word_embeddings": True, "rope_theta": 5e5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral, a window over the whole context": ("mistral", {"sliding_window": 256}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 7}),
    "phi3": ("phi3", PHI3 | {"sliding_window": 256}),
    "qwen2_moe": ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2}),  # experts of the default size
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}),
}


def add_and_subtract_one(model: Any) -> None:
    """Round norms as they are by llama.cpp's converter, which adds one, and by the reader, which subtracts it."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.add_(1).sub_(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_read_back(tmp_path: Path, case: str, dtype: torch.dtype) -> None:
    model_type, settings = CASES[case]
    source = save(tmp_path / "model", model_type, dtype, **settings)
    result = run("export", source, tmp_path / "out", "--format", "gguf")
    assert result.exit_code == 0, result.output
    assert f'horizon-lm generate {tmp_path / "out"} "..." --gguf-file model.gguf' in result.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.gguf"]

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32)
    if model_type.startswith("gemma"):
        add_and_subtract_one(model)
    expected, found = model.state_dict(), read.state_dict()
    assert type(read) is (LlamaForCausalLM if model_type == "mistral" else type(model))
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []
    ids = torch.arange(24).view(2, 12)
    assert torch.equal(model(ids).logits, read(ids).logits)

    one, other = (
        AutoTokenizer.from_pretrained(source),
        AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf"),
    )
    assert one(TEXT).input_ids == other(TEXT).input_ids
    assert (one.eos_token_id, one.bos_token_id, one.chat_template) == (
        other.eos_token_id,
        other.bos_token_id,
        other.chat_template,
    )


def metadata(file: Path) -> dict[str, Any]:
    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file in float32, in the layout of the file."""
    found = {}
    for each in gguf.GGUFReader(file).tensors:
        values = gguf.dequantize(each.data, each.tensor_type).copy()
        found[each.name] = torch.from_numpy(values).view(*reversed(each.shape.tolist()))
    return found


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
    assert "note: llama.cpp reads the rotary scaling (llama3) from the file, but transformers' reader ignores it" in (
        result.stdout.splitlines()
    )
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
    assert len(notes) == 1
    assert "(linear)" in notes[0]
    found = metadata(tmp_path / "linear-out" / "model.gguf")
    assert found[f"{model_type}.rope.scaling.type"] == "linear"
    assert found[f"{model_type}.rope.scaling.factor"] == 2.0

    yarn = YARN | {"beta_fast": 32, "beta_slow": 1.0, "truncate": True, "mscale": None}  # as llama.cpp assumes
    gguf_export.export_gguf(save(tmp_path / "yarn", model_type, rope_parameters=yarn), tmp_path / "yarn-out")
    found = metadata(tmp_path / "yarn-out" / "model.gguf")
    assert {name: value for name, value in found.items() if ".rope.scaling." in name} == {
        f"{model_type}.rope.scaling.type": "yarn",
        f"{model_type}.rope.scaling.factor": 4.0,
        f"{model_type}.rope.scaling.original_context_length": 64,
    }
    assert "rope_freqs.weight" not in tensors(tmp_path / "yarn-out" / "model.gguf")


def add_to_config(folder: Path, **keys: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def test_keys_without_effect(tmp_path: Path) -> None:
    """Keys of models that are published, or were read from a GGUF file themselves, do not stop an export."""
    source = save(tmp_path / "model", "llama")
    add_to_config(
        source,
        _model_name_or_path="Smollm2 135M", _commit_hash="0123abcd", unk_token_id=0, is_llama_config=True, rope_interleaved=False,
        unsloth_version="2026.1", use_mrope=False, task_specific_params={"any": 1}, output_hidden_states=True, return_dict=False,
        id2label={"0": "no"}, label2id={"no": 0}, **{"transformers.js_config": {"dtype": "q4"}},
    )  # fmt: skip
    gguf_export.export_gguf(source, tmp_path / "out")
    assert (tmp_path / "out" / "model.gguf").is_file()


def test_reading_a_file_shows_no_progress_bars(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """transformers has one for tensors of the file and one for those of the model, on standard error."""
    gguf_export.export_gguf(save(tmp_path / "model", "llama"), tmp_path / "out")
    capfd.readouterr()
    load_gguf(tmp_path / "out", "model.gguf", torch.float32)
    assert capfd.readouterr().err == ""
    AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    assert "100%" in capfd.readouterr().err  # a user's own call still has them


def test_a_model_that_was_a_gguf_file(tmp_path: Path) -> None:
    """A file, read by transformers and saved as a folder, as examples/demo.py does, becomes a file again."""
    gguf_export.export_gguf(save(tmp_path / "model", "llama"), tmp_path / "first")
    model = load_gguf(tmp_path / "first", "model.gguf", torch.float32)
    model.save_pretrained(tmp_path / "saved")
    AutoTokenizer.from_pretrained(tmp_path / "model").save_pretrained(tmp_path / "saved")
    add_to_config(tmp_path / "saved", _model_name_or_path="a name in the file's metadata")
    gguf_export.export_gguf(tmp_path / "saved", tmp_path / "second")
    read = load_gguf(tmp_path / "second", "model.gguf", torch.float32)
    assert all(torch.equal(value, read.state_dict()[name]) for name, value in model.state_dict().items())


def test_all_keys_that_code_looks_for_are_compared() -> None:
    """Keys that transformers reads only if a config has them are compared where a type of config lacks them."""
    for model_type in ARCHITECTURES:
        config = CONFIG_MAPPING[model_type]()
        own = import_module(type(config).__module__.replace("configuration_", "modeling_"))
        modules = (own, masking_utils)
        sought = {
            name
            for module in modules
            for name in re.findall(r'(?:get|has)attr\(\w*config, "(\w+)"', inspect.getsource(module))
        }
        assert "head_dim" in sought
        assert sought <= gguf_reading.computed_from(config)


def test_gemma(tmp_path: Path) -> None:
    """The first Gemma, which transformers does not read from GGUF: llama.cpp multiplies by norms that include the one."""
    source = save(tmp_path / "model", "gemma", head_dim=16, tie_word_embeddings=True)
    exported = gguf_export.export_gguf(source, tmp_path / "out")
    assert exported.notes == ["llama.cpp reads the file, but transformers' reader does not know models of type gemma"]
    found, read = metadata(tmp_path / "out" / "model.gguf"), tensors(tmp_path / "out" / "model.gguf")
    assert (found["general.architecture"], found["gemma.attention.key_length"]) == ("gemma", 16)
    own = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    own |= {f"mlp.{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}
    own |= {f"self_attn.{name}_proj": f"attn_{name}" for name in "qkv"} | {"self_attn.o_proj": "attn_output"}
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    names |= {
        f"model.layers.{index}.{name}": f"blk.{index}.{other}" for index in range(2) for name, other in own.items()
    }
    assert read.keys() == {f"{name}.weight" for name in names.values()}
    weights = Checkpoint(source).read([f"{name}.weight" for name in names])
    for name, other in names.items():
        weight = weights[f"{name}.weight"]
        assert torch.equal(read[f"{other}.weight"], weight + 1 if "norm" in name else weight), name


@pytest.mark.parametrize(("model_type", "num_layers"), [("gemma2", 46), ("gemma3_text", 62)])
def test_scores_of_gemma_27b(tmp_path: Path, model_type: str, num_layers: int) -> None:
    """llama.cpp knows the models of 27B by their layers, and transformers' reader does not."""
    settings = GEMMA | {"head_dim": 16, "num_hidden_layers": num_layers, "query_pre_attn_scalar": 8}
    exported = gguf_export.export_gguf(save(tmp_path / "model", model_type, **settings), tmp_path / "out")
    assert exported.notes == [
        "query_pre_attn_scalar: llama.cpp computes with 8, but transformers' reader takes 256",
    ]


def test_other_dtypes(tmp_path: Path) -> None:
    source = save(tmp_path / "model", "llama")
    assert run("export", source, tmp_path / "out", "--format", "gguf", "--dtype", "bfloat16").exit_code == 0
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32
    ).state_dict()
    for name, value in AutoModelForCausalLM.from_pretrained(source).state_dict().items():
        assert torch.equal(read[name], value if value.dim() == 1 else value.bfloat16().float()), name


@pytest.mark.parametrize(
    ("model_type", "settings", "parts"),
    [("llama", {}, {"q_proj", "k_proj"}), ("gemma2", GEMMA, {"norm"})],
)
def test_tensors_in_another_layout_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_type: str, settings: dict[str, Any], parts: set[str]
) -> None:
    """The control: a file with queries that are not permuted, or norms without the one, differs when it is read."""
    source = save(tmp_path / "model", model_type, **settings)
    monkeypatch.setitem(ARCHITECTURES, model_type, replace(ARCHITECTURES[model_type], layouts=lambda config: {}))
    gguf_export.export_gguf(source, tmp_path / "out")
    read = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32
    ).state_dict()
    expected = AutoModelForCausalLM.from_pretrained(source).state_dict()
    different = {name.split(".")[-2] for name in expected if not torch.allclose(read[name], expected[name], atol=1e-5)}
    assert {"norm" if "norm" in name else name for name in different} == parts


def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, calls, read = save(tmp_path / "model", "qwen2"), [], Checkpoint.read

    def watched(checkpoint: Checkpoint, names: list[str], rows: slice | None = None) -> Any:
        calls.append(names)
        return read(checkpoint, names, rows)

    monkeypatch.setattr(Checkpoint, "read", watched)
    gguf_export.export_gguf(source, tmp_path / "out")
    assert sorted(calls) == sorted([name] for name in Checkpoint(source).names)


def test_experts(tmp_path: Path) -> None:
    """A Mixtral, which transformers does not read from GGUF, has the names and the layouts of llama.cpp's converter."""
    source = save(tmp_path / "model", "mixtral", **MIXTURE)
    result = run("export", source, tmp_path / "out", "--format", "gguf")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        f"The model is in {tmp_path / 'out' / 'model.gguf'}",
        "note: llama.cpp reads the file, but transformers' reader does not know models of type mixtral",
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
            rows = weights[f"{own}.self_attn.{name}_proj.weight"].view(heads, 2, 4, 32)  # two halves of a head of 8
            expected[f"blk.{layer}.attn_{name}"] = rows.transpose(1, 2).reshape(-1, 32)
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
        assert notes == ["moe_intermediate_size: llama.cpp computes with 24, but transformers' reader takes 768"]

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


@pytest.mark.parametrize("split", [gguf_tokenizer._QWEN2, gguf_tokenizer._LLAMA3])
def test_splits(tmp_path: Path, split: str) -> None:
    source = save(tmp_path / "model", "llama")
    tokenizer = AutoTokenizer.from_pretrained(source)
    parts = [
        pre_tokenizers.Split(Regex(split), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.save_pretrained(source)
    gguf_export.export_gguf(source, tmp_path / "out")
    read = AutoTokenizer.from_pretrained(tmp_path / "out", gguf_file="model.gguf")
    assert read.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT) == (
        tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(TEXT)
    )


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("olmo2", {}, f"models of type olmo2 are not written as GGUF; those of type {', '.join(ARCHITECTURES)} are"),
        ("mistral", {"sliding_window": 255}, "sliding_window: 255 cannot be written as GGUF; it would be read as None"),
        ("mixtral", MIXTURE | {"sliding_window": 255}, "sliding_window: 255 cannot be written as GGUF"),
        ("mixtral", MIXTURE | {"hidden_act": "gelu"}, "hidden_act: gelu cannot be written as GGUF; it .* read as silu"),
        ("phi3", PHI3 | {"sliding_window": 255}, "sliding_window: 255 cannot be written as GGUF"),
        ("phi3", PHI3 | {"rope_parameters": PARTIAL}, "'partial_rotary_factor': 0.5.* cannot be written as GGUF"),
        ("gemma2", GEMMA | {"query_pre_attn_scalar": 144}, "query_pre_attn_scalar: 144 cannot .* be read as 256"),
        (
            "gemma2",
            GEMMA | {"final_logit_softcapping": 20.0},
            "final_logit_softcapping: 20.0 cannot be written as GGUF",
        ),
        ("gemma2", GEMMA | {"attn_logit_softcapping": None}, "attn_logit_softcapping: None cannot be written as GGUF"),
        ("gemma2", GEMMA | {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("gemma3_text", GEMMA | {"query_pre_attn_scalar": 168}, "query_pre_attn_scalar: 168 cannot .* be read as 256"),
        (
            "gemma3_text",
            GEMMA | {"rope_parameters": OTHER_WINDOW_THETA},
            "rope_parameters: .*20000.* cannot be written",
        ),
        ("gemma", {"hidden_act": "relu"}, "hidden_act: relu cannot be written as GGUF"),
        ("gemma", {}, "tie_word_embeddings: False cannot be written as GGUF; it would be read as True"),
        ("gemma2", GEMMA | {"tie_word_embeddings": False}, "tie_word_embeddings: False cannot be written as GGUF"),
        ("qwen2_moe", MIXTURE | {"norm_topk_prob": True}, "norm_topk_prob: True cannot be written as GGUF"),
        ("qwen2_moe", MIXTURE | {"tie_word_embeddings": True}, "tie_word_embeddings: True cannot be written as GGUF"),
        ("qwen3_moe", MIXTURE, "norm_topk_prob: False cannot be written as GGUF; it would be read as True"),
        ("qwen3_moe", MIXTURE | {"norm_topk_prob": True, "mlp_only_layers": [1]}, "mlp_only_layers"),
        (
            "llama",
            {"attention_bias": True},
            "attention_bias: True cannot be written as GGUF; it would be read as False",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "rope_parameters: .*dynamic.* cannot be written as GGUF; it would be read as .*default",
        ),
        ("llama", {"rope_parameters": YARN | {"beta_fast": 16.0}}, "beta_fast': 16.0.* cannot be written as GGUF"),
        ("llama", {"rope_parameters": YARN | {"attention_factor": 1.0}}, "attention_factor': 1.0.* cannot be written"),
        ("qwen2", {"rope_parameters": LLAMA3}, "rope_parameters: .*llama3.* cannot be written as GGUF"),
        ("qwen2", {"head_dim": 16}, "head_dim: 16 cannot be written as GGUF; it would be read as None"),
        ("llama", {"is_causal": False}, "is_causal: False cannot be written as GGUF"),
        ("qwen3", {"head_dim": 16}, "head_dim: 16 cannot be written as GGUF; it would be read as 128"),
    ],
)
def test_models_that_would_be_read_differently(
    tmp_path: Path, model_type: str, settings: dict[str, Any], message: str
) -> None:
    source = save(tmp_path / "model", model_type, **settings)
    with pytest.raises(ModelNotSupportedError, match=message):
        gguf_export.export_gguf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tokenizers_without_a_name(tmp_path: Path) -> None:
    source = save(tmp_path / "model", "llama")
    tokenizer = AutoTokenizer.from_pretrained(source)
    for pre_tokenizer, message in (
        (pre_tokenizers.Metaspace(), "only tokenizers of byte-level BPE are written as GGUF"),
        (pre_tokenizers.ByteLevel(add_prefix_space=True), "llama.cpp has no known name for the way"),
    ):
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizer
        tokenizer.backend_tokenizer.save(str(source / "tokenizer.json"))
        with pytest.raises(ModelNotSupportedError, match=message):
            gguf_export.export_gguf(source, tmp_path / "out")
    (source / "tokenizer.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot be read"):
        gguf_export.export_gguf(source, tmp_path / "out")


def test_float16_that_overflows(tmp_path: Path) -> None:
    source = save(tmp_path / "model", "llama", pad_token_id=None)
    model = AutoModelForCausalLM.from_pretrained(source)
    model.model.layers[0].mlp.up_proj.weight.data[0, 0] = 1e5
    model.save_pretrained(source)
    with pytest.raises(ConfigError, match="up_proj"):
        gguf_export.export_gguf(source, tmp_path / "out", "float16")
    assert not (tmp_path / "out").exists()


def test_other_folders(tmp_path: Path) -> None:
    (tmp_path / "adapters").mkdir()
    (tmp_path / "adapters" / "adapter_config.json").write_text('{"base_model_name_or_path": "base"}')
    rejected = run("export", tmp_path / "adapters", tmp_path / "out", "--format", "gguf")
    assert rejected.exit_code == 2
    assert f"merge them first: horizon-lm merge {tmp_path / 'adapters'} OUT" in rejected.stderr
    assert "choose safetensors or gguf" in run("export", tmp_path, tmp_path / "out", "--format", "onnx").stderr
