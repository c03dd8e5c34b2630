"""Find the quantized weights of a folder by its headers: formats differ in the names, dtypes and shapes of their tensors.

Sources of the layouts: ``bitsandbytes.functional.QuantState.as_dict``; the folders of gpt-oss (``blocks`` and ``scales``), of
DeepSeek-V3 and Qwen's FP8 models (``weight_scale_inv``), and of compressed-tensors (``weight_scale``, and for INT4 ``weight_packed``).
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from horizon_lm.errors import ConfigError, first_line
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.memory.codecs.bnb4bit import TABLES, Bnb4Bit
from horizon_lm.memory.codecs.fp8 import Fp8
from horizon_lm.memory.codecs.int4 import CODES_OF_WORD, Int4
from horizon_lm.memory.codecs.mxfp4 import Mxfp4
from horizon_lm.model.files.checkpoint_reader import Checkpoint, QuantizedWeight
from horizon_lm.model.files.weight_files import Header
from horizon_lm.model.units import TRAINED_DTYPES

STATE = ".quant_state.bitsandbytes__"
_LONGEST_STATE = 4096  # bytes of a description of a weight; published ones have about 200
_SCALES = ("weight_scale_inv", "weight_scale")
_SCALE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu}
_INT4_SCALE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_NOT_DECODED = ("weight_zero_point", "weight_g_idx", "weight_global_scale")  # what INT4 may have in other schemes


def find_weights(checkpoint: Checkpoint, codec: Codec, headers: Mapping[str, Header]) -> dict[str, QuantizedWeight]:
    """Return the quantized weights of a folder by name. Their components need not be there, or fit.

    Args:
        checkpoint: the tensors of the folder by their own names, of which descriptions of weights are read.
        codec: the format that the config of the folder names.
        headers: the headers of all tensors.

    Raises:
        ConfigError: the description of a weight is missing or damaged.
    """
    return _LAYOUTS[type(codec)](checkpoint, codec, headers)


def _find_4bit(checkpoint: Checkpoint, codec: Bnb4Bit, headers: Mapping[str, Header]) -> dict[str, QuantizedWeight]:
    """Return the weights that bitsandbytes has quantized: each has a tensor with its state."""
    found = {}
    for name in headers:
        weight, is_state, kind = name.partition(STATE)
        if is_state:
            found[weight] = _read_state(checkpoint, weight, name, kind, headers)
    # Codes without their state cannot be decoded, and would be read as a weight of bytes.
    for name, header in headers.items():
        if name not in found and header.dtype == "U8" and f"{name}.absmax" in headers:
            raise ConfigError(
                f"{checkpoint.file_of(name)}: {name} has no {STATE.strip('.')}{codec.quant_type}; download it again"
            )
    return found


def _read_state(
    checkpoint: Checkpoint, weight: str, name: str, kind: str, headers: Mapping[str, Header]
) -> QuantizedWeight:
    """Return a weight as its state describes it. Raise ConfigError if the state is damaged.

    Args:
        checkpoint: the tensors of the folder.
        weight: the name of the weight.
        name: the tensor with its state, the bytes of a JSON object.
        kind: the end of that tensor's name, which is the format.
        headers: the headers of all tensors.
    """
    try:
        if headers[name].numel > _LONGEST_STATE:
            raise ValueError(f"{headers[name].numel:,} bytes")
        state = json.loads(bytes(checkpoint.read([name])[name].tolist()))
        shape, blocksize = torch.Size(state["shape"]), int(state["blocksize"])
        nested, offset = "nested_blocksize" in state, state.get("nested_offset")
        dtype = getattr(torch, state["dtype"])
        has_known_format = state["quant_type"] == kind and kind in TABLES and dtype in TRAINED_DTYPES
        has_known_blocks = blocksize >= 2 and blocksize % 2 == 0 and state.get("nested_blocksize", 256) == 256
        if not has_known_format or not has_known_blocks or (nested and not isinstance(offset, float)):
            raise ValueError(f"quant_type {state['quant_type']}, blocksize {blocksize}, nested_offset {offset}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        place = checkpoint.file_of(name)
        raise ConfigError(f"{place}: {name} is damaged ({first_line(error)}); download it again") from error
    parts = ("absmax", "quant_map", *(("nested_absmax", "nested_quant_map") if nested else ()))
    sources = {"weight": weight} | {part: f"{weight}.{part}" for part in parts}
    return QuantizedWeight(shape, Bnb4Bit(kind, blocksize, nested), sources, dtype, offset if nested else None)


def _find_mxfp4(checkpoint: Checkpoint, codec: Mxfp4, headers: Mapping[str, Header]) -> dict[str, QuantizedWeight]:
    """Return the stacked experts in MXFP4: each has a tensor of blocks (E, O, I / 32, 16) and one of scales."""
    found = {}
    for name, header in headers.items():
        weight, is_blocks, rest = name.rpartition("_blocks")
        if is_blocks and not rest:
            # Missing dimensions count as 0; a weight without elements is rejected with its components.
            experts, height, blocks, _ = (*header.shape, 0, 0, 0, 0)[:4]
            sources = {"blocks": name, "scales": f"{weight}_scales"}
            found[weight] = QuantizedWeight(torch.Size((experts, blocks * 32, height)), codec, sources)
    return found


def _find_fp8(checkpoint: Checkpoint, codec: Fp8, headers: Mapping[str, Header]) -> dict[str, QuantizedWeight]:
    """Return the matrices in FP8: each has a tensor of scales, whose name ends in one of two ways."""
    found = {}
    for name, header in headers.items():
        if header.dtype != "F8_E4M3":
            continue
        stem = name.removesuffix("weight")
        # If neither name is there, the first is reported as a missing component, as are scales of another dtype.
        scale = next((stem + each for each in _SCALES if stem + each in headers), stem + _SCALES[0])
        dtype = _SCALE_DTYPES.get(headers[scale].dtype, torch.float32) if scale in headers else torch.float32
        sources = {"weight": name, "weight_scale_inv": scale}
        found[name] = QuantizedWeight(torch.Size(header.shape), Fp8(codec.tile, dtype), sources)
    return found


def _find_int4(checkpoint: Checkpoint, codec: Int4, headers: Mapping[str, Header]) -> dict[str, QuantizedWeight]:
    """Return the matrices in INT4: each has a tensor of words, one of scales, and one with its shape.

    Shapes follow from the words here: a large model has 70,000 tensors with a shape, which are compared when their weights
    are read.
    """
    found = {}
    for name, header in headers.items():
        stem = name.removesuffix("weight_packed")  # ends with a dot
        if stem == name:
            continue
        _require_int4(checkpoint.file_of(name), stem, headers)
        scale, shape = f"{stem}weight_scale", f"{stem}weight_shape"
        # Missing dimensions count as 0; a weight without elements is rejected with its components.
        height, words = (*header.shape, 0, 0)[:2]
        dtype = _INT4_SCALE_DTYPES.get(headers[scale].dtype, torch.bfloat16) if scale in headers else torch.bfloat16
        found[f"{stem}weight"] = QuantizedWeight(
            torch.Size((height, words * CODES_OF_WORD)), Int4(codec.group_size, dtype),
            {"weight_packed": name, "weight_scale": scale}, dtype, shape_source=shape if shape in headers else None,
        )  # fmt: skip
    return found


def _require_int4(place: Path, stem: str, headers: Mapping[str, Header]) -> None:
    """Raise ConfigError if a module has tensors that a weight in symmetric INT4 does not have."""
    if other := next((stem + each for each in ("weight", *_NOT_DECODED) if stem + each in headers), None):
        raise ConfigError(
            f"{place}: {stem}weight_packed is there with {other}, which its format does not have; use a bf16 copy of the model"
        )
    shape = headers.get(f"{stem}weight_shape")
    if shape is not None and (shape.dtype not in ("I32", "I64") or shape.shape != (2,)):
        raise ConfigError(
            f"{place}: {stem}weight_shape is {shape.dtype} of shape {tuple(shape.shape)}, but two integers are needed; "
            "download it again"
        )


_Find = Callable[[Checkpoint, Any, Mapping[str, Header]], dict[str, QuantizedWeight]]
_LAYOUTS: dict[type[Codec], _Find] = {Bnb4Bit: _find_4bit, Mxfp4: _find_mxfp4, Fp8: _find_fp8, Int4: _find_int4}
