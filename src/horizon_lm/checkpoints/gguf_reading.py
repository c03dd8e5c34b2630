"""Check that a GGUF file will be read as the model that is written to it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horizon_lm.checkpoints.gguf_architectures import Architecture
from horizon_lm.checkpoints.gguf_rotary import parameters_of, without_scaling
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model import hf_config

_WITHOUT_EFFECT = {  # on what a trained model computes; tokens are in the tokenizer's part of the file
    "attention_dropout", "bos_token_id", "eos_token_id", "initializer_range", "max_window_layers", "pad_token_id",
    "pretraining_tp", "tie_word_embeddings", "use_cache",
}  # fmt: skip
# Read by the models' code and by that of masks, also where the type of config does not have them.
_READ_IF_PRESENT = {"attention_chunk_size", "head_dim", "is_causal", "layer_types", "sliding_window"}


def require_kept(architecture: Architecture, config: Any, header: Path, source: Path) -> list[str]:
    """Compare a config with what transformers reads from a file, and return notes on what only llama.cpp reads.

    Args:
        architecture: that of the model.
        config: that of the model.
        header: a GGUF file with the model's metadata, which needs no tensors.
        source: the folder of the model, for the message.

    Raises:
        ModelNotSupportedError: another config would be read.
    """
    own = config.to_dict()
    own["rope_parameters"] = without_scaling(own["rope_parameters"], architecture.scalings)
    read = hf_config.read_config(header.parent, trust_remote_code=False, gguf_file=header.name).to_dict()
    for key in sorted(computed_from(config)):
        if not _equal(own.get(key), read.get(key)):
            raise ModelNotSupportedError(
                f"{source}: {key}: {getattr(config, key, None)} cannot be written as GGUF; "
                f"it would be read as {read.get(key)}"
            )
    scaling = parameters_of(config)["rope_type"]
    if scaling == "default":
        return []
    return [f"llama.cpp reads the rotary scaling ({scaling}) from the file, but transformers' reader ignores it"]


def computed_from(config: Any) -> set[str]:
    """Return the keys of a config that decide what the model computes.

    The keys that all types have say where a model comes from and how it is called, and code reads no others than these.
    """
    from transformers import PreTrainedConfig

    own = type(config)().to_dict().keys() - PreTrainedConfig().to_dict().keys()
    return (own | _READ_IF_PRESENT | {"model_type"}) - _WITHOUT_EFFECT


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)  # GGUF has 32 bits
    return bool(one == other)
