"""The ranges of host memory that CUDA has page-locked in place."""

from bisect import bisect_left
from collections.abc import Iterator
from contextlib import suppress

import torch

from horizon_lm.common.constants import PAGE

REGISTER_PIECE = 64 * 2**30  # one registration of 512 GiB or more fails on recent drivers (LMCache#5177)


class PageLocks:
    """A record of page-locked host memory, which it registers with CUDA piece by piece.

    A copy may not cross from one registration into another, nor into memory that is not locked, and
    ``Tensor.is_pinned`` checks only a tensor's first byte. Copies are therefore split where registrations end
    (`parts`).

    Attributes:
        device: the device through which memory is registered.
        error: CUDA's reason for the last failure; None if there was none.
        failed_bytes: bytes of memory in use that could not be locked.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        # Sorted address ranges. The list is replaced and never changed in place, because copy threads read it.
        self._locked: list[tuple[int, int]] = []
        self._memory: dict[int, torch.Tensor] = {}  # buffers by address, to keep registered memory alive
        self._failed: dict[int, int] = {}  # failed bytes, by address
        self.error: str | None = None

    @property
    def failed_bytes(self) -> int:
        return sum(self._failed.values())

    def lock(self, buffer: torch.Tensor) -> None:
        """Page-lock as much of a contiguous buffer as CUDA allows. CUDA reports an error for an empty one."""
        if not buffer.numel():
            return
        raw = buffer.view(-1).view(torch.uint8)
        for piece in raw.split(REGISTER_PIECE):
            # Touch the pages with all cores first; the driver would touch them with one.
            piece[::PAGE].add_(0)
            error = self.register(piece)
            start, num_bytes = piece.data_ptr(), piece.numel()
            if error is None:
                self._memory[start] = piece
                self._locked = sorted([*self._locked, (start, start + num_bytes)])
            else:
                self.error = error
                self._failed[start] = num_bytes

    def unlock(self, buffer: torch.Tensor) -> None:
        """Undo `lock` for a buffer that is no longer used."""
        for piece in buffer.view(-1).view(torch.uint8).split(REGISTER_PIECE):
            start = piece.data_ptr()
            self._failed.pop(start, None)
            self._unregister(start)

    def unlock_all(self) -> None:
        """Undo every `lock` once the device is idle."""
        if self._memory:
            torch.cuda.synchronize(self.device)
        for start in list(self._memory):
            self._unregister(start)

    def _unregister(self, start: int) -> None:
        """Unlock the piece that begins at an address, if it is locked."""
        # Popped first, because the garbage collector may call `unlock_all` in another thread. ``piece`` keeps the memory alive until then.
        piece = self._memory.pop(start, None)
        if piece is None:
            return
        self._locked = [range_ for range_ in self._locked if range_[0] != start]
        with torch.cuda.device(self.device):
            torch.cuda.cudart().cudaHostUnregister(start)

    def register(self, piece: torch.Tensor) -> str | None:
        """Register one piece of memory with CUDA. Return CUDA's reason if this fails."""
        with torch.cuda.device(self.device):  # otherwise CUDA could create a context on another device
            code = torch.cuda.cudart().cudaHostRegister(piece.data_ptr(), piece.numel(), 0)
            if int(code) == 0:
                return None
            error: str = torch.cuda.cudart().cudaGetErrorString(code)
            # Clear the error of a failed call, which the next kernel launch would report as its own.
            with suppress(RuntimeError):
                torch.zeros(1, device=self.device)
        return error

    def parts(self, tensor: torch.Tensor) -> Iterator[tuple[int, int, bool]]:
        """Split a 1-D host tensor where registrations begin and end. Yield the start and stop of each part in elements, and whether it is
        locked.
        """
        size = tensor.element_size()
        first = tensor.data_ptr()
        last = first + tensor.numel() * size
        found = self._locked_within(first, last)
        if not found:  # not registered here, but torch may have page-locked it
            yield 0, tensor.numel(), tensor.is_pinned()
            return
        end = first  # the address behind the parts that were yielded
        for start, stop in [*found, (last, last)]:  # the empty range ends the part behind the last registration
            if end < start:
                yield (end - first) // size, (start - first) // size, False
            if start < stop:
                yield (start - first) // size, (stop - first) // size, True
            end = stop

    def _locked_within(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return the parts of locked ranges that lie between two addresses, in order."""
        locked, found = self._locked, []
        # Ranges are disjoint, so of those that begin earlier only the last may reach behind `first`.
        before = max(0, bisect_left(locked, (first, first)) - 1)
        for start, stop in locked[before:]:
            if start >= last:
                break
            if stop > first:
                found.append((max(start, first), min(stop, last)))
        return found
