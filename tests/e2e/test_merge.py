"""Adapters are merged as PEFT merges them, bit for bit, with one unit of the model in memory."""

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import horizon_lm
from horizon_lm.errors import ConfigError
from tests.e2e import tiny
from tests.e2e.command import run
from tests.support import tiny_models
from tests.support.thinned_cases import thinned

pytestmark = pytest.mark.filterwarnings("ignore")
KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "modules to save": {"modules_to_save": ["lm_head"]},
    "embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "copies": {"modules_to_save": ["embed_tokens", "lm_head"]},
    "tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 9, 2]},
    "experts": {
        "target_modules": ["q_proj"],
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    },
}


def save(folder: Path, model: Any, dtype: torch.dtype, **settings: Any) -> tuple[Path, Path]:
    """Write a base and adapters that are not zero, and return both folders."""
    model = model.to(dtype)
    model.save_pretrained(folder / "base")
    tiny.build_tokenizer().save_pretrained(folder / "base")
    config = {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | settings
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder / "base"), peft.LoraConfig(**config))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, param in adapted.named_parameters():
            if "lora_" in name or param.requires_grad:
                param.add_(torch.randn_like(param) * 0.05)
    adapted.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter"


def merged_by_peft(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    return plain.merge_and_unload().state_dict()


@pytest.mark.parametrize(("kind", "dtype"), thinned(itertools.product(KINDS, (torch.float32, torch.bfloat16))), ids=str)
def test_merged_weights_equal_those_of_peft(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    model = tiny_models.build("qwen3_moe" if kind == "experts" else "llama")
    base, adapter = save(tmp_path, model, dtype, **KINDS[kind])
    expected = merged_by_peft(base, adapter)
    assert run("merge", adapter, tmp_path / "merged").exit_code == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    found = merged.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) and found[name].dtype == dtype for name, value in expected.items())
    changed = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert any(not torch.equal(found[name], value) for name, value in changed.items())
    assert (tmp_path / "merged" / "tokenizer.json").is_file()


def test_files_beside_the_weights(tmp_path: Path) -> None:
    """A tokenizer may have further templates, in a folder; the processor of images is the base's, which the adapters lack."""
    base, adapter = save(tmp_path, tiny_models.build("llama"), torch.float32)
    tokenizer = tiny.build_tokenizer()
    tokenizer.chat_template = {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    tokenizer.save_pretrained(adapter)
    (base / "preprocessor_config.json").write_text("{}")
    assert run("merge", adapter, tmp_path / "merged").exit_code == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == tokenizer.chat_template
    assert (tmp_path / "merged" / "preprocessor_config.json").read_text() == "{}"


def test_shards_and_dtype(tmp_path: Path) -> None:
    base, adapter = save(tmp_path, tiny_models.build("llama"), torch.bfloat16)
    horizon_lm.merge_adapter(adapter, tmp_path / "merged", dtype="float32", max_shard_size="20KB")
    assert len(list((tmp_path / "merged").glob("model-*.safetensors"))) > 2
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).state_dict()
    assert all(torch.equal(found[name], value.float()) for name, value in merged_by_peft(base, adapter).items())


def test_another_base_is_named(tmp_path: Path) -> None:
    base, adapter = save(tmp_path, tiny_models.build("llama"), torch.float32)
    (adapter / "adapter_config.json").write_text(
        (adapter / "adapter_config.json").read_text().replace(json.dumps(str(base)), '"/nowhere/base"')
    )
    result = run("merge", adapter, tmp_path / "merged")
    assert result.exit_code == 2
    assert "/nowhere/base" in result.stderr
    assert "model_name_or_path" not in result.stderr
    wrong = run("merge", adapter, tmp_path / "merged", "--base", "nowhere/else/base")
    hint = f"relative paths start in {Path.cwd()}"
    assert (wrong.exit_code, wrong.stderr) == (2, f"error: --base: nowhere/else/base is not a folder; {hint}\n")
    assert run("merge", adapter, tmp_path / "merged", "--model", base).exit_code == 0


def test_bad_adapters(tmp_path: Path) -> None:
    base, adapter = save(tmp_path, tiny_models.build("llama"), torch.float32)
    state = load_file(adapter / "adapter_model.safetensors")
    one = next(iter(state))

    def reject(message: str, **tensors: torch.Tensor) -> None:
        save_file(tensors, adapter / "adapter_model.safetensors")
        with pytest.raises(ConfigError, match=message):
            horizon_lm.merge_adapter(adapter, tmp_path / "merged")
        assert not (tmp_path / "merged").exists()

    reject("lacks tensors", **{name: value for name, value in state.items() if name != one})
    reject("no place for", **state, **{"base_model.model.model.layers.9.mlp.up_proj.lora_A.weight": torch.zeros(4, 32)})
    reject(r"has shape \(5, 32\), and the base needs", **state | {one: torch.zeros(5, 32)})
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"has no adapter_model\.safetensors"):
        horizon_lm.merge_adapter(adapter, tmp_path / "merged")
    with pytest.raises(ConfigError, match="is not the folder of adapters"):
        horizon_lm.merge_adapter(base, tmp_path / "merged")


PEAK = """
import sys, threading, time
from pathlib import Path
import peft
from horizon_lm.tools.merge import merge_adapter

def anonymous():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["RssAnon"].split()[0])

merge_adapter(sys.argv[3], sys.argv[4])  # imports, and what the allocator keeps
peak, done = anonymous(), False
before = peak

def watch():
    global peak
    while not done:
        peak = max(peak, anonymous())
        time.sleep(0.002)

thread = threading.Thread(target=watch)
thread.start()
merge_adapter(sys.argv[1], sys.argv[2])
done = True
thread.join()
print(peak - before)
"""


def test_memory_is_that_of_one_unit(tmp_path: Path) -> None:
    """A model of sixteen blocks is merged with less than a third of it in memory."""
    config = LlamaConfig(
        hidden_size=512, intermediate_size=1408, num_hidden_layers=16, num_attention_heads=8, num_key_value_heads=8,
        vocab_size=4096,
    )  # fmt: skip
    base, adapter = save(tmp_path, LlamaForCausalLM(config), torch.float32)
    size = (base / "model.safetensors").stat().st_size
    block = 4 * (4 * 512 * 512 + 3 * 512 * 1408)
    (tmp_path / "small").mkdir()
    _, small = save(tmp_path / "small", tiny_models.build("llama"), torch.float32)
    command = [sys.executable, "-c", PEAK, adapter, tmp_path / "merged", small, tmp_path / "small" / "merged"]
    # Large tensors get mappings of their own from glibc; so shall these small ones, or its heap would be measured.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    printed = subprocess.run(list(map(str, command)), capture_output=True, check=True, text=True, env=env).stdout
    grown = int(printed.split()[-1])
    print(f"model {size:,}, block {block:,}, grown {grown:,}")
    assert grown < 3 * block + 16 * 2**20
