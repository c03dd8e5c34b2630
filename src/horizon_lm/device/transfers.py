"""Transfers as data, so that a device can run them whole or in pieces.

Shapes: V rows of a table, R rows of a batch, H hidden.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from horizon_lm.memory.codecs.base import Codec

SquaredNorm = Any  # a sum of squares: a number, or a one-element tensor that a device is still computing
Report = Callable[[SquaredNorm], None]


class Link(Protocol):
    """The transfers of a device. Both tensors are 1-D or rows (R, H), of equal size, on any device and of any dtype."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None: ...

    def decode(self, destination: torch.Tensor, packed: torch.Tensor, codec: Codec, dtype: torch.dtype) -> None:
        """Copy the codes of a quantized tensor to the device, unless they are there, and decode them there.

        Args:
            destination: the decoded tensor.
            packed: the codes and scales in host memory, or on the device, 1-D uint8.
            codec: the codec, which finds the tensor's codes and scales among them.
            dtype: the dtype that values are rounded to first.
        """
        ...

    def gather(self, destination: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> None:
        """Gather rows of a host table: ``destination[i] = table[rows[i]]``."""
        ...

    def call(self, function: Callable[[], None]) -> None:
        """Call a function that enqueues other work on the stream of these transfers."""
        ...

    def finish(self) -> None:
        """Make the stream of these transfers wait for what the link has enqueued elsewhere."""
        ...

    def land(self, destination: torch.Tensor, source: torch.Tensor, add: bool) -> SquaredNorm:
        """Land gradients in host memory: overwrite the destination, or add in fp32 and round once.

        A GPU adds on the device: it reads the destination over the link and writes the sum back.

        Returns:
            The sum of squares of the stored result.
        """
        ...

    def land_rows(self, table: torch.Tensor, source: torch.Tensor, rows: torch.Tensor, add: bool) -> SquaredNorm:
        """Land the gradients of distinct rows in a host table. Without ``add``, they count as zero before, whatever they are.

        Returns:
            The change of the table's sum of squares.
        """
        ...


class Move(Protocol):
    """A transfer, or a piece of work in host memory."""

    @property
    def host_bytes(self) -> int:
        """The bytes that cross the link."""
        ...

    def run(self, link: Link) -> None: ...

    def split(self, parts: int) -> "list[Move]":
        """Split the move into smaller moves that have the same effect if they run in this order."""
        ...


class _Chained(Sequence[Move]):
    """The moves of several sequences, which may make each move only when it is taken. So they are not joined in a list."""

    def __init__(self, parts: Sequence[Sequence[Move]]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    def __getitem__(self, number: Any) -> Any:  # a number of a move; nobody takes slices
        for part in self._parts:
            if number < len(part):
                return part[number]
            number -= len(part)
        raise IndexError(number)


def chained(parts: Sequence[Sequence[Move]]) -> Sequence[Move]:
    """Return the moves of several sequences, one after the other."""
    return parts[0] if len(parts) == 1 else _Chained(parts)


def _split(parts: int, *tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield the parts of tensors of one length: the first part of each tensor, then the second of each, and so on."""
    return zip(*(tensor.tensor_split(parts) for tensor in tensors), strict=True)


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy from host to device or from device to host; both tensors are 1-D and of equal length."""

    destination: torch.Tensor
    source: torch.Tensor
    host_bytes: int

    def run(self, link: Link) -> None:
        link.copy(self.destination, self.source)

    def split(self, parts: int) -> list[Move]:
        # The whole move counts the bytes, so its parts count none.
        return [Copy(d, s, host_bytes=0) for d, s in _split(parts, self.destination, self.source)]


@dataclass(frozen=True, slots=True)
class Decode:
    """A copy of a quantized tensor from host to device, where it is decoded. The arguments are those of `Link.decode`."""

    destination: torch.Tensor
    packed: torch.Tensor
    codec: Codec
    dtype: torch.dtype

    @property
    def host_bytes(self) -> int:
        return self.codec.num_bytes(self.destination.shape)

    def run(self, link: Link) -> None:
        link.decode(self.destination, self.packed, self.codec, self.dtype)

    def split(self, parts: int) -> list[Move]:
        return [self]


@dataclass(frozen=True, slots=True)
class DecodeThere(Decode):
    """The decoding of a quantized tensor whose codes are on the device already."""

    @property
    def host_bytes(self) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Land:
    """A landing of gradients. ``add`` adds to the gradients in the destination instead of replacing them."""

    destination: torch.Tensor
    source: torch.Tensor
    report: Report
    add: bool = field(kw_only=True)

    @property
    def host_bytes(self) -> int:
        return self.destination.numel() * self.destination.element_size()

    def run(self, link: Link) -> None:
        self.report(link.land(self.destination, self.source, self.add))

    def split(self, parts: int) -> list[Move]:
        return [Land(d, s, self.report, add=self.add) for d, s in _split(parts, self.destination, self.source)]


@dataclass(frozen=True, slots=True)
class GatherRows:
    """A copy of rows (R,) of a host table (V, H) to the device (R, H): ``destination[i] = table[rows[i]]``."""

    destination: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor

    @property
    def host_bytes(self) -> int:
        return self.rows.numel() * self.table.shape[1] * self.table.element_size()

    def run(self, link: Link) -> None:
        link.gather(self.destination, self.table, self.rows)

    def split(self, parts: int) -> list[Move]:
        return [GatherRows(d, self.table, r) for d, r in _split(parts, self.destination, self.rows)]


@dataclass(frozen=True, slots=True)
class LandRows:
    """A landing of gradients (R, H) of distinct rows in a host table (V, H). The rows in ``clear`` are zeroed first."""

    table: torch.Tensor
    source: torch.Tensor
    rows: torch.Tensor
    clear: torch.Tensor | slice | None
    report: Report
    add: bool = field(kw_only=True)

    @property
    def host_bytes(self) -> int:
        return self.rows.numel() * self.table.shape[1] * self.table.element_size()

    def run(self, link: Link) -> None:
        if self.clear is not None:
            # On the host, while a GPU may still compute the gradients, for which `land_rows` waits.
            self.table[self.clear] = 0
        self.report(link.land_rows(self.table, self.source, self.rows, self.add))

    def split(self, parts: int) -> list[Move]:
        return [
            LandRows(self.table, s, r, self.clear if i == 0 else None, self.report, add=self.add)
            for i, (s, r) in enumerate(_split(parts, self.source, self.rows))
        ]
