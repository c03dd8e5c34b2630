"""Find the format of each quantized weight of a model: as its config says, or as the settings of a run ask for.

Before a file is read, the rules of transformers' quantizers say which weights are quantized: those of the linear layers of all
blocks, and stacked experts, except in modules that the config leaves out.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from horizon_lm.common.units import block
from horizon_lm.errors import ConfigError, ModelNotSupportedError, QuantizedWeightsError
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.memory.codecs.bnb4bit import Bnb4Bit
from horizon_lm.memory.codecs.fp8 import Fp8
from horizon_lm.memory.codecs.int4 import Int4
from horizon_lm.memory.codecs.mxfp4 import Mxfp4
from horizon_lm.memory.codecs.stack import Stack
from horizon_lm.model.parts import ModelParts, ParamRef
from horizon_lm.model.pattern_trial import is_pattern, require_few_pairs, require_quick

_REMEDY = "use a bf16 copy of the model, or one in nf4, mxfp4, block fp8 or the int4 of compressed-tensors"


def four_bits(quant_type: str = "nf4", nested: bool = False) -> dict[str, Any]:
    """Return the ``quantization_config`` of a model that bitsandbytes quantizes to 4 bits."""
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": quant_type,
        "bnb_4bit_use_double_quant": nested,
    }  # fmt: skip


def requested_quantization(run: Any) -> dict[str, Any] | None:
    """Return the ``quantization_config`` with which a run asks to quantize or to decode weights; None if it asks for neither."""
    if run.dequantize:
        return {"dequantize": True}
    return four_bits(run.bnb_4bit_quant_type, run.use_bnb_nested_quant) if run.load_in_4bit else None


def take_quantization(config: Any) -> dict[str, Any] | None:
    """Remove the ``quantization_config`` of a model's config, and return it; None if its weights are not quantized."""
    found = quantization_of(config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return found


def require_adapters(config: Any, run: Any) -> None:
    """Raise QuantizedWeightsError if a run would train weights that are quantized, and ConfigError if it would decode some that are not."""
    if run.dequantize:
        require_dequantizable(quantization_of(config), {}, f"dequantize: {run.model_name_or_path}")
    elif quantization_of(config) and not run.use_peft:
        raise QuantizedWeightsError(
            f"model_name_or_path: the weights of {run.model_name_or_path} are quantized, and cannot be trained; set dequantize: true "
            "to decode them while they are read, or train adapters on them with use_peft: true"
        )


def require_dequantizable(
    published: Mapping[str, Any] | None, asked: Mapping[str, Any], place: object
) -> Mapping[str, Any]:
    """Return the published ``quantization_config`` of weights to decode.

    Raises:
        ConfigError: there is none, or the caller's, if it is not empty, is for another format. The message names ``place``.
    """
    if not published:
        raise ConfigError(f"{place}: its weights are not quantized; leave dequantize out")
    if asked.get("quant_method", published.get("quant_method")) != published.get("quant_method"):
        raise ConfigError(
            f"{place}: its weights are quantized by {published.get('quant_method')}, which the given quantization_config is not for; "
            "give one of this quant_method"
        )
    return published


def quantization_of(config: Any) -> dict[str, Any] | None:
    """Return the ``quantization_config`` of a model's config; None if its weights are not quantized."""
    found = getattr(config, "quantization_config", None)
    if not found:
        return None
    return dict(found) if isinstance(found, Mapping) else dict(found.to_dict())


def matrix_codec(quantization: Mapping[str, Any], place: str) -> Codec:
    """Return the codec of a linear layer's weight; `Mxfp4` for a format of stacked experts only.

    Raises:
        ModelNotSupportedError: the format is none that can be decoded. The message names ``place``.
    """
    method = quantization.get("quant_method")
    if method == "bitsandbytes" and quantization.get("load_in_4bit"):
        kind = quantization.get("bnb_4bit_quant_type", "fp4")
        if kind not in ("nf4", "fp4"):
            raise ModelNotSupportedError(f"{place}: bnb_4bit_quant_type is {kind!r}; {_REMEDY}")
        return Bnb4Bit(kind, nested=bool(quantization.get("bnb_4bit_use_double_quant")))
    if method == "mxfp4":
        return Mxfp4()
    if method == "fp8" and quantization.get("weight_block_size"):
        return Fp8(_tile_size(quantization["weight_block_size"], place))
    if method == "compressed-tensors":
        return _compressed_codec(quantization, place)
    detail = " in 8 bits" if method == "bitsandbytes" else " without weight_block_size" if method == "fp8" else ""
    raise ModelNotSupportedError(f"{place}: its weights are quantized by {method}{detail}; {_REMEDY}")


def _tile_size(size: Any, place: str) -> tuple[int, int]:
    """Return the rows and columns of FP8 tiles; raise ConfigError if a config does not give two such numbers."""
    if not (isinstance(size, Sequence) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)):
        raise ConfigError(f"{place}: the size of FP8 tiles is {size!r}; two numbers are needed, such as [128, 128]")
    return size[0], size[1]


def _compressed_codec(quantization: Mapping[str, Any], place: str) -> Codec:
    """Return the codec of compressed-tensors' FP8 in tiles or packed INT4; raise ModelNotSupportedError for its other formats."""
    # Settings that change weights before they are quantized, each with the key that says how.
    for setting, key in (("transform_config", "config_groups"), ("sparsity_config", "format")):
        found = quantization.get(setting)
        if isinstance(found, Mapping) and found.get(key) not in (None, {}, "dense"):
            raise ModelNotSupportedError(
                f"{place}: compressed-tensors has changed its weights by a {setting}; {_REMEDY}"
            )
    groups = [each for each in _config_groups(quantization) if isinstance(each.get("weights"), Mapping)]
    codecs = {_group_codec(each["weights"], each.get("format") or quantization.get("format"), place) for each in groups}
    if len(codecs) != 1:
        kinds = f" ({'; '.join(_describe(each['weights']) for each in groups)})" if groups else ""
        raise ModelNotSupportedError(
            f"{place}: compressed-tensors has {len(groups)} groups of weights{kinds}; {_REMEDY}"
        )
    return codecs.pop()


def _config_groups(quantization: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the groups of weights in a config of compressed-tensors; none in others."""
    found = quantization.get("config_groups")
    return [each for each in found.values() if isinstance(each, Mapping)] if isinstance(found, Mapping) else []


def _group_codec(weights: Mapping[str, Any], layout: Any, place: str) -> Codec:
    """Return the codec of a group of weights of compressed-tensors, in the layout that its ``format`` names."""
    kind = (weights.get("num_bits"), weights.get("type"), weights.get("strategy"))
    if kind == (8, "float", "block"):
        return Fp8(_tile_size(weights.get("block_structure"), place))
    detail = _describe(weights)
    if kind in ((4, "int", "group"), (4, "int", "channel")):
        size = weights.get("group_size") if kind == (4, "int", "group") else None  # None for whole rows
        obstacle = _int4_obstacle(weights, size, layout)
        if not obstacle:
            return Int4(size)
        detail += obstacle
    raise ModelNotSupportedError(f"{place}: compressed-tensors has its weights in {detail}; {_REMEDY}")


def _int4_obstacle(weights: Mapping[str, Any], size: Any, layout: Any) -> str:
    """Return the property for which INT4 weights cannot be decoded, as the end of a message; empty if they can.

    Args:
        weights: the scheme of the weights in the config.
        size: columns of a group; None for whole rows.
        layout: the ``format`` of the config.
    """
    if weights.get("strategy") == "group" and not (type(size) is int and size > 0 and size % 8 == 0):
        return f" of {size} columns, which are no multiple of 8"
    if layout != "pack-quantized":
        return f", in the format {layout}"
    if not weights.get("symmetric", True):
        return ", with zero points"
    order = weights.get("actorder")  # the others say in which order columns were quantized, not how they are stored
    return f", with columns in the actorder {order}" if order not in (None, False, "weight", "static") else ""


def _describe(weights: Mapping[str, Any]) -> str:
    return f"{weights.get('num_bits')} bits, {weights.get('type')}, by {weights.get('strategy')}"


def expected_codecs(parts: ModelParts, quantization: Mapping[str, Any]) -> dict[str, Codec]:
    """Return the codecs of the weights that are quantized, by full name, for a model whose files are not there to be asked.

    Raises:
        ConfigError: a pattern of names takes too long.
        ModelNotSupportedError: the format is none that can be decoded.
    """
    codec = matrix_codec(quantization, type(parts.model).__name__)
    left_out = _patterns(parts, _names_left_out(parts, quantization))
    targets = _patterns(parts, _names_of_targets(quantization))
    found: dict[str, Codec] = {}
    for u in parts.decoder_blocks:
        for ref in parts.units[block(u)]:
            module = ref.name.rpartition(".")[0]
            if _is_named(module, left_out) or (targets and not _is_named(module, targets)):
                continue
            if (codec_of_ref := _codec_of(ref, codec)) is not None:
                found[ref.name] = codec_of_ref
    return found


def _codec_of(ref: ParamRef, codec: Codec) -> Codec | None:
    """Return the codec of a weight of a block, given that of `matrix_codec`; None for a weight that is never quantized."""
    module, attribute = ref.places[0]
    if ref.param.ndim == 3 and ref.name.rpartition(".")[0].endswith("experts"):
        return codec if isinstance(codec, Mxfp4) else Stack(codec)
    is_linear = (type(module) is nn.Linear or type(module).__name__ == "Conv1D") and attribute == "weight"
    return codec if is_linear and not isinstance(codec, Mxfp4) else None


def _names_left_out(parts: ModelParts, quantization: Mapping[str, Any]) -> list[str]:
    """Return the names and patterns of modules that are not quantized."""
    names = _texts(quantization.get(key) for key in ("modules_to_not_convert", "llm_int8_skip_modules", "ignore"))
    return [*names, *(getattr(parts.model, "_keep_in_fp32_modules", None) or ())]


def _names_of_targets(quantization: Mapping[str, Any]) -> list[str]:
    """Return the names and patterns of the modules that compressed-tensors quantizes; none if these are all linear layers."""
    names = _texts(each.get("targets") for each in _config_groups(quantization))
    return [] if "Linear" in names else names


def _texts(settings: Iterable[Any]) -> list[str]:
    """Return the texts in those settings that are lists."""
    return [text for each in settings if isinstance(each, list) for text in each if isinstance(text, str)]


def _is_named(module: str, patterns: Mapping[str, re.Pattern[str]]) -> bool:
    """Return whether a module's name ends with one of the given names, or matches the pattern of one from its start."""
    return any(pattern.match(module) or module.endswith(text) for text, pattern in patterns.items())


def _patterns(parts: ModelParts, names: Sequence[str]) -> dict[str, re.Pattern[str]]:
    """Return the names of modules as the config has them, each with its regular expression, whose time was tried.

    Raises:
        ConfigError: a pattern takes too long to compare with the names of modules.
    """
    modules = sorted({ref.name.rpartition(".")[0] for ref in parts.refs()})
    found = {name: _pattern(name) for name in names}
    require_few_pairs(len(found), modules, "quantization_config")
    tried = [pattern.pattern for name, pattern in found.items() if is_pattern(name)]
    require_quick(tried, modules, "quantization_config")
    return found


def _pattern(name: str) -> re.Pattern[str]:
    """Return a name in the config as a regular expression, as transformers reads it, or as literal text if it is not valid as one.

    A match ends where a part of a path ends: behind a dot, before one, or at the end.
    """
    for text in (name.removeprefix("re:"), re.escape(name)):
        try:
            return re.compile(rf"(?:{text})(?:(?<=\.)|(?=\.|$))")
        except re.error:
            continue
    raise AssertionError(name)
