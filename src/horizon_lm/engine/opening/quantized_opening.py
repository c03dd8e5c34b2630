"""Open the weights of a folder as they were published, or as the caller asks: quantized while they are read, or decoded."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from horizon_lm.errors import CheckpointWarning, ConfigError, warn
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.model.files.checkpoint_reader import StoredTensors
from horizon_lm.model.files.quantized_checkpoint import DecodedCheckpoint, codecs_of, open_checkpoint
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.quantization import expected_codecs, four_bits, require_dequantizable

FindCodecs = Callable[[ModelParts], dict[str, Codec]]  # of weights that stay quantized, by full name


def read_quantization(options: dict[str, Any]) -> dict[str, Any] | None:
    """Remove ``load_in_4bit`` and ``quantization_config`` from the options, and return the settings that they ask for.

    Raises:
        ConfigError: they ask neither for 4 bits nor for decoded weights.
    """
    given = options.pop("quantization_config", None)
    if options.pop("load_in_4bit", None) and given is None:
        given = four_bits()
    if given is None:
        return None
    asked = dict(given) if isinstance(given, Mapping) else dict(given.to_dict())
    if asked.get("dequantize") or getattr(given, "dequantize", False):  # some of transformers' classes do not list it
        return asked | {"dequantize": True}
    if asked.get("quant_method") != "bitsandbytes" or not asked.get("load_in_4bit"):
        raise ConfigError(
            "from_pretrained: quantization_config: use BitsAndBytesConfig(load_in_4bit=True) to quantize weights while they are read, or "
            "Mxfp4Config, FineGrainedFP8Config or CompressedTensorsConfig with dequantize=True to decode them; a quantized folder needs none "
            "for adapters"
        )
    return asked


def open_weights(
    folder: Path, published: Mapping[str, Any] | None, asked: Mapping[str, Any] | None, dtype: torch.dtype
) -> tuple[StoredTensors, FindCodecs | None]:
    """Return the weights in a folder, and a function that finds the codecs of weights that stay quantized; None if none do.

    Args:
        folder: the folder.
        published: the ``quantization_config`` of its config.
        asked: what the caller asks for, from `read_quantization`.
        dtype: the dtype that weights are decoded to, if the caller asks for that.

    Raises:
        ConfigError, ModelNotSupportedError: as `QuantizedCheckpoint`, or there is nothing to decode.
    """
    if asked is not None and asked.get("dequantize"):
        quantization = require_dequantizable(published, asked, folder)
        return DecodedCheckpoint(open_checkpoint(folder, quantization), dtype), None
    checkpoint = open_checkpoint(folder, published)
    # Plain weights are encoded one by one when they are written to the store, if the caller asks for it.
    if published is None:
        return checkpoint, None if asked is None else partial(expected_codecs, quantization=asked)
    if asked is not None:
        warn(
            f"{folder}: the weights are quantized already ({published['quant_method']}), so load_in_4bit has no effect",
            CheckpointWarning,
        )
    return checkpoint, partial(codecs_of, checkpoint)
