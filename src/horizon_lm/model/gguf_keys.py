"""The metadata of a GGUF file, each of whose keys is used, or is known to change nothing, or is rejected by its name."""

from collections.abc import Collection, Mapping
from typing import Any

from horizon_lm.common.gguf_header import GgufHeader
from horizon_lm.errors import ConfigError

_ANY = None
# Keys that change nothing if they have one of these values: llama.cpp does not compute with them then, or never does.
_WITHOUT_EFFECT: Mapping[str, Collection[Any] | None] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.group_norm_epsilon": _ANY,  # of norms that other architectures have, as the two below
    "attention.layer_norm_epsilon": _ANY,
    "attention.layer_norm_rms_epsilon": _ANY,
    "attention.max_alibi_bias": (0.0,),
    "attention.shared_kv_layers": (0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "embedding_length_per_layer_input": (0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_gating_func": (0, 1),  # none is named, or the softmax that all of these architectures have
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_used_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "feed_forward_length": (0,),
    "final_logit_softcapping": (0.0,),
    "leading_dense_block_count": (0,),
    "logit_scale": (0.0, 1.0),
    "nextn_predict_layers": (0,),
    "pooling_type": _ANY,  # of embeddings of texts
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.finetuned": _ANY,  # says that the model was trained with its scaling
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "ssm.dt_b_c_rms": (False,),
    "tensor_data_layout": ("Meta AI original pth",),  # of the first files, and the layout of all since
}


class Keys:
    """The metadata of a file about its architecture, by names without the architecture's name before them."""

    def __init__(self, header: GgufHeader, architecture: str) -> None:
        self._prefix, self.path = f"{architecture}.", header.path
        self._values = {
            name.removeprefix(self._prefix): value
            for name, value in header.metadata.items()
            if name.startswith(self._prefix)
        }
        self._used: set[str] = set()

    def take(self, name: str, default: Any = None) -> Any:
        """Return the value of a key, or ``default`` if the file does not have it."""
        self._used.add(name)
        return self._values.get(name, default)

    def single(self, name: str, default: Any = None) -> Any:
        """Return a value as `take` does; a list of equal values, for all layers, counts as one. Raise ConfigError for other lists."""
        value = self.take(name, default)
        if not isinstance(value, list):
            return value
        if not value or any(each != value[0] for each in value):
            raise self.rejected(name)
        return value[0]

    def require(self, name: str) -> Any:
        """Return the value of a key; raise ConfigError if the file does not have it."""
        if name not in self._values:
            raise ConfigError(
                f"gguf_file: {self.path}: {self._prefix}{name} is missing; make the file again with llama.cpp's converter"
            )
        return self.single(name)

    def rejected(self, name: str) -> ConfigError:
        """Return the error of a key whose value the model cannot be opened with."""
        return rejected(self.path, self._prefix + name, self._values.get(name))

    def require_all_used(self) -> None:
        """Raise ConfigError for a key that `take` has not returned, unless it changes nothing that the model computes."""
        for name, value in self._values.items():
            allowed = _WITHOUT_EFFECT.get(name, ())
            if name not in self._used and allowed is not _ANY and value not in allowed:
                raise self.rejected(name)


def rejected(path: Any, key: str, value: Any) -> ConfigError:
    """Return the error of a key whose value a file cannot be opened with."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
    return ConfigError(
        f"gguf_file: {path}: {key}: {shown} is not supported for this file; open the model's Hugging Face folder instead"
    )
