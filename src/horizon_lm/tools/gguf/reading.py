"""Check that a GGUF file will be read as the model that is written to it."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from horizon_lm.errors import ModelNotSupportedError
from horizon_lm.model import hf_config
from horizon_lm.model.gguf_architectures import Architecture
from horizon_lm.model.gguf_rotary import frequencies, parameters_of

_WITHOUT_EFFECT = {  # on what a trained model computes; tokens are in the tokenizer's part of the file
    "attention_dropout", "bos_token_id", "eos_token_id", "initializer_range", "max_window_layers",
    "output_router_logits", "pad_token_id", "pretraining_tp", "router_aux_loss_coef", "router_jitter_noise",
    "tie_word_embeddings", "use_cache",
}  # fmt: skip
# Read by the code of models and of masks, even if the type of config does not have them.
_READ_IF_PRESENT = {"attention_chunk_size", "head_dim", "is_causal", "layer_types", "sliding_window"}
_ROTARY = "rope_parameters"
# Scalings of rotary frequencies that depend on nothing but the length of a text.
_SCALINGS = {"default", "linear", "llama3", "longrope", "yarn"}


def require_kept(architecture: Architecture, config: Any, header: Path, source: Path) -> list[str]:
    """Compare a config with the one that is read from a file. Return notes on settings that transformers' own reader does not read.

    Args:
        architecture: the architecture of the model.
        config: its config.
        header: a GGUF file with the model's metadata and the factors of its rotary frequencies; it needs no other tensors.
        source: the folder of the model, for the message.

    Raises:
        ModelNotSupportedError: another config would be read.
    """
    read_config = hf_config.read_config(header.parent, trust_remote_code=False, gguf_file=header.name)
    assumed, own = architecture.assumed(config), _settings(config)
    read = {**_settings(read_config), **assumed}
    _align_equivalent(config, own, read)
    for key in sorted({*deciding_keys(config), *assumed}):
        same = _same_rotary(config, read_config) if key == _ROTARY else _equal(own.get(key), read.get(key))
        if not same:
            raise ModelNotSupportedError(
                f"{source}: {key}: {getattr(config, key, None)} cannot be written as GGUF; "
                f"it would be read as {read.get(key)}{_remedy(config, key) if key in assumed else ''}"
            )
    return [*_notes_on_reader(architecture, config, own, header), *_notes_on_llama_cpp(config)]


def _settings(config: Any) -> dict[str, Any]:
    """Return the settings that a model computes with. Some, such as Gemma 3's windows, have other values in the saved config."""
    return {key: getattr(config, key, value) for key, value in config.to_dict().items()}


def _notes_on_reader(architecture: Architecture, config: Any, own: Mapping[str, Any], header: Path) -> list[str]:
    """Return notes on settings of a model that transformers' own reader reads differently, or not at all."""
    from transformers import AutoConfig

    if not architecture.in_transformers:
        return [
            f"Horizon-LM and llama.cpp read the file, but transformers' reader does not know models of type {config.model_type}"
        ]
    by_transformers = AutoConfig.from_pretrained(header.parent, gguf_file=header.name)
    read, notes = _settings(by_transformers), list[str]()
    own = dict(own)
    _align_equivalent(config, own, read)
    for key in sorted(deciding_keys(config) & read.keys() - {"model_type"}):
        same = _same_rotary(config, by_transformers) if key == _ROTARY else _equal(own.get(key), read[key])
        scaling = parameters_of(config)["rope_type"]
        if not same and key == _ROTARY and scaling != parameters_of(by_transformers)["rope_type"]:
            notes.append(
                f"Horizon-LM and llama.cpp read the rotary scaling ({scaling}) from the file, but transformers' reader ignores it"
            )
        elif not same:
            notes.append(
                f"{key}: Horizon-LM and llama.cpp compute with {own.get(key)}, but transformers' reader takes {read[key]}"
            )
    return notes


def _notes_on_llama_cpp(config: Any) -> list[str]:
    """Return notes on what llama.cpp does differently."""
    if parameters_of(config)["rope_type"] != "longrope":
        return []
    original = parameters_of(config)["original_max_position_embeddings"]
    return [
        f"llama.cpp takes the factors for long texts if its context is larger than {original}, however long the text is"
    ]


def _remedy(config: Any, key: str) -> str:
    """Return the end of a message with the change of ``config.json`` that lets a config be written without this key; empty if there is none."""
    if key != "sliding_window" or config.sliding_window is None:
        return ""
    return f"; set max_position_embeddings to {config.sliding_window} in its config.json, for contexts in which both compute the same"


def _align_equivalent(config: Any, own: dict[str, Any], read: dict[str, Any]) -> None:
    """Make settings equal, in ``own`` or in ``read``, that differ but mean the same: a head width that follows from others, and a window
    that covers the whole context.
    """
    if own.get("head_dim") is None and read.get("head_dim") == config.hidden_size // config.num_attention_heads:
        own["head_dim"] = read["head_dim"]
    for settings, other in ((own, read), (read, own)):
        window = settings.get("sliding_window")
        if window is not None and other.get("sliding_window") is None and window >= config.max_position_embeddings:
            settings["sliding_window"] = None  # the window covers the whole context


def _same_rotary(config: Any, read_config: Any) -> bool:
    """Return whether two configs have the same rotary frequencies, for short and for long texts, in all types of layers."""
    if parameters_of(config)["rope_type"] not in _SCALINGS:
        return False
    if not _equal(
        config.rope_parameters.get("sliding_attention"), read_config.rope_parameters.get("sliding_attention")
    ):
        return False
    for num_tokens in (1, config.max_position_embeddings):
        (one, scale), (other, other_scale) = frequencies(config, num_tokens), frequencies(read_config, num_tokens)
        if (
            one.shape != other.shape
            or not torch.allclose(one, other, rtol=1e-6, atol=0.0)
            or not _equal(scale, other_scale)
        ):
            return False
    return True


def deciding_keys(config: Any) -> set[str]:
    """Return the keys of a config that decide what the model computes.

    Keys that all types of configs have are left out: they say where a model comes from and how it is called.
    """
    from transformers import PreTrainedConfig

    own = type(config)().to_dict().keys() - PreTrainedConfig().to_dict().keys()
    settings = {key for key in own if not key.startswith("_")}  # a key with an underscore only makes other settings
    return (settings | _READ_IF_PRESENT | {"model_type"}) - _WITHOUT_EFFECT


def _equal(one: Any, other: Any) -> bool:
    """Return whether two settings are equal in the precision of a GGUF file."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)  # the file has 32 bits
    return bool(one == other)
