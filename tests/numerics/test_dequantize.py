"""Folders of quantized weights that are decoded while they are read, so that all of their weights can be trained."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.thinned_cases import thinned

pytest.importorskip("peft", reason="needs the whole installation")

from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, FineGrainedFP8Config, Mxfp4Config

import horizon_lm
from horizon_lm.errors import ConfigError
from horizon_lm.memory.codecs.fp8 import Fp8
from tests.seams.compare import difference
from tests.support import tiny_models
from tests.support.quantized_folders import TILE, opened, save_by_bitsandbytes, save_plain, save_published
from tests.support.quantized_tensors import published as components_of

pytestmark = pytest.mark.filterwarnings("ignore")
CONFIGS = {"mxfp4": Mxfp4Config(dequantize=True), "fp8": FineGrainedFP8Config(dequantize=True)}
CASES = [("gpt_oss", "mxfp4"), ("llama", "fp8"), ("qwen3_moe", "fp8"), ("deepseek_v3", "fp8")]


def both(folder: Path, kind: str, precision: str) -> tuple[Any, Any]:
    """Return the model that transformers decodes, and ours, each opened with transformers' own setting."""
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, quantization_config=CONFIGS[kind])
    tiny_models.attending_as_streamed(plain)
    model = horizon_lm.from_pretrained(folder, "cpu", precision, head="whole", quantization_config=CONFIGS[kind])
    return plain, model


@pytest.mark.parametrize(
    ("family", "kind", "precision"),
    thinned(
        (
            (family, kind, precision)
            for (family, kind), precision in itertools.product(CASES, ("float32", "bf16", "fp32_master"))
        ),
        every=4,
    ),
)
def test_weights_are_those_that_transformers_decodes(tmp_path: Path, family: str, kind: str, precision: str) -> None:
    plain, model = both(save_published(family, kind, tmp_path / "model"), kind, precision)
    assert not model._horizon.engine.store.codecs
    assert all(param.requires_grad for param in model.parameters())
    expected = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[name].to(param.dtype)), name
    model.save_pretrained(tmp_path / "saved")
    assert "quantization_config" not in json.loads((tmp_path / "saved" / "config.json").read_text())
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype="auto")
    for name, param in again.named_parameters():
        assert torch.equal(param, expected[name].to(param.dtype)), name
        in_float32 = any(part in name for part in ("correction_bias", "mlp.gate."))  # as transformers keeps routers
        assert precision == "float32" or param.dtype == torch.bfloat16 or in_float32


@pytest.mark.parametrize(
    ("family", "kind"), [pytest.param("gpt_oss", "mxfp4", marks=pytest.mark.slow), ("qwen3_moe", "fp8")]
)
def test_gradients_and_steps_are_those_of_the_decoded_model(tmp_path: Path, family: str, kind: str) -> None:
    plain, model = both(save_published(family, kind, tmp_path / "model"), kind, "float32")
    plain.float()  # what is not quantized stays in bf16 in transformers
    optimizers = (torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True), horizon_lm.AdamW(model, lr=1e-3))
    for step in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            optimizer.zero_grad()
            each.train()(**tiny_models.batch(seed=step)).loss.backward()
        grads = [{name: param.grad for name, param in each.named_parameters()} for each in (plain, model)]
        assert difference(*grads, 0.0) is None
        for optimizer in optimizers:
            optimizer.step()
    horizon_lm.synchronize(model)
    weights = [dict(each.named_parameters()) for each in (plain, model)]
    assert difference(*weights, 1e-6) is None


def test_four_bits_of_bitsandbytes(tmp_path: Path) -> None:
    save_plain("qwen2", tmp_path / "model")
    folder = save_by_bitsandbytes(tmp_path / "model", nested=True)
    quantized = opened(folder, "nested")
    model = horizon_lm.from_pretrained(folder, "cpu", "bf16", quantization_config={"dequantize": True})
    assert not model._horizon.engine.store.codecs
    for name, param in quantized.named_parameters():
        value = param.decode() if hasattr(param, "decode") else param
        assert torch.equal(model.get_parameter(name), value.to(torch.bfloat16)), name


def test_a_quantized_head_is_decoded(tmp_path: Path) -> None:
    """Decoding on the device is for weights of blocks; decoding while reading is for all of them."""
    folder = save_published("llama", "fp8", tmp_path / "model", tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    parts = components_of(Fp8(TILE), tensors["lm_head.weight"])
    tensors |= {"lm_head.weight": parts["weight"], "lm_head.weight_scale_inv": parts["weight_scale_inv"]}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"lm_head\.weight is quantized, but only the weights of blocks"):
        opened(folder, "fp8")
    scales = parts["weight_scale_inv"].repeat_interleave(16, 0).repeat_interleave(16, 1)
    decoded = parts["weight"].float() * scales[: len(parts["weight"])]
    model = horizon_lm.from_pretrained(folder, "cpu", "float32", quantization_config=CONFIGS["fp8"])
    assert torch.equal(model.lm_head.weight, decoded)


def test_transposed_layers_are_rejected(tmp_path: Path) -> None:
    save_plain("gpt2", tmp_path / "model")
    folder = save_by_bitsandbytes(tmp_path / "model", nested=False)
    with pytest.raises(ConfigError, match="transpose"):
        horizon_lm.from_pretrained(folder, "cpu", "float32", quantization_config={"dequantize": True})


def test_another_format_and_plain_folders_are_rejected(tmp_path: Path) -> None:
    save_plain("llama", tmp_path / "plain")
    with pytest.raises(ConfigError, match="plain: its weights are not quantized; leave dequantize out"):
        horizon_lm.from_pretrained(tmp_path / "plain", "cpu", quantization_config={"dequantize": True})
    folder = save_published("llama", "fp8", tmp_path / "model")
    with pytest.raises(
        ConfigError, match="its weights are quantized by fp8, which the given quantization_config is not"
    ):
        horizon_lm.from_pretrained(folder, "cpu", quantization_config=CONFIGS["mxfp4"])
    for other in (Mxfp4Config(), BitsAndBytesConfig(load_in_8bit=True)):
        with pytest.raises(ConfigError, match="quantization_config: use BitsAndBytesConfig"):
            horizon_lm.from_pretrained(folder, "cpu", quantization_config=other)
