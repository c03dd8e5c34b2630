"""Folders and adapters that cannot be merged or exported as they are: rejected with the reason, or written as what they are."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("peft", reason="needs the whole installation")

import peft
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import horizon_lm
from horizon_lm.errors import ConfigError, HorizonError, ModelNotSupportedError
from tests.e2e.command import run
from tests.support import merged_adapters, tiny_models
from tests.support.peft_methods import lora, method

pytestmark = pytest.mark.filterwarnings("ignore")
WEIGHTS = "adapter_model.safetensors"


def save(folder: Path, config: Any, **settings: Any) -> Path:
    """Write a base and adapters of it, and return the adapters' folder."""
    merged_adapters.save_plain(tiny_models.build("llama", **settings), folder / "base", torch.float32)
    merged_adapters.save_adapter(merged_adapters.opened(folder / "base"), folder / "base", folder / "adapter", config)
    return folder / "adapter"


@pytest.mark.parametrize("base", ["tied", "tied bf16", "buffers bf16", "experts"])
def test_adapters_that_change_nothing_give_the_base_back(tmp_path: Path, base: str) -> None:
    folder, plain = merged_adapters.save_base(tmp_path, base)
    modules = ["o_proj", "lm_head", "embed_tokens"] if base == "tied" else ["o_proj"]
    merged_adapters.save_adapter(plain(), folder, tmp_path / "adapter", lora(target_modules=modules)(), scale=0)
    horizon_lm.merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    before, after = merged_adapters.stored(folder), merged_adapters.stored(tmp_path / "merged")
    assert before.keys() == after.keys()
    assert all(merged_adapters.same(after[name], value) for name, value in before.items())
    configs = [json.loads((each / "config.json").read_text()) for each in (folder, tmp_path / "merged")]
    assert configs[0] == configs[1]


def test_tensors_of_no_part_of_the_model(tmp_path: Path) -> None:
    """They are kept; quantized ones are decoded, as nothing says that they are quantized any more."""
    folder, plain = merged_adapters.save_base(tmp_path, "fp8")
    state = load_file(folder / "model.safetensors")
    layer = "model.layers.0.self_attn.o_proj.weight"
    state |= {"extra.weight": state[layer].clone(), "extra.weight_scale_inv": state[f"{layer}_scale_inv"].clone()}
    save_file(state | {"other.count": torch.arange(3)}, folder / "model.safetensors", {"format": "pt"})
    merged_adapters.save_adapter(plain(), folder, tmp_path / "adapter", lora(target_modules=["q_proj"])())
    horizon_lm.merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    written = merged_adapters.stored(tmp_path / "merged")
    assert merged_adapters.same(written["extra.weight"], written[layer])
    assert merged_adapters.same(written["other.count"], torch.arange(3))
    assert not [name for name in written if "scale_inv" in name]


def test_another_dtype_leaves_buffers_as_they_are(tmp_path: Path) -> None:
    folder, plain = merged_adapters.save_base(tmp_path, "buffers")
    merged_adapters.save_adapter(plain(), folder, tmp_path / "adapter", lora(target_modules=["o_proj"])())
    horizon_lm.merge_adapter(tmp_path / "adapter", tmp_path / "merged", dtype="bfloat16", max_shard_size="20KB")
    before, written = merged_adapters.stored(folder), merged_adapters.stored(tmp_path / "merged")
    buffers = [name for name in before if "e_score_correction_bias" in name]
    assert buffers
    assert all(merged_adapters.same(written[name], before[name]) for name in buffers)
    opened = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    in_float32 = {
        name for name, value in opened.items() if value.dtype == torch.float32
    }  # routers, from transformers 5.24 on
    for name in before.keys() - set(buffers):
        assert written[name].dtype == (torch.float32 if name in in_float32 else torch.bfloat16), name


REJECTED: dict[str, tuple[Any, str]] = {
    "aLoRA": (lora(alora_invocation_tokens=[5, 6]), "changes some tokens of a row only"),
    "layer_replication": (lora(layer_replication=[(0, 2), (1, 3)]), "layer_replication lets several layers"),
    "prompt tuning": (
        lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
        "PROMPT_TUNING cannot be merged, because what it adds is not a change of weights",
    ),
    "lora_bias": (lora(lora_bias=True), "because the base layer has no bias"),
    "Beft": (method("Beft"), "Base layer has no bias"),
    "Lily": (method("Lily"), "LILY cannot be merged"),
    "pissa_niter": (lora(init_lora_weights="pissa_niter_4"), "pissa_niter_4 took from the base what"),
}


@pytest.mark.parametrize("kind", REJECTED)
def test_adapters_that_cannot_be_merged(tmp_path: Path, kind: str) -> None:
    config, reason = REJECTED[kind]
    adapter = save(tmp_path, config())
    with pytest.raises(HorizonError, match=reason):
        horizon_lm.merge_adapter(adapter, tmp_path / "merged")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


@pytest.mark.parametrize("start", ["corda", "loftq", "lora_ga"])
def test_initialisations_that_need_more_than_the_folder(tmp_path: Path, start: str) -> None:
    adapter = save(tmp_path, lora()())
    path = adapter / "adapter_config.json"
    changes = {"init_lora_weights": start, "loftq_config": {"loftq_bits": 4} if start == "loftq" else {}}
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ModelNotSupportedError, match=f"{start} took from the base.*path_initial_model_for_weight_conv"):
        horizon_lm.merge_adapter(adapter, tmp_path / "merged")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(tmp_path: Path, value: float) -> None:
    adapter = save(tmp_path, lora()())
    state = load_file(adapter / WEIGHTS)
    name = next(iter(state))
    state[name].view(-1)[3] = value
    save_file(state, adapter / WEIGHTS)
    result = run("merge", adapter, tmp_path / "merged")
    assert result.exit_code == 2
    assert f"{name} has 1 NaN or infinite values" in " ".join(result.stderr.split())
    with pytest.raises(ConfigError, match="has 1 NaN or infinite values"):
        horizon_lm.from_pretrained(adapter, "cpu", "float32")


def test_a_merge_that_overflows(tmp_path: Path) -> None:
    merged_adapters.save_plain(tiny_models.build("llama"), tmp_path / "base", torch.float16)
    merged_adapters.save_adapter(
        merged_adapters.opened(tmp_path / "base"), tmp_path / "base", tmp_path / "adapter", lora()(), scale=300
    )
    with pytest.raises(ConfigError, match=r"NaN or infinite values .* in the merged model, in torch\.float16"):
        horizon_lm.merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    assert not list(tmp_path.glob(".*"))


def test_adapters_of_a_resized_vocabulary(tmp_path: Path) -> None:
    merged_adapters.save_plain(tiny_models.build("llama"), tmp_path / "base", torch.float32)
    resized = merged_adapters.opened(tmp_path / "base")
    resized.resize_token_embeddings(tiny_models.VOCABULARY + 3)
    config = lora(target_modules=["q_proj"], modules_to_save=["embed_tokens", "lm_head"])()
    merged_adapters.save_adapter(resized, tmp_path / "base", tmp_path / "adapter", config)
    with pytest.raises(ConfigError, match="has 100 rows, and that of the base 97; resize the vocabulary"):
        horizon_lm.merge_adapter(tmp_path / "adapter", tmp_path / "merged")
    torch.manual_seed(0)
    other = merged_adapters.opened(tmp_path / "base")
    other.resize_token_embeddings(tiny_models.VOCABULARY + 3)
    other.save_pretrained(tmp_path / "resized")
    horizon_lm.merge_adapter(tmp_path / "adapter", tmp_path / "merged", base=tmp_path / "resized")
    expected = peft.PeftModel.from_pretrained(merged_adapters.opened(tmp_path / "resized"), tmp_path / "adapter")
    assert (
        merged_adapters.distance(
            merged_adapters.logits(merged_adapters.opened(tmp_path / "merged")), merged_adapters.logits(expected)
        )
        < 1e-5
    )


CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnModel(LlamaForCausalLM):
    config_class = OwnConfig
"""


@pytest.fixture
def own_code(tmp_path: Path) -> Path:
    folder = tmp_path / "base"
    merged_adapters.save_plain(tiny_models.build("llama"), folder, torch.float32)
    (folder / "own_code.py").write_text(CODE)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "model_type": "own_llama",
        "architectures": ["OwnModel"],
        "auto_map": {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnModel"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def opened_with_code(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()


def test_adapters_of_a_model_with_its_own_code(tmp_path: Path, own_code: Path) -> None:
    merged_adapters.save_adapter(opened_with_code(own_code), own_code, tmp_path / "adapter", lora()())
    assert run("merge", tmp_path / "adapter", tmp_path / "merged").exit_code == 2
    assert run("merge", tmp_path / "adapter", tmp_path / "merged", "--trust-remote-code").exit_code == 0
    expected = peft.PeftModel.from_pretrained(opened_with_code(own_code), tmp_path / "adapter")
    assert (
        merged_adapters.distance(
            merged_adapters.logits(opened_with_code(tmp_path / "merged")), merged_adapters.logits(expected)
        )
        < 1e-5
    )


def test_a_checkpoint_of_a_model_with_its_own_code(tmp_path: Path, own_code: Path) -> None:
    options = {"trust_remote_code": True, "allow_unproven_model": True}
    model = horizon_lm.from_pretrained(own_code, "cpu", "float32", **options)
    horizon_lm.save_checkpoint(tmp_path / "checkpoint", model)
    assert run("export", tmp_path / "checkpoint", tmp_path / "out").exit_code == 2
    assert run("export", tmp_path / "checkpoint", tmp_path / "out", "--trust-remote-code").exit_code == 0
    assert torch.equal(
        merged_adapters.logits(opened_with_code(tmp_path / "out")), merged_adapters.logits(opened_with_code(own_code))
    )


@pytest.mark.parametrize("way", ["save_pretrained", "export", "export of an older checkpoint"])
def test_an_own_head_under_a_config_that_says_tied(tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tiny_models.build("llama", tie_word_embeddings=False)
    plain.config.tie_word_embeddings = True
    expected = merged_adapters.logits(plain)
    model = horizon_lm.stream(plain, precision="float32")
    if way == "save_pretrained":
        model.save_pretrained(tmp_path / "out")
    else:
        if "older" in way:
            monkeypatch.setattr("horizon_lm.model.files.checkpoint_writer.true_config", lambda model: model.config)
        horizon_lm.save_checkpoint(tmp_path / "checkpoint", model)
        horizon_lm.export_checkpoint(tmp_path / "checkpoint", tmp_path / "out")
    for opened in (
        horizon_lm.from_pretrained(tmp_path / "out", "cpu", "float32"),
        merged_adapters.opened(tmp_path / "out"),
    ):
        assert merged_adapters.distance(merged_adapters.logits(opened), expected) < 1e-5
    assert model.config.tie_word_embeddings
