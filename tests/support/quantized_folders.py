"""Folders of quantized weights as they are published, adapters for them, and the plain models that their libraries decode."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import horizon_lm
from horizon_lm.memory.codecs.fp8 import Fp8
from horizon_lm.memory.codecs.mxfp4 import Mxfp4
from tests.support import int4_folders, tiny_models
from tests.support.quantized_tensors import published as components_of

SIZES = {"hidden_size": 64, "intermediate_size": 96}
TILE = (16, 16)


def save_plain(family: str, folder: Path, **config: Any) -> None:
    sizes = {"n_embd": 64, "n_inner": 96} if family == "gpt2" else SIZES
    if family in ("qwen3_moe", "deepseek_v3"):
        sizes = sizes | {"moe_intermediate_size": 32}
    if family == "deepseek_v3":  # transformers' decoder takes a last row of smaller tiles for one of equal tiles
        sizes = sizes | {"qk_rope_head_dim": 16}
    tiny_models.build(family, **sizes | config).to(torch.bfloat16).save_pretrained(folder)


def save_published(family: str, kind: str, folder: Path, **config: Any) -> Path:
    """Write a folder of quantized weights in the layout of its publishers; a plain one for ``4bit``."""
    save_plain(family, folder, **config)
    if kind == "4bit":
        return folder
    if kind in ("nf4", "nested"):
        return save_by_bitsandbytes(folder, kind == "nested")
    if kind in ("int4", "int4 experts"):
        return int4_folders.quantize(folder, experts_only=kind == "int4 experts")
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        if kind == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            tensors |= {f"{name}_{part}": each for part, each in components_of(Mxfp4(), weight).items()}
        elif kind == "fp8" and weight.ndim == 2 and ".layers." in name and not name.endswith("gate.weight"):
            parts = components_of(Fp8(TILE), weight)
            tensors |= {name: parts["weight"], f"{name}_scale_inv": parts["weight_scale_inv"]}
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    settings = json.loads((folder / "config.json").read_text())
    settings["quantization_config"] = {
        "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router"]},
        "fp8": {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": list(TILE)},
    }[kind]  # fmt: skip
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


def save_by_bitsandbytes(folder: Path, nested: bool) -> Path:
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=nested)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=config)
    model.save_pretrained(folder.with_name("quantized"))
    return folder.with_name("quantized")


def dequantized(folder: Path, kind: str, streamed: Any) -> Any:
    """Return the plain model with the weights that transformers decodes; for bitsandbytes, those of its own decoder, and for INT4, those
    of plain torch.
    """
    if kind in ("int4", "int4 experts"):
        return tiny_models.attending_as_streamed(int4_folders.plain_model(folder))
    if kind in ("mxfp4", "fp8"):
        plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float()
        return tiny_models.attending_as_streamed(plain)
    config = streamed.config
    plain = AutoModelForCausalLM.from_config(config).float()
    state = {} if kind == "4bit" else load_file(folder / "model.safetensors")
    for name, param in streamed.named_parameters():
        param_of = plain.get_parameter(name).data
        if kind != "4bit" and f"{name}.absmax" in state:
            param_of.copy_(by_bitsandbytes(state, name, param.shape))
        else:
            param_of.copy_(param.decode() if hasattr(param, "decode") else param)
    return plain


def by_bitsandbytes(state: dict[str, torch.Tensor], name: str, shape: torch.Size) -> torch.Tensor:
    from bitsandbytes.functional import QuantState, dequantize_4bit

    parts = {key: value for key, value in state.items() if key.startswith(f"{name}.")}
    flat = QuantState.from_dict(parts, device=torch.device("cpu"))
    flat.shape = torch.Size((1, shape.numel()))  # its decoder for AVX-512 is wrong for some numbers of columns
    return dequantize_4bit(state[name], flat).view(shape)


def opened(folder: Path, kind: str, **options: Any) -> Any:
    options |= {"load_in_4bit": True} if kind == "4bit" else {}
    return horizon_lm.from_pretrained(folder, "cpu", "float32", **options)


def adapters(kind: str = "lora", **changes: Any) -> dict[str, Any]:
    kinds: dict[str, dict[str, Any]] = {
        "lora": {}, "dora": {"use_dora": True}, "mixed": {"rank_pattern": {r"layers\.0\..*": 2}}
    }  # fmt: skip
    return {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"} | kinds[kind] | changes


def adapter_folder(folder: Path, tmp_path: Path, **config: Any) -> Path:
    """Write adapters that are not zero for the model in a folder."""
    from transformers import AutoConfig

    config_of_model = AutoConfig.from_pretrained(folder)
    if hasattr(config_of_model, "quantization_config"):
        del config_of_model.quantization_config
    torch.manual_seed(1)
    model = get_peft_model(AutoModelForCausalLM.from_config(config_of_model), LoraConfig(**adapters(**config)))
    for name, param in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(param, std=0.02)
    model.peft_config["default"].base_model_name_or_path = str(folder)
    model.save_pretrained(tmp_path / "adapters")
    return tmp_path / "adapters"
