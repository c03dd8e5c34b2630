"""Scaled rotary embeddings in a GGUF file: metadata, or a factor for each frequency (Llama 3.1 to 3.3, Phi-3 and 4)."""

from collections.abc import Mapping
from typing import Any

import torch

# Settings that the file has, by type: as metadata, or in factors of frequencies.
_WRITTEN = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "longrope": {"long_factor", "short_factor", "original_max_position_embeddings"},
    "yarn": {"factor", "original_max_position_embeddings"},
}
_ASSUMED = {"beta_fast": 32, "beta_slow": 1, "truncate": True}  # llama.cpp has no other ramp for yarn
_IN_ONE_FACTOR = {"attention_factor", "factor"}  # of longrope: the file has what transformers computes from them


def parameters_of(config: Any) -> Mapping[str, Any]:
    """Return the rotary parameters of a model, those of the layers with full attention if there are several."""
    found: Mapping[str, Any] = config.rope_parameters
    return found.get("full_attention", found)


def scaling_metadata(config: Any) -> dict[str, Any]:
    """Return the metadata of a model's scaling, by names without that of the architecture."""
    parameters = parameters_of(config)
    kind, factor, original = (
        parameters.get(key) for key in ("rope_type", "factor", "original_max_position_embeddings")
    )
    found: dict[str, Any] = {}
    if kind in ("linear", "yarn") and factor is not None:
        found |= {"rope.scaling.type": kind, "rope.scaling.factor": float(factor)}
    if kind in ("longrope", "yarn") and original is not None:
        found["rope.scaling.original_context_length"] = int(original)
    if kind == "longrope":
        found["rope.scaling.attn_factor"] = float(_computed(config)[1])
    return found


def frequency_factors(config: Any) -> dict[str, torch.Tensor]:
    """Return the tensors of factors by which frequencies are divided, shape (D / 2,) in float32.

    A Llama 3.1 has one, and a Phi-3 for long contexts one for contexts up to that of its pre-training and one for longer ones.
    """
    parameters = parameters_of(config)
    if parameters["rope_type"] == "longrope":
        return {
            f"rope_factors_{name}.weight": torch.tensor(parameters[f"{name}_factor"], dtype=torch.float32)
            for name in ("long", "short")
        }
    if parameters["rope_type"] == "llama3":
        scaled, _ = _computed(config)
        dim = 2 * len(scaled)
        plain = 1.0 / parameters["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)
        return {"rope_freqs.weight": plain / scaled}
    return {}


def without_scaling(parameters: Mapping[str, Any], types: frozenset[str]) -> dict[str, Any]:
    """Return rotary parameters without what a file has of their scaling.

    A scaling of no type in ``types``, or without a setting that is written, stays as it is. Settings that neither the file has nor
    llama.cpp assumes stay, too.
    """
    full = parameters.get("full_attention")
    if full is not None:
        return {**parameters, "full_attention": without_scaling(full, types)}
    kind = parameters["rope_type"]
    found = {key: value for key, value in parameters.items() if key != "type"}  # an old name of rope_type
    if kind not in types or any(found.get(key) is None for key in _WRITTEN[kind]):
        return found
    written = _WRITTEN[kind] | (_IN_ONE_FACTOR if kind == "longrope" else set())
    kept = {
        key: value
        for key, value in found.items()
        if key not in written and value is not None and value != _ASSUMED.get(key)
    }
    return kept | {"rope_type": "default"}


def _computed(config: Any) -> tuple[torch.Tensor, float]:
    """Return the scaled frequencies of transformers, shape (D / 2,), and its factor of queries and keys."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[parameters_of(config)["rope_type"]](
        config, torch.device("cpu")
    )
    return found
