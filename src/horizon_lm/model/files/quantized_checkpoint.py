"""Read a folder of quantized weights as it was published: each weight is the codes, scales and tables of its format."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from horizon_lm.common.units import block
from horizon_lm.errors import ConfigError
from horizon_lm.memory.codecs.base import Codec
from horizon_lm.memory.codecs.bnb4bit import TABLES, Bnb4Bit
from horizon_lm.memory.codecs.stack import Stack
from horizon_lm.model.files.checkpoint_reader import DTYPE_NAMES, DTYPES, Checkpoint
from horizon_lm.model.files.conversion import Conversion, Target, find_conversion
from horizon_lm.model.files.quantized_layouts import STATE, QuantizedWeight, find_weights
from horizon_lm.model.files.weight_files import Header
from horizon_lm.model.finite import require_finite
from horizon_lm.model.parts import ModelParts
from horizon_lm.model.quantization import expected_codecs, matrix_codec


class QuantizedCheckpoint(Checkpoint):
    """A checkpoint whose quantized weights appear under their own names, with their decoded shapes.

    Raises:
        ConfigError: a component of a weight is missing, or of another dtype or shape than its format has.
        ModelNotSupportedError: the format is none that can be decoded.
    """

    def __init__(self, folder: Path, quantization: Mapping[str, Any]) -> None:
        super().__init__(folder)
        codec, headers = matrix_codec(quantization, str(folder)), super().headers()
        self.quantized: dict[str, QuantizedWeight] = {}  # empty while `find_weights` reads tensors by their own names
        self.quantized = find_weights(self, codec, headers)
        # Tensors of the folder that appear only as parts of a weight: components, descriptions and shapes.
        parts = {source for each in self.quantized.values() for source in each.sources.values()}
        parts |= {name for name in headers if STATE in name}
        parts |= {each.shape_source for each in self.quantized.values() if each.shape_source is not None}
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
            elif self._can_be_joined(target, weights):
                found[target.name] = Stack(codec)
            else:
                raise ConfigError(
                    f"{self.file_of(next(iter(weights)))}: the quantized {next(iter(weights))} and the tensors that belong to it "
                    f"cannot be joined to {target.name}, of which transformers has made one parameter; use a bf16 copy"
                )
        return found

    def _can_be_joined(self, target: Target, weights: Mapping[str, QuantizedWeight]) -> bool:
        """Return whether the components of a target's weights can be joined to those of a stack of matrices."""
        formats = {each.codec for each in weights.values()}
        if not target.is_stack or len(formats) > 1 or len(weights) < len(target.sources):
            return False
        # By pattern, such as that of gates: its weights have the same height for all experts.
        heights = {pattern: weights[name].shape[0] for name, pattern in target.sources.items()}
        return formats.pop().joins([*heights.values()])

    def pack(self, model: Any, target: Target, codec: Codec, packed: torch.Tensor, shape: torch.Size) -> None:
        """Read the components of a parameter, and write them into ``packed`` as its codec arranges them.

        All sources of ``target`` are quantized weights, which transformers' conversion of the model joins to a parameter of this shape.

        Raises:
            ConfigError: a component cannot be read, or has values that no quantized weight has.
        """
        components: dict[str, torch.Tensor] = {}
        first = next(iter(target.sources))
        self._require_shapes(target)
        for component in self.quantized[first].sources:
            sources = {name: self.quantized[name].sources[component] for name in target.sources}
            tensors = super().read(list(sources.values()))  # as they are stored; a subclass decodes in `read`
            for source in tensors:
                if _are_codes(self.quantized[first].codec, component):
                    tensors[source] = tensors[source].contiguous().view(torch.uint8)
                self._require_valid(source, component, tensors[source], self.quantized[first].codec)
            by_weight = {name: tensors[source] for name, source in sources.items()}
            (components[component],) = target.convert(model, by_weight).values()
        if (offset := self.quantized[first].offset) is not None:
            components["nested_offset"] = torch.tensor([offset])
        try:
            codec.pack(components, packed, shape)
        except ConfigError as error:
            raise ConfigError(f"{self.file_of(first)}: {first}: {error}; download it again") from error

    # Checks

    def _require_components(self, name: str, weight: QuantizedWeight, headers: Mapping[str, Header]) -> None:
        """Raise ConfigError if the tensors of a weight are not those of its format."""
        try:
            components = weight.codec.components(weight.shape)
        except ConfigError as error:
            raise ConfigError(f"{self.file_of(name)}: {name}: {error}; download it again") from error
        for component, expected in components.items():
            source = weight.sources.get(component)
            if source is None:  # no tensor of the folder, but the offset of double quantization
                continue
            if source not in headers:
                raise ConfigError(
                    f"{self.folder}: {source} is missing, without which {name} cannot be decoded; download it again"
                )
            header = headers[source]
            fits = header.numel == expected.shape.numel() and header.dtype == DTYPE_NAMES[expected.dtype]
            if _are_codes(weight.codec, component) and header.dtype in DTYPES:  # in any dtype: their bytes are compared
                fits = header.numel * DTYPES[header.dtype].itemsize == expected.num_bytes
            if not fits:
                raise ConfigError(
                    f"{super().file_of(source)}: {source} is {header.dtype} of shape {tuple(header.shape)}, but {name} "
                    f"{tuple(weight.shape)} needs {DTYPE_NAMES[expected.dtype]} of shape {tuple(expected.shape)}; download it again"
                )

    def _require_shapes(self, target: Target) -> None:
        """Raise ConfigError if a folder has a tensor with the shape of a weight, and its components imply another shape."""
        shapes = {name: source for name in target.sources if (source := self.quantized[name].shape_source) is not None}
        stated = super().read([*shapes.values()])  # as they are stored; a subclass decodes in `read`
        for name, source in shapes.items():
            if stated[source].tolist() != (shape := [*self.quantized[name].shape]):
                raise ConfigError(
                    f"{super().file_of(source)}: {source} is {stated[source].tolist()}, but the components of {name} have the shape "
                    f"{shape}; download it again"
                )

    def _require_valid(self, source: str, component: str, tensor: torch.Tensor, codec: Codec) -> None:
        """Raise ConfigError for values that no quantized weight has."""
        place = super().file_of(source)
        if tensor.is_floating_point() and tensor.element_size() > 1:
            require_finite(source, tensor, place)
        if component == "quant_map" and isinstance(codec, Bnb4Bit):
            table = torch.tensor(TABLES[codec.quant_type])
            if not torch.equal(tensor.view(-1), table):
                raise ConfigError(f"{place}: {source} is not the table of its format; download it again")
        if tensor.element_size() > 1:
            return
        if component != "scales" and not tensor.is_floating_point():  # codes, of which all are valid
            return
        # Numbers of 8 bits: E4M3 has a NaN of either sign; E8M0, the format of scales, has one.
        raw = tensor.view(torch.uint8)
        is_nan = (raw & 127) == 127 if tensor.dtype == torch.float8_e4m3fn else raw == 255
        if is_nan.any():
            raise ConfigError(f"{place}: {source} has {int(is_nan.sum()):,} NaN values; download it again")


def _are_codes(codec: Codec, component: str) -> bool:
    """Return whether a component is the codes of bitsandbytes, whose bytes may be stored in any dtype (``bnb_4bit_quant_storage``)."""
    return isinstance(codec, Bnb4Bit) and component == "weight"


def codecs_of(checkpoint: QuantizedCheckpoint, parts: ModelParts) -> dict[str, Codec]:
    """Return the codecs of a model's parameters that a checkpoint has quantized, by full name.

    Raises:
        ConfigError: a parameter outside of blocks is quantized, or quantized weights cannot be joined.
    """
    conversion = find_conversion(parts.model, checkpoint.names)
    require_untransposed(checkpoint, conversion, parts)
    found = checkpoint.codecs(conversion)
    inside = {ref.name for u in range(parts.num_blocks) for ref in parts.units[block(u)]}
    if other := [name for name in found if name not in inside]:
        raise ConfigError(
            f"{checkpoint.folder}: {other[0]} is quantized, but only the weights of blocks are decoded on the device; set dequantize: true, "
            "which decodes all while they are read"
        )
    return found


def require_untransposed(checkpoint: QuantizedCheckpoint, conversion: Conversion, parts: ModelParts) -> None:
    """Raise ConfigError if bitsandbytes has quantized the transpose of a weight: of Conv1D, whose square weights have the same shape."""
    classes = {ref.name: type(ref.places[0][0]).__name__ for ref in parts.refs()}
    for target in conversion.targets:
        weights = (checkpoint.quantized[name] for name in target.sources if name in checkpoint.quantized)
        if classes.get(target.name) == "Conv1D" and any(isinstance(each.codec, Bnb4Bit) for each in weights):
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
