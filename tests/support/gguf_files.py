"""Tiny models to be written as GGUF files, and the content of such files."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.e2e import tiny

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
PADDED = {"eos_token_id": 1, "pad_token_id": 1}
TEXT = "It's 1234567 stars:\n\n  the keeper's ünïcode <|im_start|>user\r\n\t... don't"


def save(folder: Path, model_type: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Path:
    """Write a model with random weights and a tokenizer of byte-level BPE."""
    tokenizer = tiny.build_tokenizer()
    config = AutoConfig.for_model(model_type, **SIZES | {"vocab_size": len(tokenizer) + 3} | settings)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    for param in model.parameters():
        param.data.normal_()  # also norms and biases, which begin as ones and zeros
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def metadata(file: Path) -> dict[str, Any]:
    """Return the metadata of a file."""
    import gguf

    return {name: field.contents() for name, field in gguf.GGUFReader(file).fields.items()}


def tensors(file: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file in float32, in the layout of the file."""
    import gguf

    found = {}
    for each in gguf.GGUFReader(file).tensors:
        values = gguf.dequantize(each.data, each.tensor_type).copy()
        found[each.name] = torch.from_numpy(values).view(*reversed(each.shape.tolist()))
    return found


def add_to_config(folder: Path, **keys: Any) -> None:
    """Add keys to the config of a folder, without transformers' checks."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def change(
    file: Path, keys: Mapping[str, Any] | None = None, weights: Mapping[str, torch.Tensor | None] | None = None
) -> None:
    """Write a file anew with other metadata and tensors; None removes one."""
    import gguf

    reader, keys, weights = gguf.GGUFReader(file), keys or {}, weights or {}
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    values = {name: field.contents() for name, field in fields.items()} | keys
    writer = gguf.GGUFWriter(file.with_suffix(".new"), values.pop("general.architecture"))
    for name, value in values.items():
        if isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            kept = name in fields and name not in keys
            writer.add_key_value(name, value, fields[name].types[0] if kept else gguf.GGUFValueType.get_type(value))
    for tensor in reader.tensors:
        if tensor.name not in weights:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for name, weight in weights.items():
        if weight is not None:
            writer.add_tensor(name, weight.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.with_suffix(".new").replace(file)
