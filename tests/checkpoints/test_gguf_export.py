"""A folder written as GGUF is read back by transformers' own reader as the same model and tokenizer, or rejected by name."""

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, masking_utils

from horizon_lm.errors import ConfigError, ModelNotSupportedError
from horizon_lm.model.files.checkpoint_reader import Checkpoint
from horizon_lm.model.gguf_architectures import ARCHITECTURES
from horizon_lm.model.gguf_weights import load_gguf
from horizon_lm.tools.gguf import export as gguf_export
from horizon_lm.tools.gguf import reading as gguf_reading
from tests.e2e.command import run
from tests.support.gguf_files import GEMMA, LLAMA3, MIXTURE, PADDED, TEXT, YARN, add_to_config, save
from tests.support.thinned_cases import covering

gguf = pytest.importorskip("gguf")

PARTIAL = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
OTHER_WINDOW_THETA = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama, wide heads, a tied head": ("llama", {"head_dim": 16, "tie_word_embeddings": True, "rope_theta": 5e5}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 128, "tie_word_embeddings": True}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral, a window over the whole context": ("mistral", {"sliding_window": 256}),
    "gemma2": ("gemma2", GEMMA),
    "gemma3": ("gemma3_text", GEMMA | {"num_hidden_layers": 7}),
    "phi3": ("phi3", PADDED | {"sliding_window": 256}),
    "qwen2_moe": ("qwen2_moe", {"num_experts": 4, "num_experts_per_tok": 2}),  # experts of the default size
    "qwen3_moe": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}),
}


def add_and_subtract_one(model: Any) -> None:
    """Round norms as they are by llama.cpp's converter, which adds one, and by the reader, which subtracts it."""
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter.data.add_(1).sub_(1)


@pytest.mark.parametrize(("case", "dtype"), covering(CASES, (torch.bfloat16, torch.float32)), ids=str)
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
    """transformers' own reader has one for tensors of the file and one for those of the model, on standard error."""
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
        assert sought <= gguf_reading.deciding_keys(config)


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


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("olmo", {}, f"models of type olmo are not written as GGUF; those of type {', '.join(ARCHITECTURES)} are"),
        (
            "mistral",
            {"sliding_window": 255},
            "sliding_window: 255 cannot .* would be read as None; set max_position_embeddings to 255",
        ),
        ("mixtral", MIXTURE | {"sliding_window": 255}, "sliding_window: 255 cannot be written as GGUF"),
        ("mixtral", MIXTURE | {"hidden_act": "gelu"}, "hidden_act: gelu cannot be written as GGUF; it .* read as silu"),
        ("phi3", PADDED | {"sliding_window": 255}, "sliding_window: 255 cannot be written as GGUF"),
        ("llama", {"rope_parameters": PARTIAL}, "'partial_rotary_factor': 0.5.* cannot be written as GGUF"),
        ("gemma2", GEMMA | {"query_pre_attn_scalar": 144}, "query_pre_attn_scalar: 144 cannot .* be read as 256"),
        ("gemma2", GEMMA | {"attn_logit_softcapping": None}, "attn_logit_softcapping: None cannot be written as GGUF"),
        ("gemma2", GEMMA | {"layer_types": ["full_attention"] * 2}, "layer_types"),
        ("gemma3_text", GEMMA | {"query_pre_attn_scalar": 168}, "query_pre_attn_scalar: 168 cannot .* be read as 256"),
        (
            "gemma3_text",
            GEMMA | {"rope_parameters": OTHER_WINDOW_THETA},
            "rope_parameters: .*20000.* cannot be written",
        ),
        # As transformers opens it, with half of its window.
        (
            "gemma3_text",
            GEMMA | {"use_bidirectional_attention": True},
            "use_bidirectional_attention: True cannot be written as GGUF; it would be read as False",
        ),
        ("gemma3_text", GEMMA | {"sliding_window_pattern": 2}, "layer_types: .*full_attention.* cannot be written"),
        ("gemma", {"hidden_act": "relu"}, "hidden_act: relu cannot be written as GGUF"),
        ("granite", {"mlp_bias": True}, "mlp_bias: True cannot be written as GGUF; it would be read as False"),
        (
            "olmo2",
            {"attention_bias": True},
            "attention_bias: True cannot be written as GGUF; it would be read as False",
        ),
        ("smollm3", PADDED | {"no_rope_layers": [0, 1]}, "no_rope_layers: .*0, 1.* cannot be written as GGUF"),
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
        (
            "llama",
            {"head_dim": 32, "rope_parameters": YARN | {"beta_fast": 4.0}},
            "beta_fast': 4.0.* cannot be written as GGUF",
        ),
        ("llama", {"rope_parameters": YARN | {"attention_factor": 1.0}}, "attention_factor': 1.0.* cannot be written"),
        ("qwen2", {"rope_parameters": LLAMA3}, "rope_parameters: .*llama3.* cannot be written as GGUF"),
        ("qwen2", {"head_dim": 16}, "head_dim: 16 cannot be written as GGUF; it would be read as 8"),
        ("llama", {"is_causal": False}, "is_causal: False cannot be written as GGUF"),
    ],
)
def test_models_that_would_be_read_differently(
    tmp_path: Path, model_type: str, settings: dict[str, Any], message: str
) -> None:
    source = save(tmp_path / "model", model_type, **settings)
    with pytest.raises(ModelNotSupportedError, match=message):
        gguf_export.export_gguf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_keys_that_only_made_others(tmp_path: Path) -> None:
    """A pattern of windows that gives the layers of the usual one changes nothing."""
    source = save(tmp_path / "model", "gemma3_text", **GEMMA, sliding_window_pattern=3)  # of which there are two
    assert gguf_export.export_gguf(source, tmp_path / "out").notes == []


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", {"format": "pt"})


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: {name: each for name, each in weights.items() if name != UP},
            f"lacks 1 of 21 parameters.*{UP}",
        ),
        (
            lambda weights: {name: each for name, each in weights.items() if name != "lm_head.weight"},
            "lacks 1 of 21 parameters.*lm_head",
        ),
        (lambda weights: weights | {UP: weights[UP][:-8].clone()}, f"{UP} has shape"),
        (lambda weights: weights | {UP: weights[UP] * torch.inf}, f"{UP} has [\\d,]+ NaN or infinite values"),
    ],
    ids=["a missing layer", "a missing head", "another shape", "infinite"],
)
def test_weights_that_are_not_those_of_the_model(
    tmp_path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], message: str
) -> None:
    source = save(tmp_path / "model", "llama")
    change_weights(source, change)
    with pytest.raises(ConfigError, match=message):
        gguf_export.export_gguf(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_table_that_is_stored_as_the_head(tmp_path: Path) -> None:
    source = save(tmp_path / "model", "llama", tie_word_embeddings=True)
    expected = AutoModelForCausalLM.from_pretrained(source).state_dict()
    change_weights(
        source, lambda weights: {name.replace("model.embed_tokens", "lm_head"): each for name, each in weights.items()}
    )
    gguf_export.export_gguf(source, tmp_path / "out")
    found = load_gguf(tmp_path / "out", "model.gguf", torch.float32).state_dict()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def test_tensors_that_are_not_part_of_the_model(tmp_path: Path) -> None:
    """llama.cpp loads no file with tensors that it does not ask for, such as the frequencies in old folders of Llama 2."""
    source = save(tmp_path / "model", "llama")
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "extra.weight": torch.ones(4)}
    change_weights(source, lambda weights: weights | frequencies)
    notes = gguf_export.export_gguf(source, tmp_path / "out").notes
    assert len(gguf.GGUFReader(tmp_path / "out" / "model.gguf").tensors) == 21
    assert any("extra.weight" in note for note in notes)


def test_a_file_that_lacks_a_tensor_is_not_opened(tmp_path: Path) -> None:
    """It is not drawn anew."""
    gguf_export.export_gguf(save(tmp_path / "model", "llama"), tmp_path / "out")
    file = tmp_path / "out" / "model.gguf"
    file.write_bytes(file.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_ux.weight"))
    with pytest.raises(ConfigError, match=r"has no tensor blk\.1\.ffn_up\.weight"):
        load_gguf(tmp_path / "out", "model.gguf", torch.float32)


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


def test_a_file_gets_the_name_that_was_asked_for(tmp_path: Path) -> None:
    source = save(tmp_path / "model", "llama")
    result = run("export", source, tmp_path / "new" / "my.gguf", "--format", "gguf")
    assert result.exit_code == 0, result.output
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["my.gguf"]  # and no temporary file
    assert f"The model is in {tmp_path / 'new' / 'my.gguf'}. Try it:" in result.stdout
    assert f'horizon-lm generate {tmp_path / "new"} "..." --gguf-file my.gguf' in result.stdout
    gguf_export.export_gguf(source, tmp_path / "folder")
    assert (tmp_path / "folder" / "model.gguf").read_bytes() == (tmp_path / "new" / "my.gguf").read_bytes()
