"""Architectures of GGUF: their names, metadata and tensor layouts, by the model type of transformers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from horizon_lm.checkpoints.gguf_rotary import parameters_of, scaling_metadata

Layout = Callable[[torch.Tensor], torch.Tensor]

_NUMBERS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "max_position_embeddings": "context_length",
    "num_attention_heads": "attention.head_count",
    "num_hidden_layers": "block_count",
    "num_key_value_heads": "attention.head_count_kv",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "vocab_size": "vocab_size",
}


def _unchanged(config: Any) -> Mapping[str, Layout]:
    return {}


@dataclass(frozen=True)
class Architecture:
    """An architecture of GGUF.

    Attributes:
        name: its name in a file.
        numbers: keys of a config and their names in the metadata, beside those that all architectures have.
        layouts: function that returns the layouts of a config's tensors, by their name in a block, such as ``attn_q``.
        scalings: types of scaled rotary embeddings that llama.cpp computes from what the file has.
    """

    name: str
    numbers: Mapping[str, str] = field(default_factory=dict)
    layouts: Callable[[Any], Mapping[str, Layout]] = _unchanged
    scalings: frozenset[str] = frozenset({"linear", "yarn"})

    def metadata(self, config: Any) -> dict[str, Any]:
        """Return the metadata of a model, by names without that of the architecture."""
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return {
            **{name: getattr(config, key) for key, name in {**_NUMBERS, **self.numbers}.items()},
            "attention.key_length": head_dim,
            "attention.value_length": head_dim,
            "rope.dimension_count": head_dim,
            "rope.freq_base": float(parameters_of(config)["rope_theta"]),
            **scaling_metadata(config),
        }


def _neighbours(config: Any) -> Mapping[str, Layout]:
    """Return the layouts of queries and keys of which llama.cpp rotates neighbours instead of halves of a head."""

    def interleaved(heads: int) -> Layout:
        return lambda tensor: (
            tensor.view(heads, 2, tensor.shape[0] // heads // 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
        )

    return {"attn_q": interleaved(config.num_attention_heads), "attn_k": interleaved(config.num_key_value_heads)}


ARCHITECTURES = {
    "llama": Architecture("llama", layouts=_neighbours, scalings=frozenset({"linear", "llama3", "yarn"})),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
}
