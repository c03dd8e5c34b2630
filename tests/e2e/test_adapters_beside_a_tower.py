"""Adapters of a type that transformers has with and without a tower are opened as the class that they were trained on."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

import horizon_lm
from horizon_lm.common.visible import visible
from horizon_lm.errors import ConfigError
from tests.census.tiny_models import build
from tests.e2e.command import run
from tests.e2e.tiny import write_jsonl
from tests.support import image_models, merged_adapters
from tests.support.peft_methods import lora

pytestmark = pytest.mark.filterwarnings("ignore")
CLASSES: dict[str, Any] = {"text": AutoModelForCausalLM, "images": AutoModelForImageTextToText}
TARGETS = {"target_modules": ["q_proj", "in_proj_qkv", "down_proj"]}
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return image_models.save_qwen3_5(tmp_path_factory.mktemp("base"))


def saved(folder: Path, base: Path, kind: str, **settings: Any) -> Path:
    """Write adapters that PEFT has added to a base, opened as one of its classes."""
    plain = CLASSES[kind].from_pretrained(base)
    merged_adapters.save_adapter(plain, base, folder, lora(**TARGETS | {"task_type": "CAUSAL_LM"} | settings)())
    return folder


def adapted(base: Path, folder: Path, kind: str) -> Any:
    """Return plain PEFT's model."""
    plain = CLASSES[kind].from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(plain, folder).eval()


@pytest.mark.parametrize("kind", CLASSES)
def test_logits_are_those_of_plain_peft(base: Path, tmp_path: Path, kind: str) -> None:
    adapter = saved(tmp_path / "adapter", base, kind)
    plain = adapted(base, adapter, kind)
    streamed = horizon_lm.from_pretrained(adapter, device="cpu", precision="float32").eval()
    ids = torch.arange(3, 31).view(2, 14)
    with torch.no_grad():
        expected = plain(input_ids=ids).logits
        assert torch.equal(streamed(input_ids=ids).logits, expected)
        with plain.disable_adapter():
            assert not torch.allclose(plain(input_ids=ids).logits, expected, atol=1e-3)
    assert any("visual" in name for name, _ in streamed.named_parameters()) == (kind == "images")


@pytest.mark.parametrize("named", [False, True])
def test_generate(base: Path, tmp_path: Path, named: bool) -> None:
    """Also with ``--base``; and a model of text has no use for an image."""
    adapter, tokenizer = saved(tmp_path / "adapter", base, "text"), AutoTokenizer.from_pretrained(base)
    options = ["--max-new-tokens", 8, "--precision", "float32", "--device", "cpu", "--base", base]
    if not named:
        tokenizer.save_pretrained(adapter)
        options = options[:-2]
    found = run("generate", adapter, "Who counts the stars?", *options)
    assert found.exit_code == 0, found.stderr
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who counts the stars?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = adapted(base, adapter, "text").generate(**prompt, max_new_tokens=8, do_sample=False)
    text = tokenizer.decode(answer[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert found.stdout.strip() == visible(text).strip()
    image_models.picture(0).save(tmp_path / "sky.png")
    rejected = run("generate", adapter, "Who?", "--image", tmp_path / "sky.png", *options)
    assert (rejected.exit_code, "reads only text" in rejected.stderr) == (2, True)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_run_goes_on_with_them(base: Path, tmp_path: Path, kind: str) -> None:
    """Its first loss is that of plain PEFT; its model and that of a checkpoint have the tensors of the adapters, and open again."""
    adapter, batches = saved(tmp_path / "adapter", base, kind), list[dict[str, Any]]()

    def watched(model: Any, batch: Any) -> Any:
        batches.append({**batch.inputs(), "labels": batch.labels})
        return model(**batches[-1]).loss

    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The keeper."}]
    given = {
        "objective": "sft", "model_name_or_path": str(base), "datasets": [str(write_jsonl(tmp_path / "rows.jsonl", [{"messages": turns}] * 4))],
        "use_peft": True, "adapter_name_or_path": str(adapter), "device": "cpu", "precision": "float32", "max_steps": 2,
        "logging_steps": 1, "save_strategy": "steps", "save_steps": 1, "learning_rate": 1e-2, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    result = horizon_lm.train(given, objective=watched, print_fn=lambda _: None)
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    loss = next(line["loss"] for line in lines if "loss" in line)
    assert loss == pytest.approx(float(adapted(base, adapter, kind)(**batches[0]).loss), rel=1e-6)
    assert run("export", tmp_path / "run" / "checkpoint-1", tmp_path / "exported").exit_code == 0
    before, ids = load_file(adapter / WEIGHTS), torch.arange(3, 31).view(2, 14)
    for folder in (result.model_dir, tmp_path / "exported"):
        after = load_file(folder / WEIGHTS)
        assert before.keys() == after.keys()
        assert any(not torch.equal(before[name], value) for name, value in after.items())
        streamed = horizon_lm.from_pretrained(folder, device="cpu", precision="float32").eval()
        with torch.no_grad():
            assert torch.equal(streamed(ids).logits, adapted(base, folder, kind)(ids).logits)


@pytest.mark.parametrize("settings", [{}, {"modules_to_save": ["lm_head"]}], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_a_merged_folder_keeps_the_tower(base: Path, tmp_path: Path, settings: dict[str, Any], tied: bool) -> None:
    """The layers of text are those of PEFT's merge, and all else has the bytes of the base."""
    if tied:
        base = image_models.save_qwen3_5(tmp_path / "tied", tied=True)
    adapter = saved(tmp_path / "adapter", base, "text", **settings)
    expected = adapted(base, adapter, "text").merge_and_unload()
    assert run("merge", adapter, tmp_path / "merged").exit_code == 0
    text, whole = (each.from_pretrained(tmp_path / "merged", dtype="auto") for each in CLASSES.values())
    merged = text.state_dict()
    assert all(torch.equal(merged[name], value) for name, value in expected.state_dict().items())
    before = AutoModelForImageTextToText.from_pretrained(base).state_dict()
    tower = {name for name in before if "visual" in name}
    assert tower
    assert all(torch.equal(whole.state_dict()[name], before[name]) for name in tower)
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["architectures"] == [type(whole).__name__]
    as_bfloat16 = run("merge", adapter, tmp_path / "bfloat16", "--dtype", "bfloat16")
    assert as_bfloat16.exit_code == 0, as_bfloat16.stderr
    assert {value.dtype for value in merged_adapters.stored(tmp_path / "bfloat16").values()} == {torch.bfloat16}


@pytest.mark.parametrize("kind", CLASSES)
def test_merged_experts_have_the_names_of_the_folder(tmp_path: Path, kind: str) -> None:
    """A checkpoint has a tensor for each expert, which the model has stacked."""
    build("qwen3_5_moe", "image_text").save_pretrained(tmp_path / "base")
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = saved(tmp_path / "adapter", tmp_path / "base", kind, target_parameters=experts)
    expected = adapted(tmp_path / "base", adapter, kind).merge_and_unload().state_dict()
    assert run("merge", adapter, tmp_path / "merged").exit_code == 0
    before, after = (merged_adapters.stored(tmp_path / name) for name in ("base", "merged"))
    assert before.keys() == after.keys()
    changed = {name for name, value in after.items() if not torch.equal(before[name], value)}
    assert any(".experts." in name for name in changed)
    merged = CLASSES[kind].from_pretrained(tmp_path / "merged", dtype="auto").state_dict()
    assert all(torch.equal(merged[name], value) for name, value in expected.items())


def test_adapters_of_no_class_name_the_class(base: Path, tmp_path: Path) -> None:
    adapter = saved(tmp_path / "adapter", base, "text")
    values = load_file(adapter / WEIGHTS)
    save_file({name.replace(".layers.0.", ".layers.7."): value for name, value in values.items()}, adapter / WEIGHTS)
    with pytest.raises(ConfigError, match=r"layers\.7.* does not belong to a Qwen3_5ForCausalLM of this base"):
        horizon_lm.from_pretrained(adapter, device="cpu")
    adapter = saved(tmp_path / "other", base, "images")
    with pytest.raises(ConfigError, match=r"language_model.* does not belong to a Qwen3_5ForCausalLM of this base"):
        horizon_lm.from_pretrained(adapter, device="cpu", model_class=AutoModelForCausalLM)
