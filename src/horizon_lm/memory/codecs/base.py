"""The interface of a codec, and the layout of a quantized tensor's bytes.

A tensor is packed as its components (codes, scales, tables) one after the other, under the names that published folders
have for them. A part of a tensor is packed in the same way, so that a device can copy and decode one part at a time.

A new format is also named in `model.quantization`, `model.files.quantized_layouts` and the decoders of `memory.kernels`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from horizon_lm.common.constants import COMPONENT_ALIGNMENT
from horizon_lm.errors import ConfigError

_AT_ONCE = 1 << 20  # packed bytes that are decoded at once, which bounds the memory for it


@dataclass(frozen=True, slots=True)
class Component:
    """The shape and dtype of a component."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a quantized tensor that can be decoded by itself.

    Attributes:
        start, stop: its elements in the flattened tensor.
        shape: its shape.
        rows: its rows in each component, by name; a tuple has a slice for each of the first dimensions.
    """

    start: int
    stop: int
    shape: torch.Size
    rows: Mapping[str, slice | tuple[slice, ...]]


class Codec(ABC):
    """A format of quantized weights. Every value is computed in float32, and rounded once to the dtype of the output."""

    @abstractmethod
    def components(self, shape: Sequence[int]) -> dict[str, Component]:
        """Return the components of a tensor of this shape. Raise ConfigError if it cannot be quantized."""

    @abstractmethod
    def decode_components(self, components: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        """Decode components into ``out``, which has the tensor's shape."""

    @abstractmethod
    def encode_components(self, weight: torch.Tensor, components: Mapping[str, torch.Tensor]) -> None:
        """Quantize a weight into its components."""

    @abstractmethod
    def parts(self, shape: Sequence[int], max_bytes: int) -> Iterator[Part]:
        """Cut a tensor into parts of at most ``max_bytes`` packed bytes, or as small as the format allows."""

    def joins(self, heights: Sequence[int]) -> bool:
        """Return whether matrices of these heights can be packed as one, one below the other, by joining their components by rows."""
        return False

    def num_bytes(self, shape: Sequence[int]) -> int:
        """Return the bytes of a packed tensor of this shape."""
        return sum(_aligned(each.num_bytes) for each in self.components(shape).values())

    def starts(self, shape: Sequence[int]) -> dict[str, int]:
        """Return the byte of a packed tensor at which each component begins."""
        starts, end = {}, 0
        for name, each in self.components(shape).items():
            starts[name] = end
            end += _aligned(each.num_bytes)
        return starts

    def views(self, packed: torch.Tensor, shape: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the components of a packed tensor, as views of its bytes."""
        starts = self.starts(shape)
        return {
            name: packed[starts[name] : starts[name] + each.num_bytes].view(each.dtype).view(each.shape)
            for name, each in self.components(shape).items()
        }

    def pack(self, components: Mapping[str, torch.Tensor], packed: torch.Tensor, shape: Sequence[int]) -> None:
        """Copy components into a packed tensor.

        Raises:
            ConfigError: a component is missing, or has another shape or dtype.
        """
        for name, place in self.views(packed, shape).items():
            if name not in components:
                raise ConfigError(f"{name} is missing")
            given = components[name]
            if given.dtype != place.dtype or given.numel() != place.numel():
                raise ConfigError(
                    f"{name} is {_name(given.dtype)} of shape {tuple(given.shape)}, but {_name(place.dtype)} of shape "
                    f"{tuple(place.shape)} is needed"
                )
            place.copy_(given.reshape(place.shape))

    def encode(self, weight: torch.Tensor, packed: torch.Tensor) -> None:
        """Quantize a weight into its bytes."""
        self.encode_components(weight, self.views(packed, weight.shape))

    def decode(self, packed: torch.Tensor, out: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Decode bytes into ``out``, which has the tensor's shape, and return it.

        Args:
            packed: codes and scales, 1-D uint8.
            out: the decoded tensor.
            dtype: dtype that values are rounded to first, before the dtype of ``out``; None to round once.
        """
        for components, place in self.cut(packed, out, _AT_ONCE):
            self.decode_part(components, place, dtype or out.dtype)
        return out

    def cut(
        self, packed: torch.Tensor, out: torch.Tensor, max_bytes: int
    ) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield views of each part of at most ``max_bytes``: of its components, and of its place in ``out``, of the tensor's shape."""
        components, flat = self.views(packed, out.shape), out.view(-1)
        for part in self.parts(out.shape, max_bytes):
            of_part = {name: components[name][rows] for name, rows in part.rows.items()}
            yield of_part, flat[part.start : part.stop].view(part.shape)

    def decode_part(self, components: Mapping[str, torch.Tensor], out: torch.Tensor, dtype: torch.dtype) -> None:
        """Decode the components of a part into ``out``, after rounding to ``dtype``."""
        if dtype == out.dtype:
            self.decode_components(components, out)
        else:
            rounded = torch.empty(out.shape, dtype=dtype, device=out.device)
            self.decode_components(components, rounded)
            out.copy_(rounded)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // COMPONENT_ALIGNMENT) * COMPONENT_ALIGNMENT


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
