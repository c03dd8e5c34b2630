"""Read a folder of quantized weights: each is the codes, scales and tables of its format, which are kept as they are or decoded."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from horizon_lm.common.units import block
from horizon_lm.errors import ConfigError
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.memory.codecs.bnb4bit import TABLES, Bnb4Bit
from horizon_lm.memory.codecs.stack import Stack
from horizon_lm.model.files.checkpoint_reader import (
    DTYPE_NAMES,
    DTYPES,
    Checkpoint,
    QuantizedWeight,
    StoredTensors,
    file_of,
)
from horizon_lm.model.files.conversion import Conversion, Target, find_conversion
from horizon_lm.model.files.quantized_layouts import STATE, find_weights
from horizon_lm.model.files.weight_files import Header
from horizon_lm.model.finite import require_finite
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.quantization import expected_codecs, matrix_codec


def open_checkpoint(folder: Path, quantization: Mapping[str, Any] | None) -> StoredTensors:
    """Open the weights in a folder, whose config has this ``quantization_config``. Raises the errors of `QuantizedCheckpoint`."""
    stored = Checkpoint(folder)
    return stored if quantization is None else QuantizedCheckpoint(stored, quantization)


class QuantizedCheckpoint:
    """The tensors of a folder, with quantized weights under their own names. Implements `StoredTensors`.

    `pack` reads quantized weights, and `read` all others.

    Args:
        stored: the tensors of the folder's files.
        quantization: the ``quantization_config`` of the folder's config.

    Raises:
        ConfigError: a component of a weight is missing, or of another dtype or shape than its format has.
        ModelNotSupportedError: the format is none that can be decoded.
    """

    def __init__(self, stored: Checkpoint, quantization: Mapping[str, Any]) -> None:
        self.stored, headers = stored, stored.headers()
        self.quantized = find_weights(stored, matrix_codec(quantization, str(stored.folder)), headers)
        # Tensors of the folder that appear only as parts of a weight: components, descriptions and shapes.
        parts = {source for each in self.quantized.values() for source in each.sources.values()}
        parts |= {name for name in headers if STATE in name}
        parts |= {each.shape_source for each in self.quantized.values() if each.shape_source is not None}
        self.names = list(dict.fromkeys([*(name for name in headers if name not in parts), *self.quantized]))
        for name in self.quantized:
            _require_components(self, name, headers)

    def meta(self, name: str) -> torch.Tensor:
        """Return a meta tensor with the shape and dtype of a tensor, or of a quantized weight before it was quantized."""
        if name not in self.quantized:
            return self.stored.meta(name)
        return torch.empty(self.quantized[name].shape, dtype=self.quantized[name].dtype, device="meta")

    def read(self, names: Sequence[str], rows: slice | None = None) -> dict[str, torch.Tensor]:
        """Return tensors that are not quantized, or some of their rows, by name."""
        return self.stored.read(names, rows)


class DecodedCheckpoint:
    """The tensors of a folder as if they had never been quantized. Implements `StoredTensors`.

    Args:
        packed: the same tensors with quantized weights; without any, nothing changes.
        dtype: the dtype that they are decoded to; None for that of the weights that were quantized.
    """

    def __init__(self, packed: StoredTensors, dtype: torch.dtype | None = None) -> None:
        self._packed, self._dtype = packed, dtype
        self.stored, self.quantized, self.names = packed.stored, packed.quantized, packed.names

    def meta(self, name: str) -> torch.Tensor:
        """Return a meta tensor with the shape and dtype of a tensor when it is decoded."""
        meta = self._packed.meta(name)
        return meta.to(self._dtype) if name in self.quantized and self._dtype is not None else meta

    def read(self, names: Sequence[str], rows: slice | None = None) -> dict[str, torch.Tensor]:
        """Return these tensors, or some of their rows, by name. A quantized one is decoded as a whole first."""
        plain = self._packed.read([name for name in names if name not in self.quantized], rows)
        part = slice(None) if rows is None else rows
        return {name: plain[name] if name in plain else self._decode(name)[part] for name in names}

    def _decode(self, name: str) -> torch.Tensor:
        """Read and decode one quantized tensor."""
        weight = self.quantized[name]
        packed = torch.empty(weight.codec.num_bytes(weight.shape), dtype=torch.uint8)
        # A parameter that is this tensor alone, without a converter of transformers, so no model is asked.
        pack(self, None, Target(name, {name: None}, None), weight.codec, packed, weight.shape)
        decoded = weight.codec.decode(packed, torch.empty(weight.shape, dtype=self._dtype or weight.dtype))
        require_finite(name, decoded, file_of(self, name))
        return decoded


def pack(
    checkpoint: StoredTensors, model: Any, target: Target, codec: Codec, packed: torch.Tensor, shape: torch.Size
) -> None:
    """Read the components of a parameter, and write them into ``packed`` as its codec arranges them.

    All sources of ``target`` are quantized weights, which transformers' conversion of the model joins to a parameter of this shape.

    Raises:
        ConfigError: a component cannot be read, or has values that no quantized weight has.
    """
    components: dict[str, torch.Tensor] = {}
    first = next(iter(target.sources))
    weight = checkpoint.quantized[first]
    _require_shapes(checkpoint, target)
    for component in weight.sources:
        sources = {name: checkpoint.quantized[name].sources[component] for name in target.sources}
        tensors = checkpoint.stored.read(list(sources.values()))
        for source in tensors:
            if _are_codes(weight.codec, component):
                tensors[source] = tensors[source].contiguous().view(torch.uint8)
            _require_valid(checkpoint.stored.file_of(source), source, component, tensors[source], weight.codec)
        by_weight = {name: tensors[source] for name, source in sources.items()}
        (components[component],) = target.convert(model, by_weight).values()
    if weight.offset is not None:
        components["nested_offset"] = torch.tensor([weight.offset])
    try:
        codec.pack(components, packed, shape)
    except ConfigError as error:
        raise ConfigError(f"{file_of(checkpoint, first)}: {first}: {error}; download it again") from error


# Checks


def _require_components(checkpoint: StoredTensors, name: str, headers: Mapping[str, Header]) -> None:
    """Raise ConfigError if the tensors of a weight are not those of its format."""
    weight, stored = checkpoint.quantized[name], checkpoint.stored
    try:
        components = weight.codec.components(weight.shape)
    except ConfigError as error:
        raise ConfigError(f"{file_of(checkpoint, name)}: {name}: {error}; download it again") from error
    for component, expected in components.items():
        source = weight.sources.get(component)
        if source is None:  # no tensor of the folder, but the offset of double quantization
            continue
        if source not in headers:
            raise ConfigError(
                f"{stored.folder}: {source} is missing, without which {name} cannot be decoded; download it again"
            )
        header = headers[source]
        fits = header.numel == expected.shape.numel() and header.dtype == DTYPE_NAMES[expected.dtype]
        if _are_codes(weight.codec, component) and header.dtype in DTYPES:  # in any dtype: their bytes are compared
            fits = header.numel * DTYPES[header.dtype].itemsize == expected.num_bytes
        if not fits:
            raise ConfigError(
                f"{stored.file_of(source)}: {source} is {header.dtype} of shape {tuple(header.shape)}, but {name} "
                f"{tuple(weight.shape)} needs {DTYPE_NAMES[expected.dtype]} of shape {tuple(expected.shape)}; download it again"
            )


def _require_shapes(checkpoint: StoredTensors, target: Target) -> None:
    """Raise ConfigError if a folder has a tensor with the shape of a weight, and its components imply another shape."""
    weights = {name: checkpoint.quantized[name] for name in target.sources}
    shapes = {name: each.shape_source for name, each in weights.items() if each.shape_source is not None}
    stated = checkpoint.stored.read([*shapes.values()])
    for name, source in shapes.items():
        if stated[source].tolist() != (shape := [*weights[name].shape]):
            raise ConfigError(
                f"{checkpoint.stored.file_of(source)}: {source} is {stated[source].tolist()}, but the components of {name} have the "
                f"shape {shape}; download it again"
            )


def _require_valid(file: Path, source: str, component: str, tensor: torch.Tensor, codec: Codec) -> None:
    """Raise ConfigError for values that no quantized weight has."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        require_finite(source, tensor, file)
    if component == "quant_map" and isinstance(codec, Bnb4Bit):
        table = torch.tensor(TABLES[codec.quant_type])
        if not torch.equal(tensor.view(-1), table):
            raise ConfigError(f"{file}: {source} is not the table of its format; download it again")
    if tensor.element_size() > 1:
        return
    if component != "scales" and not tensor.is_floating_point():  # codes, of which all are valid
        return
    # Numbers of 8 bits: E4M3 has a NaN of either sign; E8M0, the format of scales, has one.
    raw = tensor.view(torch.uint8)
    is_nan = (raw & 127) == 127 if tensor.dtype == torch.float8_e4m3fn else raw == 255
    if is_nan.any():
        raise ConfigError(f"{file}: {source} has {int(is_nan.sum()):,} NaN values; download it again")


def _are_codes(codec: Codec, component: str) -> bool:
    """Return whether a component is the codes of bitsandbytes, whose bytes may be stored in any dtype (``bnb_4bit_quant_storage``)."""
    return isinstance(codec, Bnb4Bit) and component == "weight"


def require_untransposed(checkpoint: StoredTensors, target: Target, model: Any) -> None:
    """Raise ConfigError if bitsandbytes has quantized the transpose of a weight: of Conv1D, whose square weights have the same shape."""
    weights = (checkpoint.quantized[name] for name in target.sources if name in checkpoint.quantized)
    module = model.get_submodule(target.name.rpartition(".")[0])
    if type(module).__name__ == "Conv1D" and any(isinstance(each.codec, Bnb4Bit) for each in weights):
        raise ConfigError(
            f"{checkpoint.stored.folder}: {target.name} was quantized as the transpose of the model's weight; use a bf16 copy of the model"
        )


# Codecs


def codecs_of(checkpoint: StoredTensors, parts: ModelParts) -> dict[str, Codec]:
    """Return the codecs of a model's parameters that a checkpoint has quantized, by full name.

    Raises:
        ConfigError: a parameter outside of blocks is quantized, or quantized weights cannot be joined.
    """
    found = _joined_codecs(checkpoint, find_conversion(parts.model, checkpoint.names))
    inside = {ref.name for u in range(parts.num_blocks) for ref in parts.units[block(u)]}
    if other := [name for name in found if name not in inside]:
        raise ConfigError(
            f"{checkpoint.stored.folder}: {other[0]} is quantized, but only the weights of blocks are decoded on the device; set "
            "dequantize: true, which decodes all while they are read"
        )
    return found


def _joined_codecs(checkpoint: StoredTensors, conversion: Conversion) -> dict[str, Codec]:
    """Return the codecs of a model's quantized parameters; raise ConfigError if quantized weights cannot be joined to one."""
    found: dict[str, Codec] = {}
    for target in conversion.targets:
        weights = {name: checkpoint.quantized[name] for name in target.sources if name in checkpoint.quantized}
        if not weights:
            continue
        first, codec = next((name, each.codec) for name, each in weights.items())
        if target.converter is None:
            found[target.name] = codec
        elif _can_be_joined(target, weights):
            found[target.name] = Stack(codec)
        else:
            raise ConfigError(
                f"{file_of(checkpoint, first)}: the quantized {first} and the tensors that belong to it cannot be joined to "
                f"{target.name}, of which transformers has made one parameter; use a bf16 copy"
            )
    return found


def _can_be_joined(target: Target, weights: Mapping[str, QuantizedWeight]) -> bool:
    """Return whether the components of a target's weights can be joined to those of a stack of matrices."""
    formats = {each.codec for each in weights.values()}
    if not target.is_stack or len(formats) > 1 or len(weights) < len(target.sources):
        return False
    # By pattern, such as that of gates: its weights have the same height for all experts.
    heights = {pattern: weights[name].shape[0] for name, pattern in target.sources.items()}
    return formats.pop().joins([*heights.values()])


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
        return codecs_of(open_checkpoint(self.folder, quantization), parts)
