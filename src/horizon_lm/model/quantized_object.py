"""Show other code that weights are quantized: the attributes and classes by which transformers' quantized models are known."""

from collections.abc import Mapping
from functools import cache
from typing import Any, NoReturn

import torch
from torch import nn
from transformers.quantizers import AutoQuantizationConfig, HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from horizon_lm.errors import StreamingError
from horizon_lm.memory.codecs.bnb4bit import Bnb4Bit
from horizon_lm.model.adapters import without_bitsandbytes_messages
from horizon_lm.model.parts import ModelParts


def show_quantization(parts: ModelParts, quantization: Mapping[str, Any]) -> None:
    """Give a model whose weights have codecs the attributes of a quantized model of transformers.

    Args:
        parts: the units of the model, with the codecs.
        quantization: the ``quantization_config`` of the weights.
    """
    model, config = parts.model, _config_of(quantization)
    model.config.quantization_config, model.hf_quantizer = config, _Quantizer(config)
    model.is_quantized, model.quantization_method = True, config.quant_method
    if not quantization.get("load_in_4bit"):
        return
    model.is_loaded_in_4bit = True
    for ref in parts.refs():
        codec = parts.codecs.get(ref.name)
        if isinstance(codec, Bnb4Bit):
            # PEFT asks for these.
            ref.param.quant_type, ref.param.compress_statistics = codec.quant_type, codec.nested  # type: ignore[attr-defined]
            for module, _ in ref.places:
                _show_linear(module, config)


def _config_of(quantization: Mapping[str, Any]) -> Any:
    """Return transformers' object of a ``quantization_config``; one without its methods if the package of its format is not installed."""
    try:
        return AutoQuantizationConfig.from_dict(dict(quantization))
    except ImportError:
        config = QuantizationConfigMixin(quantization["quant_method"])
        vars(config).update(quantization)
        return config


class _Quantizer(HfQuantizer):
    """The quantizer of a streamed model, which is asked for its config, and whether adapters can be trained."""

    is_trainable = True  # in all formats: weights are decoded before a block computes
    is_compileable = False

    def is_serializable(self) -> bool:
        return True

    def dequantize(self, model: Any, dtype: torch.dtype | None = None) -> NoReturn:
        raise StreamingError(
            "dequantize() is not supported: it would replace the weights of a streamed model. Write the decoded model with "
            "model.save_pretrained(folder), or open the folder with quantization_config={'dequantize': True}"
        )


def _show_linear(module: nn.Module, config: Any) -> None:
    """Give a linear layer the class and the settings of a layer that bitsandbytes has quantized, if that package is installed."""
    shown = _linear_class()
    if shown is not None and type(module) is nn.Linear:
        module.__class__ = shown
        settings = {"compute_dtype": config.bnb_4bit_compute_dtype, "quant_storage": config.bnb_4bit_quant_storage}
        for name, value in (settings | {"compute_type_is_set": True, "quant_state": None}).items():
            setattr(module, name, value)  # PEFT draws adapters in `compute_dtype`


@cache
def _linear_class() -> Any:
    """Return a subclass of bitsandbytes' linear layer that computes as torch's, on decoded weights; None if bitsandbytes is missing."""
    try:
        with without_bitsandbytes_messages():
            from bitsandbytes.nn import Linear4bit
    except ImportError:
        return None
    overrides = {"forward": nn.Linear.forward, "_save_to_state_dict": nn.Linear._save_to_state_dict}
    return type("Linear4bit", (Linear4bit,), overrides | {"__module__": Linear4bit.__module__})
