"""Runs that train adapters on a quantized base: quantized while it is read, or as it was published."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import horizon_lm
from horizon_lm.errors import ConfigError
from tests.e2e import resuming, tiny
from tests.e2e.command import run
from tests.e2e.resuming import SAVING, Runs, assert_resumes
from tests.support import int4_folders
from tests.support.quantized_folders import dequantized, opened, save_published
from tests.support.thinned_cases import thinned

pytestmark = pytest.mark.filterwarnings("ignore")
QLORA = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["q_proj", "up_proj"], "load_in_4bit": True}


@pytest.fixture(scope="module")
def base(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return resuming.settings(tmp_path_factory.mktemp("rows"), model) | QLORA


def test_a_flipped_bit_of_the_base_is_another_base(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    """A checkpoint has the hash of the codes: one bit of them suffices, and the unit is named."""
    runs.interrupt({**base, "output_dir": str(tmp_path / "run")}, stop_after=3)
    loop = runs.loops[-1]
    from horizon_lm.distributed.mesh import ALONE
    from horizon_lm.runs.checkpoints.frozen_base import hash_base, require_base
    from horizon_lm.runs.checkpoints.manifest import read_manifest

    store = loop.model.base_model.model._horizon.engine.store
    folder = max((tmp_path / "run").glob("checkpoint-*"))
    manifest = read_manifest(folder)
    require_base(folder, manifest, store, ALONE)
    store.packed(next(name for name in store.codecs if ".layers.1." in name))[7] ^= 1
    store.weights_changed()
    with pytest.raises(ConfigError, match="the weights of block1 differ"):
        require_base(folder, manifest, store, ALONE)
    assert hash_base(store, ALONE)["block0"] == manifest.base["block0"]


def test_other_formats_of_the_base_are_another_base(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    cut = {**base, **SAVING, "output_dir": str(tmp_path / "run")}
    runs.interrupt(cut, stop_after=3)
    with pytest.raises(ConfigError, match="bnb_4bit_quant_type"):
        horizon_lm.train({**cut, "bnb_4bit_quant_type": "fp4", "resume_from_checkpoint": True}, print_fn=lambda _: None)


@pytest.mark.parametrize(
    ("family", "kind"), thinned([("gpt_oss", "mxfp4"), ("llama", "fp8"), ("deepseek_v3", "int4 experts")], every=3)
)
def test_a_published_folder(base: dict[str, Any], tmp_path: Path, family: str, kind: str) -> None:
    """It needs no setting: it is planned, trained, exported, generated from and merged."""
    folder = save_published(
        family, kind, tmp_path / "published", vocab_size=len(tiny.build_tokenizer()), max_position_embeddings=128
    )
    tiny.build_tokenizer().save_pretrained(folder)
    settings = {name: value for name, value in base.items() if name != "load_in_4bit"}
    target = "q_a_proj" if family == "deepseek_v3" else "q_proj"
    settings |= {
        "model_name_or_path": str(folder),
        "output_dir": str(tmp_path / "run"),
        "lora_target_modules": [target],
    }
    planned = run("plan", "--model", folder, "--use_peft", "true", "--lora_target_modules", f"[{target}]", "--details")
    assert "quantized weights" in planned.output
    result = horizon_lm.train(settings, print_fn=lambda _: None)
    assert result.eval_loss_after < result.eval_loss_before
    plain = dequantized(folder, kind, None)
    plain = peft.PeftModel.from_pretrained(plain, result.model_dir).eval()
    ids = torch.arange(3, 30)[None]
    streamed = horizon_lm.from_pretrained(result.model_dir, "cpu", "float32").eval()
    with torch.no_grad():
        assert torch.allclose(streamed(ids).logits, plain(ids).logits, rtol=1e-5, atol=1e-6)
    assert run("merge", result.model_dir, tmp_path / "merged").exit_code == 0
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.bfloat16)
    expected = peft.PeftModel.from_pretrained(plain.unload().to(torch.bfloat16), result.model_dir).merge_and_unload()
    for name, value in expected.state_dict().items():
        assert torch.equal(merged.state_dict()[name], value), name
    outcome = run("generate", result.model_dir, "The keeper", "--device", "cpu")
    assert outcome.exit_code == 0, outcome.output


@pytest.mark.parametrize(
    ("family", "tile"),
    thinned([("deepseek_v3", 3), ("llama", None), ("deepseek_v3", None), ("deepseek_v3", 1)], every=4),
)
def test_int4_in_a_run_file(base: dict[str, Any], tmp_path: Path, family: str, tile: int | None) -> None:
    """Losses and adapters are those of the same run on the decoded weights, bit for bit."""
    folder = save_published(
        family, "int4", tmp_path / "published", vocab_size=len(tiny.build_tokenizer()), max_position_embeddings=128
    )
    plain = int4_folders.plain_model(folder, torch.bfloat16)
    plain.save_pretrained(tmp_path / "plain")
    settings = {name: value for name, value in base.items() if name != "load_in_4bit"}
    settings |= {"precision": "float32", "max_steps": 4, "logging_steps": 1, "lora_target_modules": ["o_proj"]}
    settings["expert_tile"] = tile
    results = {}
    for each in (folder, tmp_path / "plain"):
        tiny.build_tokenizer().save_pretrained(each)
        path = tmp_path / f"{each.name}.yaml"
        path.write_text(
            json.dumps(settings | {"model_name_or_path": str(each), "output_dir": str(tmp_path / f"run-{each.name}")})
        )
        outcome = run("train", path)
        assert outcome.exit_code == 0, outcome.output
        lines = (tmp_path / f"run-{each.name}" / "metrics.jsonl").read_text().splitlines()
        losses = [found["loss"] for line in lines if "loss" in (found := json.loads(line))]
        results[each.name] = losses, load_file(next((tmp_path / f"run-{each.name}").rglob("adapter_model.safetensors")))
    (losses, adapters), (expected, others) = results.values()
    assert losses == expected
    assert len(set(losses)) == 4
    assert adapters.keys() == others.keys()
    assert all(torch.equal(adapters[name], others[name]) for name in adapters)


@pytest.mark.parametrize(
    ("family", "kind"), [("llama", "fp8"), pytest.param("gpt_oss", "mxfp4", marks=pytest.mark.slow)]
)
def test_all_weights_of_a_quantized_folder(base: dict[str, Any], tmp_path: Path, family: str, kind: str) -> None:
    """They are decoded if the run asks for it: it is that of the folder which transformers decodes, and exports a plain one."""
    folder = save_published(
        family, kind, tmp_path / "published", vocab_size=len(tiny.build_tokenizer()), max_position_embeddings=128
    )
    tiny.build_tokenizer().save_pretrained(folder)
    left_out = {*QLORA, "eval_strategy", "eval_steps", "sample_prompts", "sample_steps", "sample_max_new_tokens"}
    settings = {name: value for name, value in base.items() if name not in left_out} | {
        "max_steps": 2,
        "warmup_steps": 0,
    }
    settings |= {"model_name_or_path": str(folder), "output_dir": str(tmp_path / "run")}
    with pytest.raises(ConfigError, match="are quantized, and cannot be trained; set dequantize: true"):
        horizon_lm.train(settings, print_fn=lambda _: None)
    decoded = dequantized(folder, kind, None).to(torch.bfloat16)
    plain = AutoModelForCausalLM.from_config(decoded.config)
    plain.load_state_dict(decoded.state_dict())
    plain.save_pretrained(tmp_path / "plain")
    tiny.build_tokenizer().save_pretrained(tmp_path / "plain")
    other = settings | {"model_name_or_path": str(tmp_path / "plain"), "output_dir": str(tmp_path / "other")}
    with pytest.raises(ConfigError, match="plain: its weights are not quantized"):
        horizon_lm.train(other | {"dequantize": True}, print_fn=lambda _: None)
    plans = [
        run("plan", "--model", each["model_name_or_path"], "--details", *options).output.splitlines()
        for each, options in ((settings, ("--dequantize", "true")), (other, ()))
    ]
    sizes = [
        [line for line in plan if "KiB" in line and "total" not in line] for plan in plans
    ]  # weights, gradients, moments
    assert len(sizes[0]) > 4
    assert sizes[0] == sizes[1]
    expected = horizon_lm.train(other, print_fn=lambda _: None)
    result = horizon_lm.train(settings | {"dequantize": True}, print_fn=lambda _: None)
    assert "quantization_config" not in json.loads((result.model_dir / "config.json").read_text())
    got, wanted = (load_file(each.model_dir / "model.safetensors") for each in (result, expected))
    assert got.keys() == wanted.keys()
    assert all(torch.equal(got[name], wanted[name]) for name in wanted)


@pytest.mark.slow
def test_dequantized_runs_resume(runs: Runs, base: dict[str, Any], tmp_path: Path) -> None:
    folder = save_published(
        "llama", "fp8", tmp_path / "published", vocab_size=len(tiny.build_tokenizer()), max_position_embeddings=128
    )
    tiny.build_tokenizer().save_pretrained(folder)
    settings = {name: value for name, value in base.items() if name not in QLORA}
    assert_resumes(runs, settings | {"model_name_or_path": str(folder), "dequantize": True}, tmp_path, (4,))


def test_four_bits_of_a_folder_are_planned(base: dict[str, Any]) -> None:
    options = ("plan", "--model", base["model_name_or_path"], "--use_peft", "true", "--lora_target_modules", "[q_proj]")
    assert "quantized weights" not in run(*options, "--details").output
    assert "quantized weights" in run(*options, "--load_in_4bit", "true", "--details").output


def test_exported_adapters(base: dict[str, Any], tmp_path: Path) -> None:
    """The adapters load in plain PEFT on the decoded weights, and give the same logits."""
    result = horizon_lm.train(
        {**base, "precision": "float32", "output_dir": str(tmp_path / "run")}, print_fn=lambda _: None
    )
    model = opened(Path(base["model_name_or_path"]), "4bit")
    plain = peft.PeftModel.from_pretrained(dequantized(Path(), "4bit", model), result.model_dir).eval()
    streamed = horizon_lm.from_pretrained(result.model_dir, "cpu", "float32", load_in_4bit=True).eval()
    ids = torch.arange(3, 30)[None]
    with torch.no_grad():
        assert torch.equal(streamed(ids).logits, plain(ids).logits)
    assert {tensor.dtype for tensor in load_file(result.model_dir / "adapter_model.safetensors").values()} == {
        torch.float32
    }
