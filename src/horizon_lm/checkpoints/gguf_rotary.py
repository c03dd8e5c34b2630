"""Scaled rotary embeddings in a GGUF file: metadata, or a factor for each frequency (Llama 3.1 to 3.3)."""

from collections.abc import Mapping
from typing import Any

import torch

FACTORS = "rope_freqs.weight"
# Settings that the file has, by type: those of llama3 are in the factors.
_WRITTEN = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings"},
}
_ASSUMED = {"beta_fast": 32, "beta_slow": 1, "truncate": True}  # llama.cpp has no other ramp for yarn


def parameters_of(config: Any) -> Mapping[str, Any]:
    """Return the rotary parameters of a model, those of the layers with full attention if there are several."""
    found: Mapping[str, Any] = config.rope_parameters
    return found.get("full_attention", found)


def scaling_metadata(config: Any) -> dict[str, Any]:
    """Return the metadata of a linear or a yarn scaling, by names without that of the architecture."""
    parameters = parameters_of(config)
    kind, factor = parameters["rope_type"], parameters.get("factor")
    if kind not in ("linear", "yarn") or factor is None:
        return {}
    found = {"rope.scaling.type": kind, "rope.scaling.factor": float(factor)}
    if kind == "yarn":
        found["rope.scaling.original_context_length"] = int(parameters["original_max_position_embeddings"])
    return found


def frequency_factors(config: Any) -> torch.Tensor | None:
    """Return the factors by which a Llama 3.1 divides its frequencies, shape (D / 2,) in float32; None for other models."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = parameters_of(config)
    if parameters["rope_type"] != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    dim = 2 * len(scaled)
    plain = 1.0 / parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
    return plain / scaled


def without_scaling(parameters: Mapping[str, Any], types: frozenset[str]) -> dict[str, Any]:
    """Return rotary parameters without a scaling of these types, of which the file has all settings."""
    full = parameters.get("full_attention")
    if full is not None:
        return {**parameters, "full_attention": without_scaling(full, types)}
    if parameters["rope_type"] not in types or parameters.get("factor") is None:
        return dict(parameters)
    written = _WRITTEN[parameters["rope_type"]]
    kept = {
        key: value
        for key, value in parameters.items()
        if key not in written and value is not None and value != _ASSUMED.get(key)
    }
    return kept | {"rope_type": "default"}
