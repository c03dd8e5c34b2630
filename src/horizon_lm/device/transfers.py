"""What an operation moves, as data, so that a device may run it whole or in pieces."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

SquaredNorm = Any  # a sum of squares: a number, or a tensor of one on a device that is still computing it
Report = Callable[[SquaredNorm], None]


class Link(Protocol):
    """How a device transfers. Tensors of a pair are 1-D, or rows, and of equal size, of any dtypes and devices."""

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None: ...

    def gather(self, destination: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> None:
        """``destination[i] = table[rows[i]]``, from a table in host memory."""
        ...

    def land(self, destination: torch.Tensor, source: torch.Tensor, add: bool) -> SquaredNorm:
        """Gradients to host memory, in place of what is there or added to it in fp32 and rounded once.

        Returns:
            The sum of squares of what is there now.
        """
        ...

    def land_rows(self, table: torch.Tensor, source: torch.Tensor, rows: torch.Tensor, add: bool) -> SquaredNorm:
        """Gradients of distinct rows of a host table, which without ``add`` is known to hold zeros there.

        Returns:
            The change of the table's sum of squares.
        """
        ...


class Move(Protocol):
    """One transfer, or a piece of work in host memory. ``host_bytes``: what of it crosses the link."""

    @property
    def host_bytes(self) -> int: ...

    def run(self, link: Link) -> None: ...

    def split(self, parts: int) -> "list[Move]": ...


@dataclass(frozen=True, slots=True)
class Copy:
    """From host to device or back; both 1-D and of equal length."""

    destination: torch.Tensor
    source: torch.Tensor
    host_bytes: int

    def run(self, link: Link) -> None:
        link.copy(self.destination, self.source)

    def split(self, parts: int) -> list[Move]:
        return [
            Copy(d, s, 0)
            for d, s in zip(self.destination.tensor_split(parts), self.source.tensor_split(parts), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Land:
    """Gradients from the device to the host; ``add``: onto those that are there."""

    destination: torch.Tensor
    source: torch.Tensor
    add: bool
    report: Report

    @property
    def host_bytes(self) -> int:
        return self.destination.numel() * self.destination.element_size()

    def run(self, link: Link) -> None:
        self.report(link.land(self.destination, self.source, self.add))

    def split(self, parts: int) -> list[Move]:
        return [
            Land(d, s, self.add, self.report)
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

    def run(self, link: Link) -> None:
        link.gather(self.destination, self.table, self.rows)

    def split(self, parts: int) -> list[Move]:
        return [
            GatherRows(d, self.table, r)
            for d, r in zip(self.destination.tensor_split(parts), self.rows.tensor_split(parts), strict=True)
        ]


@dataclass(frozen=True, slots=True)
class LandRows:
    """Gradients of distinct table rows to the host's table. The rows ``clear`` are emptied first; None for no row."""

    table: torch.Tensor
    source: torch.Tensor
    rows: torch.Tensor
    clear: torch.Tensor | slice | None
    add: bool
    report: Report

    @property
    def host_bytes(self) -> int:
        return self.rows.numel() * self.table.shape[1] * self.table.element_size()

    def run(self, link: Link) -> None:
        if self.clear is not None:
            self.table[self.clear] = 0
        self.report(link.land_rows(self.table, self.source, self.rows, self.add))

    def split(self, parts: int) -> list[Move]:
        pieces = zip(self.source.tensor_split(parts), self.rows.tensor_split(parts), strict=True)
        return [
            LandRows(self.table, s, r, self.clear if i == 0 else None, self.add, self.report)
            for i, (s, r) in enumerate(pieces)
        ]
