"""Check that a GGUF file will be read as the model that is written to it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from horizon_lm.checkpoints.gguf_architectures import NUMBERS, Architecture
from horizon_lm.checkpoints.gguf_rotary import parameters_of, without_scaling
from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model import hf_config

_WITHOUT_EFFECT = {  # on what a trained model computes; tokens are in the tokenizer's part of the file
    "attention_dropout", "bos_token_id", "eos_token_id", "initializer_range", "max_window_layers",
    "output_router_logits", "pad_token_id", "pretraining_tp", "router_aux_loss_coef", "router_jitter_noise",
    "tie_word_embeddings", "use_cache",
}  # fmt: skip
# Read by the models' code and by that of masks, also where the type of config does not have them.
_READ_IF_PRESENT = {"attention_chunk_size", "head_dim", "is_causal", "layer_types", "sliding_window"}


def require_kept(architecture: Architecture, config: Any, header: Path, source: Path) -> list[str]:
    """Compare a config with what is read from a file, and return notes on what only llama.cpp reads.

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
    read: dict[str, Any] = {}
    if architecture.in_transformers:
        read = hf_config.read_config(header.parent, trust_remote_code=False, gguf_file=header.name).to_dict()
    assumed = architecture.assumed(config)
    by_llama_cpp = {**read, **_unread(architecture, config, own, read), **assumed}
    _align(config, own, by_llama_cpp)
    keys = sorted(computed_from(config))
    for key in sorted({*keys, *assumed}):
        if not _equal(own.get(key), by_llama_cpp.get(key)):
            raise ModelNotSupportedError(
                f"{source}: {key}: {getattr(config, key, None)} cannot be written as GGUF; "
                f"it would be read as {by_llama_cpp.get(key)}{_remedy(config, key) if key in assumed else ''}"
            )
    differing = [key for key in keys if key in read and key != "model_type" and not _equal(own.get(key), read[key])]
    return [
        *(
            f"{key}: llama.cpp computes with {own.get(key)}, but transformers' reader takes {read[key]}"
            for key in differing
        ),
        *_notes_on_reader(architecture, config),
    ]


def _notes_on_reader(architecture: Architecture, config: Any) -> list[str]:
    """Return notes on the type and the rotary scaling of a model, as far as only llama.cpp reads them."""
    notes, scaling = list[str](), parameters_of(config)["rope_type"]
    if not architecture.in_transformers:
        notes.append(
            f"llama.cpp reads the file, but transformers' reader does not know models of type {config.model_type}"
        )
    elif scaling != "default":
        notes.append(
            f"llama.cpp reads the rotary scaling ({scaling}) from the file, but transformers' reader ignores it"
        )
    if scaling == "longrope":
        original = parameters_of(config)["original_max_position_embeddings"]
        notes.append(
            f"llama.cpp takes the factors for long texts if its context is larger than {original}, however long the text is"
        )
    return notes


def _remedy(config: Any, key: str) -> str:
    """Return what a user may change to write a config in which this key is not kept; empty if there is nothing."""
    if key != "sliding_window" or config.sliding_window is None:
        return ""
    return f"; set max_position_embeddings to {config.sliding_window} in its config.json, for contexts in which both compute the same"


def _unread(architecture: Architecture, config: Any, own: Mapping[str, Any], read: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings that a file has, but transformers' reader does not read: all of them if it knows no such files."""
    if not architecture.in_transformers:
        keys = ("head_dim", "model_type", *NUMBERS, *architecture.numbers)
        rotary = {"rope_type": "default", "rope_theta": parameters_of(config)["rope_theta"]}
        return {**{key: own.get(key) for key in keys}, "rope_parameters": rotary}
    unread = {key: own[key] for key in architecture.unread}
    if architecture.partial_rotary:
        part = own["rope_parameters"].get("partial_rotary_factor")
        unread["rope_parameters"] = {**read["rope_parameters"], "partial_rotary_factor": part}
    return unread


def _align(config: Any, own: dict[str, Any], found: Mapping[str, Any]) -> None:
    """Replace settings in ``own`` by those that are found in a file, where both mean the same."""
    if own.get("head_dim") is None and found.get("head_dim") == config.hidden_size // config.num_attention_heads:
        own["head_dim"] = found["head_dim"]
    window = own.get("sliding_window")
    if window is not None and found.get("sliding_window") is None and window >= config.max_position_embeddings:
        own["sliding_window"] = None  # the window covers the whole context


def computed_from(config: Any) -> set[str]:
    """Return the keys of a config that decide what the model computes.

    Keys that all types of configs have are left out: they say where a model comes from and how it is called.
    """
    from transformers import PreTrainedConfig

    own = type(config)().to_dict().keys() - PreTrainedConfig().to_dict().keys()
    return (own | _READ_IF_PRESENT | {"model_type"}) - _WITHOUT_EFFECT


def _equal(one: Any, other: Any) -> bool:
    """Return whether two settings are equal in the precision of a GGUF file."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)  # the file has 32 bits
    return bool(one == other)
