"""Stacked tensors, such as the experts of a layer, each of them quantized by itself, and consecutive ones of a stack."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from horizon_lm.common.ranges import length, pieces
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
        """Cut a stack into whole items, as many as fit into ``max_bytes``; if not even one fits, cut each item into parts of its own."""
        item_shape, item_bytes = torch.Size(shape[1:]), self.of.num_bytes(shape[1:])
        if item_bytes > max_bytes:
            for index in range(shape[0]):
                yield from self._parts_of(index, item_shape, max_bytes)
            return
        numel = item_shape.numel()
        for items in pieces(shape[0], max_bytes // item_bytes):
            rows = dict.fromkeys(self.of.components(item_shape), items)
            yield Part(
                start=items.start * numel,
                stop=items.stop * numel,
                shape=torch.Size((length(items), *item_shape)),
                rows=rows,
            )

    def _parts_of(self, index: int, item_shape: torch.Size, max_bytes: int) -> Iterator[Part]:
        """Cut the item of this index into the parts of its own format, each as a stack of one."""
        start, item = index * item_shape.numel(), slice(index, index + 1)
        for part in self.of.parts(item_shape, max_bytes):
            rows_in_item = {name: each if isinstance(each, tuple) else (each,) for name, each in part.rows.items()}
            rows = {name: (item, *each) for name, each in rows_in_item.items()}
            yield Part(start=start + part.start, stop=start + part.stop, shape=torch.Size((1, *part.shape)), rows=rows)

    def decode_components(self, components: Mapping[str, torch.Tensor], out: torch.Tensor) -> None:
        for index, each in enumerate(out):
            self.of.decode_components({name: part[index] for name, part in components.items()}, each)

    def encode_components(self, weight: torch.Tensor, components: Mapping[str, torch.Tensor]) -> None:
        for index, each in enumerate(weight):
            self.of.encode_components(each, {name: part[index] for name, part in components.items()})
