"""Read a folder of quantized weights as it was published: each weight is the codes, scales and tables of its format.

Sources of the layouts: ``bitsandbytes.functional.QuantState.as_dict``; the folders of gpt-oss (``blocks`` and ``scales``), of
DeepSeek-V3 and Qwen's FP8 models (``weight_scale_inv``), and of compressed-tensors (``weight_scale``).
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from horizon_lm.codecs.base import Codec
from horizon_lm.codecs.bnb4bit import TABLES, Bnb4Bit
from horizon_lm.codecs.fp8 import Fp8
from horizon_lm.codecs.mxfp4 import Mxfp4
from horizon_lm.codecs.stack import Stack
from horizon_lm.errors import ConfigError, first_line
from horizon_lm.model.finite import require_finite
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.quantization import expected_codecs, matrix_codec
from horizon_lm.model.units import TRAINED_DTYPES
from horizon_lm.store.checkpoint_reader import DTYPE_NAMES, Checkpoint, Header
from horizon_lm.store.conversion import Conversion, Target, find_conversion
from horizon_lm.units import block

_STATE = ".quant_state.bitsandbytes__"
_LONGEST_STATE = 4096  # bytes of a description of a weight; published ones have about 200
_SCALES = ("weight_scale_inv", "weight_scale")
_SCALE_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F8_E8M0": torch.float8_e8m0fnu}


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """A quantized weight of a folder.

    Attributes:
        shape: its shape when decoded.
        codec: its format.
        sources: the tensors of its components in the folder, by the names of the codec.
        dtype: the dtype of the weight that was quantized.
        offset: the mean of its scales, which double quantization keeps outside of its tensors.
    """

    shape: torch.Size
    codec: Codec
    sources: Mapping[str, str]
    dtype: torch.dtype = torch.bfloat16
    offset: float | None = None


class QuantizedCheckpoint(Checkpoint):
    """A checkpoint whose quantized weights appear under their own names, with their decoded shapes.

    Raises:
        ConfigError: a component of a weight is missing, or of another dtype or shape than its format has.
        ModelNotSupportedError: the format is none that can be decoded.
    """

    def __init__(self, folder: Path, quantization: Mapping[str, Any]) -> None:
        super().__init__(folder)
        codec, headers = matrix_codec(quantization, str(folder)), super().headers()
        find = {Bnb4Bit: self._find_4bit, Mxfp4: self._find_mxfp4, Fp8: self._find_fp8}[type(codec)]  # type: ignore[index]
        self.quantized: dict[str, QuantizedWeight] = find(codec, headers)
        parts = {source for each in self.quantized.values() for source in each.sources.values()}
        parts |= {name for name in headers if _STATE in name}
        self._headers = {name: header for name, header in headers.items() if name not in parts}
        for name, each in self.quantized.items():
            self._headers[name] = Header(DTYPE_NAMES[each.dtype], each.shape)
            self._require_components(name, each, headers)

    @property
    def names(self) -> list[str]:
        return list(self._headers)

    def headers(self) -> dict[str, Header]:
        return self._headers

    def description(self) -> Any:
        return [super().description(), [[name, repr(each)] for name, each in self.quantized.items()]]

    def file_of(self, name: str) -> Path:
        each = self.quantized.get(name)
        return super().file_of(name if each is None else next(iter(each.sources.values())))

    def codecs(self, conversion: Conversion) -> dict[str, Codec]:
        """Return the codecs of a model's quantized parameters, by the names of the model.

        Raises:
            ConfigError: quantized weights cannot be joined to the parameter of the model.
        """
        found: dict[str, Codec] = {}
        for target in conversion.targets:
            weights = {name: self.quantized[name] for name in target.sources if name in self.quantized}
            if not weights:
                continue
            codec = next(iter(weights.values())).codec
            if target.converter is None:
                found[target.name] = codec
            elif not isinstance(codec, Fp8) or len(weights) != len(target.sources):
                raise ConfigError(
                    f"{self.file_of(next(iter(weights)))}: the quantized {next(iter(weights))} and the tensors that belong to it "
                    f"cannot be joined to {target.name}, of which transformers has made one parameter; use a bf16 copy"
                )
            else:
                found[target.name] = Stack(codec)
        return found

    def pack(self, model: Any, target: Target, codec: Codec, packed: torch.Tensor, shape: torch.Size) -> None:
        """Read the components of a parameter into ``packed``.

        Raises:
            ConfigError: a component cannot be read, or has values that no quantized weight has.
        """
        components: dict[str, torch.Tensor] = {}
        first = next(iter(target.sources))
        for component in self.quantized[first].sources:
            sources = {name: self.quantized[name].sources[component] for name in target.sources}
            read = super().read(list(sources.values()))
            for source in read:
                self._require_valid(source, component, read[source], self.quantized[first].codec)
            (components[component],) = target.convert(
                model, {name: read[each] for name, each in sources.items()}
            ).values()
        if (offset := self.quantized[first].offset) is not None:
            components["nested_offset"] = torch.tensor([offset])
        try:
            codec.pack(components, packed, shape)
        except ConfigError as error:
            raise ConfigError(f"{self.file_of(first)}: {first}: {error}; download it again") from error

    # Formats

    def _find_4bit(self, codec: Codec, headers: Mapping[str, Header]) -> dict[str, QuantizedWeight]:
        """Return the weights that bitsandbytes has quantized: each has a tensor with its state."""
        found = {}
        for name in headers:
            weight, is_state, kind = name.partition(_STATE)
            if is_state:
                found[weight] = self._read_state(weight, name, kind, headers)
        # Codes without their state cannot be decoded, and would be read as a weight of bytes.
        assert isinstance(codec, Bnb4Bit)
        for name, header in headers.items():
            if name not in found and header.dtype == "U8" and f"{name}.absmax" in headers:
                raise ConfigError(
                    f"{super().file_of(name)}: {name} has no {_STATE.strip('.')}{codec.quant_type}; download it again"
                )
        return found

    def _read_state(self, weight: str, name: str, kind: str, headers: Mapping[str, Header]) -> QuantizedWeight:
        """Return a weight as its quantization state describes it."""
        place = super().file_of(name)
        try:
            if headers[name].shape.numel() > _LONGEST_STATE:
                raise ValueError(f"{headers[name].shape.numel():,} bytes")
            state = json.loads(bytes(super().read([name])[name].tolist()))
            shape, blocksize = torch.Size(state["shape"]), int(state["blocksize"])
            nested, offset = "nested_blocksize" in state, state.get("nested_offset")
            dtype = getattr(torch, state["dtype"])
            known = state["quant_type"] == kind and kind in TABLES and state.get("nested_blocksize", 256) == 256
            known = known and dtype in TRAINED_DTYPES
            if not known or blocksize < 2 or blocksize % 2 or (nested and not isinstance(offset, float)):
                raise ValueError(f"quant_type {state['quant_type']}, blocksize {blocksize}, nested_offset {offset}")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(f"{place}: {name} is damaged ({first_line(error)}); download it again") from error
        parts = ("absmax", "quant_map", *(("nested_absmax", "nested_quant_map") if nested else ()))
        sources = {"weight": weight} | {part: f"{weight}.{part}" for part in parts}
        return QuantizedWeight(shape, Bnb4Bit(kind, blocksize, nested), sources, dtype, offset if nested else None)

    def _find_mxfp4(self, codec: Codec, headers: Mapping[str, Header]) -> dict[str, QuantizedWeight]:
        """Return the stacked experts in MXFP4: each has a tensor of blocks (E, O, I / 32, 16) and one of scales."""
        found = {}
        for name, header in headers.items():
            weight, is_blocks, rest = name.rpartition("_blocks")
            if is_blocks and not rest:
                # Missing dimensions count as 0, and `_require_components` rejects what has no elements.
                experts, height, blocks, _ = (*header.shape, 0, 0, 0, 0)[:4]
                sources = {"blocks": name, "scales": f"{weight}_scales"}
                found[weight] = QuantizedWeight(torch.Size((experts, blocks * 32, height)), codec, sources)
        return found

    def _find_fp8(self, codec: Codec, headers: Mapping[str, Header]) -> dict[str, QuantizedWeight]:
        """Return the matrices in FP8: each has a tensor of scales, whose name ends in one of two ways."""
        found = {}
        for name, header in headers.items():
            if header.dtype != "F8_E4M3":
                continue
            stem = name.removesuffix("weight")
            # If there is neither, `_require_components` reports the first as missing.
            scale = next((stem + each for each in _SCALES if stem + each in headers), stem + _SCALES[0])
            assert isinstance(codec, Fp8)
            dtype = _SCALE_DTYPES.get(headers[scale].dtype, torch.float32) if scale in headers else torch.float32
            sources = {"weight": name, "weight_scale_inv": scale}
            found[name] = QuantizedWeight(header.shape, Fp8(codec.tile, dtype), sources)
        return found

    # Checks

    def _require_components(self, name: str, weight: QuantizedWeight, headers: Mapping[str, Header]) -> None:
        """Raise ConfigError if the tensors of a weight are not those of its format."""
        for component, expected in weight.codec.components(weight.shape).items():
            source = weight.sources.get(component)
            if source is None:
                continue
            if source not in headers:
                raise ConfigError(
                    f"{self.folder}: {source} is missing, without which {name} cannot be decoded; download it again"
                )
            header = headers[source]
            if header.shape.numel() != expected.shape.numel() or header.dtype != _header_name(expected.dtype):
                raise ConfigError(
                    f"{super().file_of(source)}: {source} is {header.dtype} of shape {tuple(header.shape)}, but {name} "
                    f"{tuple(weight.shape)} needs {_header_name(expected.dtype)} of shape {tuple(expected.shape)}; download it again"
                )

    def _require_valid(self, source: str, component: str, tensor: torch.Tensor, codec: Codec) -> None:
        """Raise ConfigError for values that no quantized weight has."""
        place = super().file_of(source)
        if tensor.dtype in (torch.float32, torch.bfloat16):
            require_finite(source, tensor, place)
        table = TABLES[codec.quant_type] if component == "quant_map" and isinstance(codec, Bnb4Bit) else None
        if table is not None and not torch.equal(tensor.view(-1), torch.tensor(table)):
            raise ConfigError(f"{place}: {source} is not the table of its format; download it again")
        raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else None
        if raw is None:
            return
        is_nan = (raw & 127) == 127 if tensor.dtype == torch.float8_e4m3fn else raw == 255
        if (component == "scales" or tensor.is_floating_point()) and is_nan.any():
            raise ConfigError(f"{place}: {source} has {int(is_nan.sum()):,} NaN values; download it again")


def _header_name(dtype: torch.dtype) -> str:
    names = {torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3"} | {each: name for name, each in _SCALE_DTYPES.items()}
    return names[dtype]


def codecs_of(checkpoint: QuantizedCheckpoint, parts: ModelParts) -> dict[str, Codec]:
    """Return the codecs of a model's parameters that a checkpoint has quantized, by full name.

    Raises:
        ConfigError: a parameter outside of blocks is quantized, or quantized weights cannot be joined.
    """
    conversion = find_conversion(parts.model, checkpoint.names)
    require_untransposed(checkpoint, conversion, parts)
    found = checkpoint.codecs(conversion)
    own = {ref.name for u in range(parts.num_blocks) for ref in parts.units[block(u)]}
    if other := [name for name in found if name not in own]:
        raise ConfigError(
            f"{checkpoint.folder}: {other[0]} is quantized, but only the weights of blocks are decoded on the device; set dequantize: true, "
            "which decodes all while they are read"
        )
    return found


def require_untransposed(checkpoint: QuantizedCheckpoint, conversion: Conversion, parts: ModelParts) -> None:
    """Raise ConfigError if bitsandbytes has quantized the transpose of a weight, which the shape of a square one does not show."""
    kinds = {ref.name: type(ref.places[0][0]).__name__ for ref in parts.refs()}
    for target in conversion.targets:
        found = (checkpoint.quantized[name] for name in target.sources if name in checkpoint.quantized)
        if kinds.get(target.name) == "Conv1D" and any(isinstance(each.codec, Bnb4Bit) for each in found):
            raise ConfigError(
                f"{checkpoint.folder}: {target.name} was quantized as the transpose of the model's weight; use a bf16 copy of the model"
            )


@dataclass(frozen=True, slots=True)
class Quantized:
    """The quantized weights of a run, before it is opened.

    Attributes:
        quantization: their ``quantization_config`` as JSON, so that this can be compared.
        folder: their folder; None if it is not on this machine, or its weights are quantized while they are read.
    """

    quantization: str
    folder: Path | None

    @classmethod
    def of(cls, quantization: Mapping[str, Any] | None, folder: Path | None) -> "Quantized | None":
        return None if quantization is None else cls(json.dumps(quantization, sort_keys=True, default=str), folder)

    def codecs(self, parts: ModelParts) -> dict[str, Codec]:
        """Return the codecs of the weights of a model, by full name. Raises the errors of `codecs_of`."""
        quantization = json.loads(self.quantization)
        if self.folder is None:
            return expected_codecs(parts, quantization)
        return codecs_of(QuantizedCheckpoint(self.folder, quantization), parts)


def open_checkpoint(folder: Path, quantization: Mapping[str, Any] | None) -> Checkpoint:
    """Open the checkpoint in a folder, whose config has this ``quantization_config``."""
    return Checkpoint(folder) if quantization is None else QuantizedCheckpoint(folder, quantization)
