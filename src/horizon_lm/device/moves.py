"""What a copy operation does, as data, so that a device may run it whole or in pieces."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

CopyFn = Callable[[torch.Tensor, torch.Tensor], None]  # (destination, source), of equal size, any dtypes and devices


class Move(Protocol):
    """One transfer. ``host_bytes``: bytes of it on the host's side, which is what crosses the link."""

    @property
    def host_bytes(self) -> int: ...

    def run(self, copy: CopyFn) -> None: ...

    def split(self, parts: int) -> "list[Move]": ...


@dataclass(frozen=True, slots=True)
class Copy:
    """``host`` to ``device`` or back; both 1-D and of equal length."""

    destination: torch.Tensor
    source: torch.Tensor
    host_bytes: int

    def run(self, copy: CopyFn) -> None:
        copy(self.destination, self.source)

    def split(self, parts: int) -> list[Move]:
        return [
            Copy(d, s, 0)
            for d, s in zip(self.destination.tensor_split(parts), self.source.tensor_split(parts), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Add:
    """Land a gradient on one that is already there: the sum is formed in fp32 and rounded once."""

    destination: torch.Tensor
    source: torch.Tensor
    host_bytes: int

    def run(self, copy: CopyFn) -> None:
        arrived = torch.empty_like(self.destination)
        copy(arrived, self.source)
        self.destination.copy_(self.destination.float().add_(arrived.float()))

    def split(self, parts: int) -> list[Move]:
        return [
            Add(d, s, 0)
            for d, s in zip(self.destination.tensor_split(parts), self.source.tensor_split(parts), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class GatherRows:
    """Rows of a host table to the device: ``destination[i] = table[rows[i]]``."""

    destination: torch.Tensor
    table: torch.Tensor
    rows: torch.Tensor

    @property
    def host_bytes(self) -> int:
        return self.rows.numel() * self.table.shape[1] * self.table.element_size()

    def run(self, copy: CopyFn) -> None:
        copy(self.destination, self.table.index_select(0, self.rows))

    def split(self, parts: int) -> list[Move]:
        return [
            GatherRows(d, self.table, r)
            for d, r in zip(self.destination.tensor_split(parts), self.rows.tensor_split(parts), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class ScatterRows:
    """Gradients of unique table rows to the host table, added in fp32; ``clear`` first empties the table."""

    table: torch.Tensor
    source: torch.Tensor
    rows: torch.Tensor
    clear: bool

    @property
    def host_bytes(self) -> int:
        return self.rows.numel() * self.table.shape[1] * self.table.element_size()

    def run(self, copy: CopyFn) -> None:
        arrived = torch.empty(self.source.shape, dtype=self.table.dtype)
        copy(arrived, self.source)
        if self.clear:
            self.table.zero_()
            self.table.index_copy_(0, self.rows, arrived)
        else:
            total = self.table.index_select(0, self.rows).float().add_(arrived.float())
            self.table.index_copy_(0, self.rows, total.to(self.table.dtype))

    def split(self, parts: int) -> list[Move]:
        pieces = zip(self.source.tensor_split(parts), self.rows.tensor_split(parts), strict=True)
        return [ScatterRows(self.table, s, r, self.clear and i == 0) for i, (s, r) in enumerate(pieces)]
