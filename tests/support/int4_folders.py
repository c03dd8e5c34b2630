"""Folders in INT4 as compressed-tensors writes them, and their weights decoded by plain torch. None of this needs PEFT."""

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from horizon_lm.memory.codecs.int4 import Int4
from tests.support import tiny_models
from tests.support.quantized_tensors import published

GROUPS_OF_32 = Int4()
# The modules that Kimi-K2-Thinking leaves out: all but its routed experts are in bf16.
KIMI_IGNORES = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"]
SIZES = {
    "llama": {"hidden_size": 64, "intermediate_size": 96},
    "deepseek_v3": {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32,
        "n_routed_experts": 8,
    },
}  # fmt: skip


def decoded(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Decode int32 words (O, I / 8) with scales (O, groups) to (O, I), in the arithmetic of the scales' dtype."""
    codes = (packed[:, :, None] >> torch.arange(0, 32, 4)) & 15
    values = (codes - 8).to(scale.dtype).view(*scale.shape, -1)
    return (values * scale[:, :, None]).view(packed.shape[0], -1)


def quantization_config(group_size: int | None = 32, **changes: Any) -> dict[str, Any]:
    """Return the ``quantization_config`` of a folder, in which ``changes`` replace settings of the weights."""
    strategy = {"strategy": "channel"} if group_size is None else {"strategy": "group", "group_size": group_size}
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False, "actorder": None} | strategy | changes
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


def save_int4(family: str, folder: Path, codec: Int4 = GROUPS_OF_32, **config: Any) -> Path:
    """Write a tiny model in INT4, with other settings of the model than those of `SIZES`."""
    tiny_models.build(family, **SIZES[family] | config).to(torch.bfloat16).save_pretrained(folder)
    return quantize(folder, codec)


def quantize(
    folder: Path,
    codec: Int4 = GROUPS_OF_32,
    experts_only: bool = False,
    shape_dtype: torch.dtype = torch.int64,
) -> Path:
    """Quantize the linear layers of a plain folder to INT4; those whose width is not divisible stay in bf16.

    Args:
        folder: the folder, which is changed.
        codec: the format.
        experts_only: quantize the routed experts alone, as in Kimi-K2-Thinking.
        shape_dtype: dtype of the tensors with the shapes.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(folder / "model.safetensors").items():
        is_linear = weight.ndim == 2 and ".layers." in name and not name.endswith("gate.weight")
        is_quantized = is_linear and weight.shape[1] % (codec.group_size or 8) == 0
        if is_quantized and (not experts_only or ".experts." in name):
            tensors |= {name.removesuffix("weight") + part: each for part, each in published(codec, weight).items()}
            tensors[f"{name}_shape"] = torch.tensor(weight.shape, dtype=shape_dtype)
        else:
            tensors[name] = weight
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    quantization = quantization_config(codec.group_size) | ({"ignore": KIMI_IGNORES} if experts_only else {})
    change_config(folder, quantization_config=quantization)
    return folder


def change_config(folder: Path, **settings: Any) -> None:
    """Change settings in the config of a folder."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def decoded_state(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a folder, of which quantized ones are decoded by plain torch."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_packed")]:
        stem = name.removesuffix("_packed")
        weight = decoded(tensors.pop(name), tensors.pop(f"{stem}_scale"))
        assert list(weight.shape) == tensors.pop(f"{stem}_shape").tolist()
        tensors[stem] = weight
    return tensors


def plain_model(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """Return the plain model with the decoded weights of a folder."""
    with tempfile.TemporaryDirectory() as plain:
        save_file(decoded_state(folder), Path(plain) / "model.safetensors", {"format": "pt"})
        settings = json.loads((folder / "config.json").read_text())
        del settings["quantization_config"]
        (Path(plain) / "config.json").write_text(json.dumps(settings))
        return AutoModelForCausalLM.from_pretrained(plain, dtype=dtype)
