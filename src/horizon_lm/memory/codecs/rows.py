"""Consecutive tensors of a quantized stack, such as some of the experts of a layer."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from horizon_lm.memory.codecs.base import Codec, Component, Part


@dataclass(frozen=True, slots=True)
class Rows(Codec):
    """Some tensors of a stack, from ``start`` on. The packed bytes are those of the whole stack, of which `views` selects these tensors.

    Attributes:
        of: the codec of the stack, whose components all have its first dimension.
        total: the number of tensors in the stack.
        start: the first of them.
    """

    of: Codec
    total: int
    start: int

    def components(self, shape: Sequence[int]) -> dict[str, Component]:
        return self.of.components(shape)

    def views(self, packed: torch.Tensor, shape: Sequence[int]) -> dict[str, torch.Tensor]:
        whole = self.of.views(packed, (self.total, *shape[1:]))
        return {name: each[self.start : self.start + shape[0]] for name, each in whole.items()}

    def parts(self, shape: Sequence[int], max_bytes: int) -> Iterator[Part]:
        return self.of.parts(shape, max_bytes)

    def decode_components(self, components: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        self.of.decode_components(components, out)

    def encode_components(self, weight: torch.Tensor, components: Mapping[str, torch.Tensor]) -> None:
        self.of.encode_components(weight, components)
