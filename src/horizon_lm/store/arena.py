"""Exact-size host memory: one anonymous mapping per kind, from which slabs are cut."""

import mmap
from typing import Any

import numpy as np
import torch

PAGE = mmap.PAGESIZE


class Arena:
    """One mapping of exactly the bytes asked for. Pages cost memory only once they are written.

    torch's own allocators round up (pinned memory to powers of two), which a byte budget cannot afford.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._map = mmap.mmap(-1, max(num_bytes, PAGE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # absent on macOS
            if hasattr(mmap, advice):
                try:
                    self._map.madvise(getattr(mmap, advice))
                except OSError:  # a kernel without huge pages: slower, not wrong
                    continue
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """The next ``numel`` elements, page-aligned, as a 1-D tensor that keeps the mapping alive."""
        num_bytes = numel * dtype.itemsize
        if self._used + num_bytes > self.num_bytes:
            raise AssertionError(f"arena of {self.num_bytes} bytes: {self._used} used, {num_bytes} more asked for")
        start, self._used = self._used, page_aligned(self._used + num_bytes)
        return self.at(start, numel, dtype)

    @property
    def position(self) -> int:
        """Where the next slab begins, in bytes."""
        return self._used

    def at(self, start: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return ``numel`` elements from byte ``start`` on, as a 1-D tensor with a storage of its own."""
        if numel == 0:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self._map, dtype=dtype, count=numel, offset=start)


def page_aligned(num_bytes: int) -> int:
    """``num_bytes`` rounded up to whole pages."""
    return -(-num_bytes // PAGE) * PAGE


def as_array(tensor: torch.Tensor) -> Any:
    """The same memory as a numpy array; numpy has no bf16, so its 16 bits are shown as uint16."""
    if tensor.dtype == torch.bfloat16:
        return tensor.detach().view(torch.int16).numpy().view(np.uint16)
    return tensor.detach().numpy()
