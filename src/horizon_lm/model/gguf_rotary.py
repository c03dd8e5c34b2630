"""Rotary embeddings in a GGUF file: metadata, or a factor for each frequency (Llama 3.1 to 3.3, Phi-3 and 4)."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from horizon_lm.common.gguf_header import GgufHeader
from horizon_lm.errors import ConfigError
from horizon_lm.model.gguf_keys import Keys, rejected
from horizon_lm.model.llama3_scaling import scaling_of

FREQUENCIES = "rope_freqs.weight"
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
FACTORS = frozenset({FREQUENCIES, _LONG, _SHORT})
_PRECISION = 1e-6  # of factors, which are computed in float32
# llama.cpp takes these for scaling of type yarn, whatever a file says.
_YARN = {"yarn_ext_factor": 1.0, "yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0}


def parameters_of(config: Any) -> Mapping[str, Any]:
    """Return the rotary parameters of a model, those of the layers with full attention if there are several."""
    found: Mapping[str, Any] = config.rope_parameters
    return found.get("full_attention", found)


# To a file


def scaling_metadata(config: Any) -> dict[str, Any]:
    """Return the metadata of a model's scaling, by names without the architecture's name before them."""
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
        found["rope.scaling.attn_factor"] = float(frequencies(config)[1])
    return found


def frequency_factors(config: Any) -> dict[str, torch.Tensor]:
    """Return the tensors by whose factors frequencies are divided, shape (D / 2,) in float32, by their names in a file.

    A Llama 3.1 has one tensor. A Phi-3 for long contexts has two: one for contexts up to that of its pre-training, and one for longer
    contexts. Other models have none.
    """
    parameters = parameters_of(config)
    if parameters["rope_type"] == "longrope":
        return {
            name: torch.tensor(parameters[key], dtype=torch.float32)
            for name, key in ((_LONG, "long_factor"), (_SHORT, "short_factor"))
        }
    if parameters["rope_type"] == "llama3":
        scaled, _ = frequencies(config)
        return {FREQUENCIES: plain_frequencies(parameters["rope_theta"], 2 * len(scaled)) / scaled}
    return {}


def plain_frequencies(theta: float, dim: int) -> torch.Tensor:
    """Return the frequencies without scaling of ``dim`` rotated elements of a head, shape (dim / 2,)."""
    return 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim)


def frequencies(config: Any, num_tokens: int | None = None) -> tuple[torch.Tensor, float]:
    """Return the frequencies that transformers computes with, shape (D / 2,), and its factor of queries and keys.

    Args:
        config: config of the model.
        num_tokens: length of the text, on which the frequencies depend in some scalings; None as when transformers builds a model.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = parameters_of(config)
    if parameters["rope_type"] == "default":
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        dim = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        return plain_frequencies(parameters["rope_theta"], dim), 1.0
    layer_type = "full_attention" if "full_attention" in config.rope_parameters else None
    found: tuple[torch.Tensor, float] = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](
        config, torch.device("cpu"), num_tokens, layer_type=layer_type
    )
    return found


# From a file


def read_rotary(
    keys: Keys, header: GgufHeader, head_dim: int, max_position_embeddings: int, partial: bool, factors: frozenset[str]
) -> dict[str, Any]:
    """Return the rotary parameters of a file, as llama.cpp computes with them.

    Args:
        keys: the metadata of the file's architecture.
        header: the file.
        head_dim: elements of a head.
        max_position_embeddings: the length of context that the file names for the model.
        partial: transformers can rotate a part of each head in models of this type.
        factors: the tensors of factors that llama.cpp reads for this architecture.

    Raises:
        ConfigError: transformers has no parameters with this effect.
    """
    dim = keys.take("rope.dimension_count", head_dim)
    if dim != head_dim and not partial:
        raise keys.rejected("rope.dimension_count")
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": float(keys.take("rope.freq_base", 10_000.0))}
    if partial:
        found["partial_rotary_factor"] = dim / head_dim
    kind = keys.take("rope.scaling.type", "linear")
    stated = keys.take("rope.scaling.factor", keys.take("rope.scale_linear")) or 1.0
    factor = 1.0 if kind == "none" else stated
    original = keys.take("rope.scaling.original_context_length", max_position_embeddings)
    attention_factor = keys.take("rope.scaling.attn_factor", 1.0)
    _require_yarn(keys, kind, factor)
    if present := FACTORS & header.tensors.keys():  # a factor of each frequency, in place of a scaling of all
        if other := present - factors:
            name = min(other)
            raise rejected(header.path, f"tensor {name}", header.floats(name))
        if factor != 1.0:
            raise keys.rejected("rope.scaling.factor")
        if FREQUENCIES not in header.tensors:
            return found | _read_longrope(header, original, attention_factor)
        found |= _read_llama3(header, found["rope_theta"], dim)
    elif kind == "yarn":
        found |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        if attention_factor != 1.0:
            return found | {"attention_factor": _yarn_scale(factor) * attention_factor}
    elif kind in ("linear", "longrope", "none"):
        found |= {"rope_type": "linear", "factor": factor} if factor != 1.0 else {}
    else:
        raise keys.rejected("rope.scaling.type")
    if attention_factor != 1.0:
        raise keys.rejected("rope.scaling.attn_factor")
    return found


def _require_yarn(keys: Keys, kind: str, factor: float) -> None:
    """Raise ConfigError if a setting of yarn differs from the one that llama.cpp computes with, whatever a file says."""
    expected = {**_YARN, "yarn_attn_factor": _yarn_scale(factor)}
    for name, value in expected.items():
        found = keys.take(f"rope.scaling.{name}", value)
        if kind == "yarn" and not math.isclose(found, value, rel_tol=_PRECISION):
            raise keys.rejected(f"rope.scaling.{name}")


def _yarn_scale(factor: float) -> float:
    """Return the factor of queries and keys in yarn."""
    return 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0


def _read_longrope(header: GgufHeader, original: int, attention_factor: float) -> dict[str, Any]:
    """Return the scaling of a Phi-3 for long contexts; ``original`` is the context of its pre-training."""
    if missing := {_LONG, _SHORT} - header.tensors.keys():
        raise ConfigError(f"gguf_file: {header.path} has no tensor {missing.pop()}; make the file again")
    return {
        "rope_type": "longrope",
        "long_factor": header.floats(_LONG),
        "short_factor": header.floats(_SHORT),
        "original_max_position_embeddings": original,
        "attention_factor": float(attention_factor),
    }


def _read_llama3(header: GgufHeader, theta: float, dim: int) -> dict[str, Any]:
    """Return the scaling from which the factors in the tensor ``rope_freqs.weight`` follow."""
    factors = header.floats(FREQUENCIES)
    found = scaling_of(factors, [theta ** (-index / dim) for index in range(0, dim, 2)])
    if found is None:
        raise rejected(header.path, f"tensor {FREQUENCIES}", factors)
    return found
