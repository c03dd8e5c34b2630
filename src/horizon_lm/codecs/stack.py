"""Stacked tensors, such as the experts of a layer, each of them quantized by itself."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from horizon_lm.codecs.base import Codec, Component, Part
from horizon_lm.ranges import length, pieces


@dataclass(frozen=True, slots=True)
class Stack(Codec):
    """A tensor (E, ...) of E tensors in the same format.

    Attributes:
        of: the codec of one of them.
    """

    of: Codec

    def components(self, shape: Sequence[int]) -> dict[str, Component]:
        inner = self.of.components(shape[1:])
        return {name: Component(torch.Size((shape[0], *each.shape)), each.dtype) for name, each in inner.items()}

    def parts(self, shape: Sequence[int], max_bytes: int) -> Iterator[Part]:
        one, bytes_each = torch.Size(shape[1:]), self.of.num_bytes(shape[1:])
        if bytes_each > max_bytes:
            for index in range(shape[0]):
                yield from self._parts_of(index, one, max_bytes)
            return
        for part in pieces(shape[0], max_bytes // bytes_each):
            rows = dict.fromkeys(self.of.components(one), part)
            yield Part(part.start * one.numel(), part.stop * one.numel(), torch.Size((length(part), *one)), rows)

    def _parts_of(self, index: int, one: torch.Size, max_bytes: int) -> Iterator[Part]:
        """Cut the tensor of this index, which has the shape ``one``."""
        start, own = index * one.numel(), slice(index, index + 1)
        for part in self.of.parts(one, max_bytes):
            inner = {name: each if isinstance(each, tuple) else (each,) for name, each in part.rows.items()}
            rows = {name: (own, *each) for name, each in inner.items()}
            yield Part(start + part.start, start + part.stop, torch.Size((1, *part.shape)), rows)

    def decode_components(self, components: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        for index, each in enumerate(out):
            self.of.decode_components({name: part[index] for name, part in components.items()}, each)

    def encode_components(self, weight: torch.Tensor, components: Mapping[str, torch.Tensor]) -> None:
        for index, each in enumerate(weight):
            self.of.encode_components(each, {name: part[index] for name, part in components.items()})
